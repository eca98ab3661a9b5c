import os
import signal
import sys
import time
import traceback

rank = int(os.environ["RANK"])


def train_step(step, loss):
    if rank != 3:
        signal.pause()
    while not os.path.exists("told"):
        time.sleep(0.01)
    raise ValueError(f"loss is {loss.item()} at step {step}")


class Loss:
    def item(self):
        return float("nan")


def hook(*raised):  # as torch's
    print(f"[rank{rank}]: {''.join(traceback.format_exception(*raised))}", end="", file=sys.stderr)


sys.excepthook = hook
if rank == 0:
    print("step 0: loss 1.000")
    print("step 1: loss 0.500")
    open("told", "w").close()
train_step(2, Loss())
