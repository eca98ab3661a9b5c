"""Workers that save and leave with 0 when SIGUSR1 or SIGTERM announces the end; those that were started again are done at once.

`leaves.py 1=fails 2=dies`: fails raises instead, dies lets the signal kill it. What came is put up as got-RANK.
"""

import os
import signal
import sys
import time

from signs import RANK, all_ready, put, put_all

AGAIN = os.environ["TORCHELASTIC_RESTART_COUNT"]
behaviour = dict(argument.split("=") for argument in sys.argv[1:]).get(str(RANK), "saves")
got = []  # as in saves.py


def heard(signum, _frame):
    got.append(signal.Signals(signum).name)
    put_all(f"got-{RANK}", got)


if AGAIN != "0":
    put(f"again-{RANK}", AGAIN)
    sys.exit(0)
if behaviour != "dies":
    signal.signal(signal.SIGUSR1, heard)
    signal.signal(signal.SIGTERM, heard)
all_ready()
while not got:
    time.sleep(0.05)
time.sleep(0.2)  # a second signal does not shorten it
if behaviour == "fails":
    raise RuntimeError("the checkpoint cannot be written")
put(f"saved-{RANK}")
