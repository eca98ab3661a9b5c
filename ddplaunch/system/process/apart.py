"""Carries a command out in a child, and ends the command if that waits for a disk that does not answer.

A process that waits for the disk of a dead server may not end even by SIGKILL, and the shell would wait with it. So what looks
into files runs in a child, which can be left behind. That the child waits for a disk is seen from outside, wherever it does: it
sleeps in one system call for long, its output is read, and it has not said that it waits for something else.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import NoReturn

from ddplaunch.system.process.linux import signal_at_end_of
from ddplaunch.system.process.terminal import modes, set_modes
from ddplaunch.system.process.tree import content, look

INTERVAL = 0.5  # seconds from one look at the child to the next
LOOKS = 8  # without progress, after which its disk hangs
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
_WAITS = b"w"
_ASLEEP = "SD"  # the states in which a process waits; others run, are stopped, or have ended
_COUNTED = (b"voluntary_ctxt_switches:", b"nonvoluntary_ctxt_switches:")
_CHUNK = 1 << 16  # bytes
_watched: list[mmap.mmap] = []  # what the process that watches this one looks at, if there is one


def go_on_in_child(on_hang: Callable[[], int]) -> None:
    """Fork, and return in the child; the parent exits as the child does, or as `on_hang` says if a disk hangs."""
    shared, relays = mmap.mmap(-1, mmap.PAGESIZE), _relays()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the caller may ignore it, and nobody could wait for the child then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
    us = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # there is no room for a child
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    if pid:
        _watch(pid, shared, relays, on_hang)
    for relay in relays:
        relay.take_over()
    _watched.append(shared)
    signal_at_end_of(us, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def waiting() -> Iterator[None]:
    """Say that this process waits for no disk meanwhile, but for a user, a job or another program, as long as it takes."""
    for shared in _watched:
        shared[:1] = _WAITS
    try:
        yield
    finally:
        for shared in _watched:
            shared[:1] = b"\0"


class _Relay:
    """Passes on what the child writes to a pipe of the caller, who would wait for the end of a child that cannot end."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """The `descriptors` are of one pipe, or socket."""
        self._descriptors = descriptors
        self._ours, self._its = os.pipe()  # no socket: /dev/stdout could not be opened
        self._ended, self._end = os.pipe()
        self._thread = Thread(target=self._run, daemon=True)

    def take_over(self) -> None:
        """In the child, write to the parent."""
        for descriptor in self._descriptors:
            os.dup2(self._its, descriptor)
        for descriptor in (self._ours, self._its, self._ended, self._end):
            os.close(descriptor)

    def start(self) -> None:
        """In the parent, pass on."""
        os.close(self._its)
        os.set_blocking(self._ours, False)
        self._thread.start()

    def finish(self) -> None:
        """Pass on what is left: the child has ended, and what it has started may have the other end still."""
        os.write(self._end, b".")
        self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        poll.register(self._descriptors[0], 0)  # for errors alone: the reader has gone
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if self._descriptors[0] in ready:
                    break
                if self._ours in ready:
                    if not (data := os.read(self._ours, _CHUNK)):
                        return
                    self._pass_on(data)
                elif self._ended in ready:
                    return
        except OSError:
            pass
        os.close(self._ours)  # the child learns at its next write that the reader has gone, as it would have

    def _pass_on(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptors[0], data) :]
            except BlockingIOError:  # the caller has made its pipe so
                poll = select.poll()
                poll.register(self._descriptors[0], select.POLLOUT)
                poll.poll()


def _relays() -> list[_Relay]:
    """Return what passes on the child's stdout and stderr, where these are pipes; one if both are the same."""
    pipes: dict[tuple[int, int], list[int]] = {}
    for descriptor in (1, 2):
        try:
            found = os.fstat(descriptor)
        except OSError:  # closed by the caller
            continue
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            pipes.setdefault((found.st_dev, found.st_ino), []).append(descriptor)
    return [_Relay(descriptors) for descriptors in pipes.values()]


def _watch(pid: int, shared: mmap.mmap, relays: Sequence[_Relay], on_hang: Callable[[], int]) -> NoReturn:
    """Pass signals on to the child until it ends, or hangs, and exit."""
    for relay in relays:
        relay.start()
    typed = modes()  # of the terminal
    idle, seen = 0, b""
    while idle < LOOKS:
        received = signal.sigtimedwait((*_PASSED_ON, signal.SIGCHLD), INTERVAL)
        if received is not None and received.si_signo != signal.SIGCHLD:
            if received.si_code <= 0:  # those of a terminal go to the child as well
                os.kill(pid, received.si_signo)
            continue
        changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if changed and os.WIFSTOPPED(status):  # first the child, which may have a terminal to restore
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(pid, signal.SIGCONT)
        elif changed:
            for relay in relays:
                relay.finish()
            _exit_like(status)
        before, seen = seen, _progress(pid)
        waits_for_disk = shared[:1] != _WAITS and _output_is_read()
        idle = idle + 1 if seen == before and waits_for_disk else 0
    os.kill(pid, signal.SIGKILL)
    set_modes(typed)
    os._exit(on_hang())


def _progress(pid: int) -> bytes:
    """Return what is the same at the next look only if the child has been waiting in one system call since."""
    found = look(pid)
    if found is None or found.state not in _ASLEEP:
        return os.urandom(8)
    try:
        lines = content(f"/proc/{pid}/status").splitlines()
    except OSError:
        return os.urandom(8)
    return b" ".join(line for line in lines if line.startswith(_COUNTED))


def _output_is_read() -> bool:
    """Whether our output is taken: not by a terminal that Ctrl-S has stopped, nor by a pipe whose reader is behind."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) == 2  # a file takes it, and a pipe without a reader


def _exit_like(status: int) -> NoReturn:
    """End as the child has, by the same signal if it was one."""
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    signum = os.WTERMSIG(status)
    if signum != signal.SIGKILL:
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signum,))
    os._exit(128 + signum)
