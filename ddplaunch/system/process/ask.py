"""Asks a question in a child, since it may never be answered: of a driver that hangs, of a command on a dead file server.

`ask` waits for the answer, and gives up in time. Where a loop runs nothing may be waited for: that is `Loop.ask`.
"""

from __future__ import annotations

import marshal
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from ddplaunch.system.process import clock
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import detach, end_within, signal_at_end_of

T = TypeVar("T")
FIRST = 4  # the number that the first descriptor of a question has in the child
_LENGTH_BYTES = 8  # bytes before the answer: how long that is
_MARK_OF_PLAIN = b"m"  # before an answer of plain data, which needs no import; a pickle begins with another byte


class AskedEnded(Exception):
    """The child has ended, or was given up, before it had answered."""

    def __init__(self, text: str = "the process that was asked has ended") -> None:
        super().__init__(text)


def ask(question: Callable[[], T], timeout: float) -> T:
    """Call `question` in a child that takes no signal, and return or raise what the call did.

    Raises:
        AskedEnded: there is no answer, or only the beginning of one.
        TimeoutError: no answer came in so many seconds. A child in uninterruptible sleep is not waited for.
    """
    pid, pipe = fork_asked(question)
    try:
        received = _read(pipe, clock.now() + timeout)
    finally:
        os.close(pipe)
    end_asked(pid, has_answered=bool(received))
    if received is None:
        raise TimeoutError(f"no answer in {timeout:g} s")
    return unpack(received)  # type: ignore[no-any-return]  # what `question` gave


def end_asked(pid: int, *, has_answered: bool) -> None:
    """Kill a child that was asked; wait for the end of one that `has_answered`: another may be in uninterruptible sleep."""
    with suppress(ProcessLookupError, ChildProcessError):  # a caller of ours may ignore SIGCHLD: its children vanish
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0 if has_answered else os.WNOHANG)


def fork_asked(
    question: Callable[[], object], descriptors: Sequence[int] = (), within: float | None = None
) -> tuple[int, int]:
    """Start a child that calls `question`; return its pid and the pipe that its answer comes through.

    After `within` seconds the kernel ends the child, whatever it does then.
    """
    us = os.getpid()
    return fork_to_answer(lambda answer: _answer(us, question, (answer, *descriptors), within))


def fork_to_answer(run: Callable[[int], NoReturn]) -> tuple[int, int]:
    """Start a child that runs `run` with the pipe to write to, all signals blocked; return its pid, and the pipe to read from."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    # blocked until the child decides which it takes: a handler of ours would write to the pipe that wakes our loop
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = fork()
        if pid == 0:
            run(write_end)
    except OSError:
        os.close(read_end)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
        os.close(write_end)
    return pid, read_end


def unpack(received: bytes) -> Any:
    """Return the answer in all that a child has sent, or raise what its question has raised.

    Raises AskedEnded: there is no answer, or only the beginning of one.
    """
    if not received or len(received) < _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "little"):
        raise AskedEnded
    if received.startswith(_MARK_OF_PLAIN, _LENGTH_BYTES):
        return marshal.loads(received[_LENGTH_BYTES + 1 :])
    import pickle  # few questions have an answer that is no plain data

    found, error = pickle.loads(received[_LENGTH_BYTES:])
    if error is not None:
        raise error
    return found


def _read(pipe: int, until: float) -> bytes | None:
    """Return everything up to the end of the pipe; None if the end does not come before `until`, by the clock of deadlines."""
    received = b""
    with selectors.PollSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while clock.wait(selector, until):
            if not (data := os.read(pipe, 1 << 16)):
                return received
            received += data
    return None


def _answer(parent: int, question: Callable[[], object], kept: Sequence[int], within: float | None) -> NoReturn:
    """Call the question in the child, write the answer or the exception to the first of the `kept` descriptors, and exit.

    `within`: seconds after which the kernel ends the child; None: no limit.
    """
    try:
        signal_at_end_of(parent, signal.SIGKILL)
        detach(*kept)  # from now on they are 3, 4, ...
        if within is not None:
            end_within(within)
        try:
            data = _packed(question(), None)
        except Exception as error:  # noqa: BLE001 - it is raised in the parent
            data = _packed(None, error)
        with open(3, "wb") as file:
            file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    finally:
        os._exit(0)


def _packed(answer: Any, error: BaseException | None) -> bytes:
    """Return what `unpack` takes: plain data as marshal writes it, which takes no import, and anything else as a pickle."""
    if error is None:
        with suppress(ValueError):
            return _MARK_OF_PLAIN + marshal.dumps(answer)
    import pickle

    return pickle.dumps((answer, error))
