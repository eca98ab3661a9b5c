"""A worker of a job with restarts: each generation puts up signs of its own, place-GENERATION-RANK and the like."""

import json
import os
import signal
import sys
import time

from signs import FOLDER, RANK, WORLD_SIZE, put, wait

GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def ready():
    """All workers of this generation are there, and have said where they are."""
    names = (*PLACE, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE")
    put(f"place-{GENERATION}-{RANK}", json.dumps({name: os.environ[name] for name in names} | {"pid": os.getpid()}))
    for rank in range(WORLD_SIZE):
        wait(f"place-{GENERATION}-{rank}")


def fails_until(generation):
    """Rank 1 ends with 10 + its generation, up to this one; from then on all end well."""
    ready()
    if GENERATION < int(generation):
        if RANK == 1:
            os._exit(10 + GENERATION)
        time.sleep(600)


def ends_mid_line():
    """Each generation leaves its last line without a newline; the first one fails."""
    ready()
    sys.stdout.write(f"last words of {GENERATION}")
    sys.stdout.flush()
    for rank in range(WORLD_SIZE):
        put(f"said-{GENERATION}-{RANK}")
        wait(f"said-{GENERATION}-{rank}")
    os._exit(0 if GENERATION else 5)


def stays():
    ready()
    time.sleep(600)


def stays_until_told():
    """A generation ends well when all its workers see the sign go."""
    ready()
    wait("go")


def saves_until_told():
    """At SIGTERM and SIGINT a worker waits for the sign `saved` before it ends."""

    def save(*_):
        put(f"saving-{GENERATION}-{RANK}")
        wait("saved")
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
    stays_until_told()


def ignores_the_stop():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stays_until_told()


def fails_while_others_save():
    """Rank 1 ends badly at the sign `fail`."""
    if RANK == 1:
        ready()
        wait("fail")
        os._exit(3)
    saves_until_told()


def goes_on_until_told():
    """Nothing but the sign `finish` ends it."""
    ready()
    wait("finish")


def fails_when_told():
    """Rank 1 ends badly in the generation that the sign fail-GENERATION is for; the sign `finish` is for all."""
    ready()
    while not os.path.exists(os.path.join(FOLDER, "finish")):
        if RANK == 1 and os.path.exists(os.path.join(FOLDER, f"fail-{GENERATION}")):
            os._exit(3)
        time.sleep(0.002)


def leaves_something():
    """Before rank 1 fails, it starts a process in a session of its own; the next generation looks for it."""
    import subprocess

    ready()
    if RANK == 1:
        if GENERATION:
            left = [name for name in os.listdir(FOLDER) if name.startswith("child-")]
            pids = [int(open(os.path.join(FOLDER, name)).read()) for name in left]
            put("still-there", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
        child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
        put(f"child-{GENERATION}", child.pid)
        os._exit(3)
    time.sleep(600)


def leaves_a_listener():
    """Rank 0 listens at MASTER_PORT; a child of it has the socket too, and only its second thread lives when rank 0 fails."""
    import ctypes
    import socket
    import threading

    ready()
    if RANK == 0:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", int(os.environ["MASTER_PORT"])))
        server.listen()
        if GENERATION == 0:
            if not (child := os.fork()):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                threading.Thread(target=time.sleep, args=(600,)).start()
                ctypes.CDLL(None).pthread_exit(None)
            while open(f"/proc/{child}/stat").read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.002)
            os._exit(3)
    elif GENERATION == 0:
        time.sleep(600)


globals()[sys.argv[1]](*sys.argv[2:])
