"""Has so many GiB of a GPU and computes there: `holds.py GIB HOW`; once the sign `go` is up it ends as HOW says."""

import os
import sys
import time
from pathlib import Path

import torch

import ddplaunch

gib, how = int(sys.argv[1]), sys.argv[2]
signs = Path(os.environ["DDP_TEST_DIR"])
held = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
factor = torch.ones(4096, 4096, device="cuda")
began, step = time.monotonic(), 0
while how == "stays" or not (signs / "go").exists():
    product = factor @ factor
    torch.cuda.synchronize()
    step += 1
    if step == 3:
        (signs / "holds.part").write_text(str(os.getpid()))
        (signs / "holds.part").rename(signs / "holds")
    if step % 50 == 3:
        print("step", step, flush=True)
        ddplaunch.progress(step, loss=product[0, 0])
if how == "raises":
    raise ValueError("as it was told")
if how == "fills":
    more = [held]
    while True:
        more.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
