"""A worker that trains with the others of its generation over the network: `alone.py STEPS SAVES`.

trains-TERM-RANK is put up after so many steps. In each step rank 0 hears of all, and all of rank 0, which ends them after the
sign `finish`. At SIGTERM a worker saves for so many seconds before it ends. One that loses another one raises, as with gloo;
but one that saves waits for the lost one for ever, as with NCCL.

As long as it lives, a worker has a lock of its generation. When it begins, it looks for locks of others, and puts up
overlap-TERM-RANK if it finds one: then workers of two generations live. No clock has a part in that, for the kernel keeps the
locks, and drops those of a process that ends.
"""

import fcntl
import itertools
import json
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

from signs import FOLDER, RANK, WORLD_SIZE, put

TERM = os.environ["DDPLAUNCH_TERM"]
MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
FLOCK = "hhqqi4x"  # struct flock of fcntl.h: type, whence, start, length, pid
LOCKED_BY = "lives-"
STEP, FINISH = b"s", b"f"

steps, saves = int(sys.argv[1]), float(sys.argv[2])


def live():
    """Hold the lock of this generation until the end of this process, and look for those of others."""
    lock = os.open(os.path.join(FOLDER, LOCKED_BY + TERM), os.O_RDWR | os.O_CREAT)
    fcntl.lockf(lock, fcntl.LOCK_SH)
    others = [name for name in os.listdir(FOLDER) if name.startswith(LOCKED_BY) and name != LOCKED_BY + TERM]
    if alive := [name for name in others if is_locked(os.path.join(FOLDER, name))]:
        put(f"overlap-{TERM}-{RANK}", " ".join(alive))


def is_locked(path):
    """Whether a process has a lock on a file. It is asked for, as a lock that is tried would be seen by others."""
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with open(path, "rb+") as file:
        return struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK


def meet():
    """Connect rank 0 with each other rank; the connections of this one."""
    if RANK == 0:
        with socket.create_server(("", MASTER[1])) as server:
            return [server.accept()[0] for _ in range(WORLD_SIZE - 1)]
    while True:
        with suppress(OSError):  # rank 0 is not there yet
            return [socket.create_connection(MASTER)]
        time.sleep(0.02)


def hear(connection):
    """The next byte of another worker."""
    if not (word := connection.recv(1)):
        if saves:
            time.sleep(600)
        raise ConnectionError("connection closed by peer")
    return word


def train(connections):
    """Take steps together until told to finish."""
    for step in itertools.count(1):
        if RANK == 0:
            for connection in connections:
                hear(connection)
            word = FINISH if os.path.exists(os.path.join(FOLDER, "finish")) else STEP
            for connection in connections:
                connection.send(word)
        else:
            connections[0].send(STEP)
            word = hear(connections[0])
        if step == steps:
            put(f"trains-{TERM}-{RANK}", json.dumps({"host": socket.gethostname(), "world_size": WORLD_SIZE}))
        if word == FINISH:
            return
        time.sleep(0.05)


def save(*_):
    """Take a while, and end."""
    time.sleep(saves)
    os._exit(0)


if saves:
    signal.signal(signal.SIGTERM, save)
live()
train(meet())
