"""Workers that need a moment to save when they are told to stop; all signals that a worker gets are put up as got-RANK."""

import signal
import sys
import time

from signs import RANK, all_ready, put, put_all

SECONDS = 1.0
got = []  # no Event: a handler that sets it waits for ever where it interrupts who waits for it


def heard(signum, _frame):
    got.append(signal.Signals(signum).name)
    put_all(f"got-{RANK}", got)


for name in ("INT", "TERM", "HUP"):
    signal.signal(getattr(signal, f"SIG{name}"), heard)
all_ready()
while not got:
    time.sleep(0.05)
time.sleep(SECONDS)  # a second signal does not shorten it
put(f"saved-{RANK}")
sys.exit(0)
