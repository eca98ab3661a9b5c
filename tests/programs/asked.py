"""A worker that its agent asks for its stack, in the situation that its argument names. Says on stdout when it is in it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

SIGNAL = signal.SIGRTMAX - 5


def say(text: object) -> None:
    print(text, flush=True)


def sleeps() -> None:
    say("ready")
    time.sleep(600)


def forks() -> None:
    if os.fork() == 0:
        in_child()
    sleeps()


def in_child() -> None:
    sleeps()


def spawns() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"])
    sleeps()


def computes() -> None:
    say("ready")
    pow(7, 10**9, 10**300_000 + 1)  # minutes in C, with the GIL held


def handles() -> None:
    signal.signal(SIGNAL, lambda *_: os._exit(3))
    sleeps()


def registers() -> None:
    faulthandler.register(SIGNAL)
    sleeps()


def blocks() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])
    sleeps()


def closes() -> None:
    os.closerange(3, 4096)
    say("ready")
    with open(os.devnull) as file:
        os.dup2(file.fileno(), 200)
        time.sleep(600)


def executes() -> None:
    os.execv(sys.executable, [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"])


def stops() -> None:
    say("ready")
    os.kill(os.getpid(), signal.SIGSTOP)


def threads() -> None:
    started = threading.Event()

    def waits() -> None:
        started.set()
        time.sleep(600)

    threading.Thread(target=waits, daemon=True).start()
    started.wait()
    sleeps()


globals()[sys.argv[1]]()
