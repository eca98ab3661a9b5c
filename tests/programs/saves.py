"""Workers that need a moment to save when they are told to stop; all signals that a worker gets are put up as got-RANK."""

import signal
import sys
import threading

from signs import RANK, all_ready, put, put_all

SECONDS = 1.0
told = threading.Event()
got = []


def heard(signum, _frame):
    got.append(signal.Signals(signum).name)
    put_all(f"got-{RANK}", got)
    told.set()


for name in ("INT", "TERM", "HUP"):
    signal.signal(getattr(signal, f"SIG{name}"), heard)
all_ready()
while not told.wait(0.05):
    pass
threading.Event().wait(SECONDS)  # a second signal does not shorten it
put(f"saved-{RANK}")
sys.exit(0)
