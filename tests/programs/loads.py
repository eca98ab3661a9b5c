"""Workers with a forked child that they still need when they are told to stop, as a data loader is, which dies of any signal."""

import os
import signal
import sys

from signs import RANK, all_ready, put, wait_for_ever


def heard(_signum, _frame):
    if os.getpid() != worker:
        os._exit(1)
    os.write(ask, b"?")
    put(f"saved-{RANK}", os.read(answers, 1).decode() or "alone")
    sys.exit(0)


worker = os.getpid()
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), heard)
asked, ask = os.pipe()
answers, answer = os.pipe()
if os.fork() == 0:
    os.close(ask)
    while os.read(asked, 1):
        os.write(answer, b"!")
    os._exit(0)
os.close(asked)
os.close(answer)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
all_ready()
wait_for_ever()
