"""Ranks that fail, each in the way that an argument of its own says: "raise", "exit", "kill", "wait" or "done"."""

import os
import signal
import sys
import threading
import time

from signs import RANK, put, wait


def fail(value):
    """Fail where there is something to look at."""
    raise ValueError(f"boom of rank {RANK}")


how = sys.argv[1 + RANK]
put(f"ready-{RANK}")
if how == "raise":
    fail(41 + RANK)
elif how == "later":  # when the first has failed
    wait("fail")
    print(f"seen of rank {RANK} only in its log", flush=True)
    fail(41 + RANK)
elif how == "exit":
    thread = threading.Thread(target=fail, args=(RANK,))
    thread.start()
    thread.join()
    sys.exit(3)
elif how == "kill":
    os.kill(os.getpid(), signal.SIGSEGV)
elif how == "wait":
    time.sleep(600)
