"""A worker with a progress bar that redraws at every step."""

import os
import sys

from tqdm import tqdm

for _ in tqdm(range(int(sys.argv[1])), mininterval=0, miniters=1, desc=f"rank {os.environ['RANK']}"):
    pass
