"""Runs the rest of a command in a child of its process, and ends the command if the child waits for a disk that hangs.

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
_WAITS_FOR_NO_DISK = b"w"  # the first byte of the shared page while the child waits for something else than a disk
_ASLEEP = "SD"  # the states in which a process waits; others run, are stopped, or have ended
_SWITCH_COUNTS = (b"voluntary_ctxt_switches:", b"nonvoluntary_ctxt_switches:")
_CHUNK = 1 << 16  # bytes
_shared_pages: list[mmap.mmap] = []  # in the child: the page that its parent, which watches it, reads; [] elsewhere


def go_on_in_child(on_hang: Callable[[], int]) -> None:
    """Fork, and return in the child; the parent exits as the child does, or with the status of `on_hang()` if a disk hangs.

    Return in this process itself if the machine has no room for a child.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the child, which says there when it waits for no disk
    relays = _relays()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the caller may ignore it, and nobody could wait for the child then
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
    us = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
        return
    if pid:
        _watch(pid, page, relays, on_hang)  # it does not return: what follows is the child
    for relay in relays:
        relay.take_over()
    _shared_pages.append(page)  # for `disk_watch_paused`
    signal_at_end_of(us, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


@contextmanager
def disk_watch_paused() -> Iterator[None]:
    """Pause the watch that gives a hung disk up: this process waits for a user, a job or another program, as long as it takes."""
    for page in _shared_pages:
        page[:1] = _WAITS_FOR_NO_DISK
    try:
        yield
    finally:
        for page in _shared_pages:
            page[:1] = b"\0"


class _Relay:
    """Passes on what the child writes to a pipe of the caller, who would wait for the end of a child that cannot end."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """The `descriptors` are of one pipe, or socket: 1, 2 or both."""
        self._descriptors = descriptors
        self._callers_pipe = descriptors[0]
        self._parents_end, self._childs_end = os.pipe()  # no socket: /dev/stdout could not be opened
        self._told_to_finish, self._tell_to_finish = os.pipe()  # both ends; `finish` writes to it
        self._thread = Thread(target=self._run, daemon=True)

    def take_over(self) -> None:
        """In the child, write to the parent."""
        for descriptor in self._descriptors:
            os.dup2(self._childs_end, descriptor)
        for descriptor in (self._parents_end, self._childs_end, self._told_to_finish, self._tell_to_finish):
            os.close(descriptor)

    def start(self) -> None:
        """In the parent, pass on."""
        os.close(self._childs_end)
        os.set_blocking(self._parents_end, False)
        self._thread.start()

    def finish(self) -> None:
        """Pass on what is left: the child has ended, and what it has started may have the other end still."""
        os.write(self._tell_to_finish, b".")
        self._thread.join()

    def _run(self) -> None:
        """Pass on what the child writes, until the child has ended and nothing is left, or the caller reads no more.

        Runs in a thread of the parent: a write to a caller that reads slowly may take long.
        """
        poll = select.poll()
        poll.register(self._parents_end, select.POLLIN)
        poll.register(self._told_to_finish, select.POLLIN)
        poll.register(self._callers_pipe, 0)  # for errors alone: the reader has gone
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if self._callers_pipe in ready:
                    break
                if self._parents_end in ready:
                    if not (data := os.read(self._parents_end, _CHUNK)):
                        return
                    self._pass_on(data)
                elif self._told_to_finish in ready:  # and nothing is left to read
                    return
        except OSError:  # the reader has gone meanwhile
            pass
        os.close(self._parents_end)  # the child learns at its next write that the reader has gone, as it would have

    def _pass_on(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._callers_pipe, data) :]
            except BlockingIOError:  # the caller has made its pipe so
                poll = select.poll()
                poll.register(self._callers_pipe, select.POLLOUT)
                poll.poll()


def _relays() -> list[_Relay]:
    """Return the relays for the child's stdout and stderr, where these are pipes or sockets; one relay if both are the same.

    Who reads a pipe would else wait for the end of a child that hangs and cannot be killed. A file has no such reader.
    """
    pipes: dict[tuple[int, int], list[int]] = {}
    for descriptor in (1, 2):
        try:
            found = os.fstat(descriptor)
        except OSError:  # closed by the caller
            continue
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            pipes.setdefault((found.st_dev, found.st_ino), []).append(descriptor)
    return [_Relay(descriptors) for descriptors in pipes.values()]


def _watch(pid: int, page: mmap.mmap, relays: Sequence[_Relay], on_hang: Callable[[], int]) -> NoReturn:
    """Pass signals on to the child until it ends, or hangs for LOOKS looks in a row; then exit. The child has `page`, too."""
    for relay in relays:
        relay.start()
    terminal_modes = modes()
    looks_without_progress, progress = 0, b""
    while looks_without_progress < LOOKS:
        received = signal.sigtimedwait((*_PASSED_ON, signal.SIGCHLD), INTERVAL)
        if received is not None and received.si_signo != signal.SIGCHLD:
            # sigaction(2); the kernel sends those of a terminal to the child as well
            is_of_process = received.si_code <= 0
            if is_of_process:
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
        last_progress, progress = progress, _progress(pid)
        may_wait_for_disk = page[:1] != _WAITS_FOR_NO_DISK and _output_is_read()
        is_waiting = progress == last_progress and may_wait_for_disk
        looks_without_progress = looks_without_progress + 1 if is_waiting else 0
    os.kill(pid, signal.SIGKILL)
    set_modes(terminal_modes)
    os._exit(on_hang())


def _progress(pid: int) -> bytes:
    """Return what is the same at the next look only if the child has been waiting in one system call since."""
    unlike_any = os.urandom(8)
    found = look(pid)
    if found is None or found.state not in _ASLEEP:
        return unlike_any
    try:
        lines = content(f"/proc/{pid}/status").splitlines()
    except OSError:
        return unlike_any
    return b" ".join(line for line in lines if line.startswith(_SWITCH_COUNTS))


def _output_is_read() -> bool:
    """Whether our output is taken: not by a terminal that Ctrl-S has stopped, nor by a pipe whose reader is behind."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) == 2  # a file takes it, and a pipe without a reader


def _exit_like(status: int) -> NoReturn:
    """End as the child has, by the same signal if a signal ended the child; `status` is that of waitpid."""
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    signum = os.WTERMSIG(status)
    if signum != signal.SIGKILL:
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signum,))  # here this process ends
    os._exit(128 + signum)
