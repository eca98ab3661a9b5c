"""Rank 1 uses up what its argument says, as far as it goes; the others wait."""

import mmap
import multiprocessing
import os
import subprocess
import sys
import time

from signs import RANK

STEP = 1 << 20


def memory():
    kept = []
    while True:
        kept.append(b"x" * STEP)


def memory_of_child():
    subprocess.run([sys.executable, __file__, "memory"], check=True)


def shm():
    """Share more than there is room for, in a file that stays."""
    with open("/dev/shm/shared", "w+b") as file:
        file.truncate(64 * STEP)
        with mmap.mmap(file.fileno(), 64 * STEP) as shared:
            while True:
                shared.write(b"x" * 4096)


def unnamed_shm():
    """The same, in a file that is gone with the process."""
    with open("/dev/shm/shared", "w+b") as file:
        os.unlink(file.name)
        os.truncate(file.fileno(), 64 * STEP)
        with mmap.mmap(file.fileno(), 64 * STEP) as shared:
            while True:
                shared.write(b"x" * 4096)


def semaphores():
    fill("/dev/shm/full")
    multiprocessing.Lock()


def files():
    kept = []
    while True:
        kept.append(open("/dev/null"))


def disk():
    with open(os.path.join(sys.argv[2], "checkpoint.pt"), "wb") as file:
        file.write(b"x" * 64 * STEP)


def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass


if RANK == 1:
    globals()[sys.argv[1]]()
time.sleep(600)
