"""Something for a client of debugpy: a line to stop at in each rank."""

import os

rank = int(os.environ["RANK"])
answer = 41 + rank
print(f"the answer of rank {rank} is {answer}")  # BREAK
