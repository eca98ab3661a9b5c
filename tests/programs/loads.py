"""Workers with a forked child that they still need when they are told to stop, as a data loader is; both say what they hear."""

import os
import signal
import sys

from signs import RANK, all_ready, put

who = "worker"


def heard(signum, _frame):
    put(f"{who}-{RANK}-got-{signal.Signals(signum).name}")
    if who == "worker":
        os.write(ask, b"?")
        put(f"saved-{RANK}", os.read(answers, 1).decode())
        sys.exit(0)


for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), heard)
asked, ask = os.pipe()
answers, answer = os.pipe()
if os.fork() == 0:
    who = "child"
    os.close(ask)
    while os.read(asked, 1):
        os.write(answer, b"!")
    os._exit(0)
all_ready()
while True:
    signal.pause()
