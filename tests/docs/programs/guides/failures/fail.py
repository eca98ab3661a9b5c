import os
import signal


def train_step(rank):
    if rank != 1:
        signal.pause()
    raise ValueError("loss is nan")


# the page shows the numbers of these lines
train_step(int(os.environ["RANK"]))
