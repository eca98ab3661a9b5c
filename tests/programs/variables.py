"""A worker that puts up its variables as variables-RANK."""

import json
import os

from signs import RANK, put

put(f"variables-{RANK}", json.dumps(dict(os.environ)))
