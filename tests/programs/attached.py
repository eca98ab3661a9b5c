"""Something to attach to, as the arguments say rank by rank: "count", "held" in C, "own" the signal, or "late" to end."""

import ctypes
import os
import signal
import sys
import time

from signs import FOLDER, RANK, put, wait

FORK = os.path.join(FOLDER, f"fork-{RANK}")


def fork():
    """Leave a child, as a DataLoader does whose workers are persistent."""
    os.remove(FORK)
    if not os.fork():
        put("forked")
        wait("enough")
        os._exit(0)


def count(number):
    """Count until it is enough."""
    while not os.path.exists(os.path.join(FOLDER, "enough")):
        number += 1
        if os.path.exists(FORK):
            fork()
        time.sleep(0.01)
    return number


class Late:
    """Ends when the interpreter has given all signals their default action back, and takes a while for it."""

    def __del__(self, create=os.open, exists=os.access, sleep=time.sleep, folder=FOLDER, flags=os.O_CREAT):
        create(f"{folder}/ending", flags)
        while not exists(f"{folder}/enough", 0):
            sleep(0.01)


how = sys.argv[1 + RANK]
if how == "own":
    signal.signal(signal.SIGRTMAX - 6, lambda *_: put("own"))
put(f"ready-{RANK}")
if how == "held":
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever, with the GIL held
if how == "late":
    late = Late()
else:
    print("counted", count(0) > 0)
