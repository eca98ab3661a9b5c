"""Asks in a child what may never be answered: a driver that hangs, a command on a dead file server. Gives up in time."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ddplaunch.process.linux import detach

T = TypeVar("T")
_SIZE = 8  # bytes before the answer: how long that is


class AskedEnded(Exception):
    """The child has ended before it had answered."""

    def __init__(self) -> None:
        super().__init__("the process that was asked has ended")


def ask(question: Callable[[], T], timeout: float) -> T:
    """Give what `question` gives, or raise what it raises; that is called in a child, which takes no signal.

    Raises:
        AskedEnded: there is no answer, or only the beginning of one.
        TimeoutError: no answer came in so many seconds. A child in uninterruptible sleep is not waited for.
    """
    answers, answer = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            pid = os.fork()
            if pid == 0:
                _answer(question, answer)
        finally:
            os.close(answer)
        received = _read(answers, time.monotonic() + timeout)
    finally:
        os.close(answers)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0 if received else os.WNOHANG)
    if received is None:
        raise TimeoutError(f"no answer in {timeout:g} s")
    return _unpacked(received)  # type: ignore[no-any-return]  # what `question` gave


class Asking(Generic[T]):
    """A question that a child answers while this process goes on; `fileno` is readable when there is more of the answer."""

    def __init__(self, question: Callable[[Sequence[int]], T], descriptors: Sequence[int] = ()) -> None:
        """Ask. The child has no descriptors but these, under the numbers that `question` gets.

        Raises:
            OSError: there is no room for another process, or for its pipe.
        """
        self._pipe, answer = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _answer(lambda: question(range(4, 4 + len(descriptors))), answer, descriptors)
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(answer)
        os.set_blocking(self._pipe, False)
        self._received = b""

    def fileno(self) -> int:
        """The pipe."""
        return self._pipe

    def read(self) -> bool:
        """Take in what there is; say whether that was all."""
        try:
            data = os.read(self._pipe, 1 << 20)
        except BlockingIOError:
            return False
        self._received += data
        return not data

    def end(self) -> T | None:
        """End the child, and give its answer; None if there is none, or no whole one."""
        os.close(self._pipe)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0 if self._received else os.WNOHANG)
        try:
            return _unpacked(self._received)  # type: ignore[no-any-return]  # what `question` gave
        except Exception:  # noqa: BLE001 - what the child raised
            return None


def _unpacked(received: bytes) -> Any:
    if len(received) < _SIZE or len(received) < _SIZE + int.from_bytes(received[:_SIZE], "little"):
        raise AskedEnded
    found, error = pickle.loads(received[_SIZE:])
    if error is not None:
        raise error
    return found


def _read(pipe: int, until: float) -> bytes | None:
    """Read to the end; None if that does not come in time."""
    received = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(max(0.0, until - time.monotonic()) * 1000):
        if not (data := os.read(pipe, 1 << 16)):
            return received
        received += data
    return None


def _answer(question: Callable[[], object], pipe: int, kept: Sequence[int] = ()) -> None:
    try:
        detach(pipe, *kept)
        try:
            answer: tuple[object, BaseException | None] = (question(), None)
        except Exception as error:  # noqa: BLE001 - it is raised in the parent
            answer = (None, error)
        with open(3, "wb") as file:
            data = pickle.dumps(answer)
            file.write(len(data).to_bytes(_SIZE, "little") + data)
    finally:
        os._exit(0)
