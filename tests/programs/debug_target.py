"""Something to debug, in the rank and the way that the arguments say; the others wait or fail."""

import os
import signal
import sys
import time

from signs import FOLDER, RANK, all_ready, put, wait

how, debugged, others = sys.argv[1], int(sys.argv[2]), sys.argv[3]
secret_word = f"secret of rank {RANK}"


def run():
    """Run until it is enough, and say so again and again."""
    while not has("enough"):
        if not has("running"):
            put("running")
        time.sleep(0.005)


def has(name):
    return os.path.exists(os.path.join(FOLDER, name))


print(f"hello from rank {RANK}")
if others == "wait" and RANK != debugged:
    signal.signal(signal.SIGINT, lambda *_: put("interrupted"))
all_ready()
if RANK == debugged:
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if how == "trace":
        import pdb

        pdb.set_trace()
    elif how != "run":
        breakpoint()
    step = 1
    step = 2
    if how in ("run", "trace"):
        run()
    print(f"done in rank {RANK}")
elif others == "wait":
    time.sleep(600)
elif others == "fail":
    wait("fail")
    raise ValueError(f"boom of rank {RANK}")
elif others == "stubborn_fail":
    if RANK == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        put("stubborn")
        time.sleep(600)
    wait("fail")
    raise ValueError(f"boom of rank {RANK}")
