"""A worker that draws two progress bars from sign to sign, one in the other as tqdm does; rank 1 dies in the middle of them."""

import os
import signal
import sys

from signs import RANK, all_ready, put, wait


def draw(percent: int) -> None:
    outer = f"\r訓練 rank {RANK}: {percent}%|{'#' * (percent // 10):<10}| the rest of this row is long\n"
    sys.stderr.write(f"{outer}\r\x1b[36mbatch\x1b[0m: {percent}%\x1b[A")
    sys.stderr.flush()


all_ready()
draw(10)
put(f"drawn-{RANK}")
wait("go-1")
sys.stderr.write(f"\r\x1b[Jline of {RANK}\n")
draw(50 if RANK else 90)
wait("go-2")
if RANK:
    os.kill(os.getpid(), signal.SIGKILL)
draw(100)
sys.stderr.write("\n\n")
sys.stderr.flush()
put("complete")
wait("never")
