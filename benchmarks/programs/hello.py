"""Says hello, without torch."""

import os

print("hello from rank", os.environ["RANK"])
