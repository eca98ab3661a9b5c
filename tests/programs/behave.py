"""A worker that does what its argument says once all ranks are ready: `behave.py 1=raise 2=stubborn`; the others wait.

Every signal that a waiting worker gets is put up as the sign got-RANK, one name after another; but not SIGCONT, which follows
each that is to stop it. It is started more often than any other: what takes long to import is imported where it is needed.
"""

import os
import sys
import time

from signs import FOLDER, RANK, all_ready, put, put_all, wait, wait_for_ever

CAUGHT = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2")
got = []


def catch(then=None):
    import signal

    def handler(signum, _frame):
        got.append(signal.Signals(signum).name)
        put_all(f"got-{RANK}", got)
        if then and signum not in (signal.SIGUSR1, signal.SIGUSR2):
            then()

    for name in CAUGHT:
        signal.signal(getattr(signal, f"SIG{name}"), handler)


def grandchild(code):
    """Start a Python process with this code; return once it has put up the sign child-RANK."""
    import subprocess

    process = subprocess.Popen([sys.executable, "-c", code])
    wait(f"child-{RANK}")
    return process


SIGN = "import os, sys, time, signal; sys.path[:0] = [{!r}]; from signs import *\n".format(os.path.dirname(__file__))
SLEEP = f"put(f'child-{RANK}', os.getpid())\ntime.sleep(600)\n"


def default():
    """Wait as most programs do: whatever signal comes ends it."""
    all_ready()
    time.sleep(600)


def polite():
    catch(then=lambda: sys.exit(0))
    all_ready()
    wait_for_ever()


def slow():
    """Take a moment to save before it ends."""

    def save():
        put(f"saving-{RANK}")
        wait("saved")
        sys.exit(0)

    catch(then=save)
    all_ready()
    wait_for_ever()


def stubborn():
    catch()
    all_ready()
    wait_for_ever()


def chatter():
    """Write more than any pipe holds, for ever."""
    all_ready()
    while True:
        print("x" * 1000)


def dies_on_sign():
    """Say something and end badly when the test says so."""
    all_ready()
    wait("die")
    os.write(2, b"last words of rank %d\n" % RANK)
    os._exit(3)


def done():
    all_ready()


def done_when_told():
    all_ready()
    wait("go")


def exit3():
    all_ready()
    sys.exit(3)


def raises():
    all_ready()
    raise ValueError(f"boom of rank {RANK}")


def raises_when_told():
    import atexit

    atexit.register(put, f"fails-{RANK}")  # the exception has been recorded by then
    all_ready()
    wait(f"fail-{RANK}")
    raises()


def raises_slowly_when_told():
    all_ready()
    wait(f"fail-{RANK}")
    raises_slowly()


def raises_slowly():
    """Raise, and take for ever to end of it; what lies where exceptions are written is gone by then."""
    import atexit
    import shutil

    folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder, 0o700)

    def linger():
        put("raised")
        time.sleep(600)

    atexit.register(linger)
    raises()


class AtTheVeryEnd:
    """Does something when the interpreter ends, behind all hooks, threads and exit functions of the program."""

    def __init__(self, then):
        self.then = then

    def __del__(self):
        self.then()


def raises_and_ends_late():
    """Raise, and have the interpreter end once rank 0 has had a signal."""
    global _last
    _last = AtTheVeryEnd(lambda: wait("got-0"))
    raises()


def raises_and_never_ends():
    global _last
    _last = AtTheVeryEnd(lambda: time.sleep(600))
    raises()


def raises_and_leaves_by_its_hook():
    sys.excepthook = lambda *_: os._exit(7)
    raises()


def raises_and_leaves_well():
    """Raise, and end with 0 all the same."""
    import atexit

    atexit.register(os._exit, 0)
    raises()


def peer_lost_when_told():
    """Fail as a worker of a gloo group does whose peer has died."""
    all_ready()
    wait(f"fail-{RANK}")
    # as torch 2.13 has it
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.12]:41234")


def segfault_when_told():
    all_ready()
    wait(f"fail-{RANK}")
    segfault()


def segfault():
    import ctypes

    all_ready()
    ctypes.string_at(0)


def killed():
    all_ready()
    os.kill(os.getpid(), 9)  # SIGKILL


def plain_child():
    grandchild(SIGN + SLEEP)
    default()


def stubborn_child():
    grandchild(SIGN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    default()


def setsid_child():
    grandchild(SIGN + "os.setsid()\n" + SLEEP)
    default()


def stubborn_setsid_child():
    grandchild(SIGN + "os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    default()


def daemon():
    """A double fork: nobody's child, in a session of its own."""
    grandchild(SIGN + "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n" + SLEEP)
    default()


def daemon_then_done():
    grandchild(SIGN + "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n" + SLEEP)
    all_ready()


def crash_with_children():
    """Die with children of every kind left."""
    import subprocess

    for number, code in enumerate(("", "os.setsid()\n", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n")):
        subprocess.Popen([sys.executable, "-c", SIGN + code + SLEEP.replace("child-", f"child{number}-")])
    for number in range(3):
        wait(f"child{number}-{RANK}")
    all_ready()
    os._exit(3)


def die_in_turn():
    """Rank 1 dies first, the others a millisecond after it is dead: one number is lower, one higher."""
    all_ready()
    if RANK == 1:
        os._exit(41)
    with open(os.path.join(FOLDER, "ready-1")) as file:
        stat = f"/proc/{file.read()}/stat"
    while os.path.exists(stat) and open(stat).read().rpartition(")")[2].split()[0] != "Z":
        pass
    time.sleep(0.001)
    os._exit(40 + RANK)


behaviours = dict(argument.split("=") for argument in sys.argv[1:])
globals()[behaviours.get(str(RANK), behaviours.get("all", "default"))]()
