"""Functions that tests run in workers, some of which misbehave on purpose."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from pathlib import Path


class Refused(Exception):
    """An exception of the user's, whose making needs more than its message."""

    def __init__(self, what, *, code):
        super().__init__(what)
        self.code = code

    def __str__(self):
        return f"{self.args[0]} refused with {self.code}"


class CannotBeRebuilt(Exception):
    """Its pickle cannot be unpickled: __init__ takes more than what is in its args."""

    def __init__(self, first, second):
        super().__init__("only one argument is kept")


def rank():
    return int(os.environ["RANK"])


def place(*args, **kwargs):
    return rank(), int(os.environ["WORLD_SIZE"]), args, kwargs


def variable(name):
    return os.environ.get(name)


def says(*lines):
    for line in lines:
        print(line.format(rank=rank()), flush=True)
    print(f"err {rank()}", file=sys.stderr, flush=True)


def sign(name, content=""):
    path = Path(os.environ["DDP_TEST_DIR"]) / f"{name}-{rank()}"
    path.with_suffix(".new").write_text(str(content))
    path.with_suffix(".new").rename(path)


def sleeps():
    sign("sleeps", os.getpid())
    time.sleep(600)


def sleeps_with(_):
    sleeps()


def chatters():
    while True:
        print("again", flush=True)
        time.sleep(0.01)


def ignores_the_stop():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeps()


def saves():
    """Take its time once it was asked to stop."""
    came = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: came.append(1))
    sign("sleeps", os.getpid())
    while not came:
        time.sleep(0.01)
    sign("saving")
    time.sleep(2)  # longer than the second signal takes to come
    sign("saved")


def raises(what):
    """Rank 1 fails, the others wait."""
    if rank() != 1:
        time.sleep(600)
    match what:
        case "ValueError":
            raise ValueError("boom")
        case "OSError":
            open("/no/such/file")
        case "Refused":
            raise Refused("it", code=7)
        case "CannotBeRebuilt":
            raise CannotBeRebuilt(1, 2)
        case "local":

            class Local(Exception):
                pass

            raise Local("of a function")
        case "group":
            raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])
        case "cause":
            try:
                {}["key"]
            except KeyError as error:
                raise RuntimeError("later") from error


def dies(how):
    """Rank 1 ends without an exception, the others wait."""
    if rank() != 1:
        time.sleep(600)
    match how:
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "without result":
            os._exit(0)
        case _:
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(600)


def returns(what):
    match what:
        case "generator":
            return (number for number in range(3))
        case "coroutine":
            return asyncio.sleep(0)
        case "lambda":
            return lambda: 1
        case int():
            return bytes(what)


def fails_once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank() == 1:
            raise ValueError("the first time")
        return "of the first generation"
    return rank()


def fails_once_then_imports(name):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the first time")
    return importlib.import_module(name).pid, dict(os.environ)


def leaves_a_child():
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    return os.getpid()


def adds_one(*tensors):
    for tensor in tensors:
        tensor[rank()] += 1
    return inode_of(tensors[0])


def inode_of(tensor):
    """The file in memory in which a tensor lies, as /proc/self/maps has it."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode, *_ = line.split()
        first, _, last = span.partition("-")
        if int(first, 16) <= address < int(last, 16):
            return device, int(inode)
    raise LookupError(address)


def puts(queue, lock):
    with lock:
        queue.put(rank())


def waits_in(name):
    globals()[name]()


def waits_here():
    time.sleep(600)


def waits_there():
    time.sleep(600)


def waits_apart():
    if rank() < 2:
        waits_here() if rank() == 0 else waits_there()
