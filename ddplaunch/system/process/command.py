"""Runs a command with a time limit and bounded output, and has a signal that ends this one wait until it has cleaned up.

Each call blocks until the command has ended, so make it in a child. The command ends with the process that made the call.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from msgspec import Struct, msgpack

from ddplaunch.system.process import tree
from ddplaunch.system.process.ask import fork_to_answer
from ddplaunch.system.process.fork import unfollowed_by_debugger
from ddplaunch.system.process.linux import become_subreaper, memory_file, signal_at_end_of
from ddplaunch.system.process.tree import signal_leftovers

_LONGEST = 1 << 20  # characters of each stream that are kept


class Ended(Struct, frozen=True, kw_only=True):
    """How a command ended."""

    status: int | None  # -n: signal n ended the command; None: it was killed at the time limit
    out: str = ""
    err: str = ""


def run(
    argv: Sequence[str], env: Mapping[str, str], timeout: float, folder: str = "/", *, keeps_start: bool = False
) -> Ended:
    """Run a command and return its output. In the root folder no file of the user changes what the command does.

    Of a long output the end is kept, or with `keeps_start` the start.

    Raises: OSError: it cannot be started.
    """
    import subprocess  # takes 10 ms

    kept = slice(_LONGEST) if keeps_start else slice(-_LONGEST, None)
    try:
        with unfollowed_by_debugger():
            done = subprocess.run(
                argv,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
                # which is safe, since such a child has no threads
                preexec_fn=partial(_take_signals_and_end_with, os.getpid()),
            )
    except subprocess.TimeoutExpired as late:
        return Ended(status=None, out=_text(late.stdout, kept), err=_text(late.stderr, kept))
    return Ended(status=done.returncode, out=_text(done.stdout, kept), err=_text(done.stderr, kept))


def _take_signals_and_end_with(parent: int) -> None:
    """Take signals again, which the child blocks, and end with the child."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal_at_end_of(parent, signal.SIGKILL)


def _text(stream: bytes | None, kept: slice) -> str:
    return (stream or b"")[kept].decode(errors="replace")


# --- in a shell


_KILLED_WITHIN = 2.0  # seconds that the end of a killed process may take
_OUTPUT_KEPT = 2048  # bytes of the end of its output
_NOT_STARTED = 126
_READ_AT_ONCE = 1 << 20  # bytes that are read at once: what is left in a pipe when the command has ended


def run_in_shell(command: str, env: Mapping[str, str], within: float, stdin: bytes = b"") -> tuple[int | None, str]:
    """Return the exit status of a command, -n if signal n ended it, and the end of its output, with stderr.

    The status is None if the command still ran after `within` seconds and was killed, and 126 if no shell could be started.
    Its PATH ends with the folder of our interpreter, where `ddplaunch` is.

    The command runs below a guard, which ends it with all that it has started, also when this process is killed.
    """
    us = os.getpid()
    guard, answers = fork_to_answer(lambda answer: _guard(us, answer, lambda: _run(command, env, within, stdin)))
    with after_cleanup():
        try:
            answered = b"".join(iter(lambda: os.read(answers, 1 << 16), b""))
        finally:
            os.close(answers)
            # where a signal has cut the reading short; else the guard has ended, or will
            os.kill(guard, signal.SIGTERM)
            _, status = os.waitpid(guard, 0)
    if not answered:  # the guard was killed, or could start no shell
        return os.waitstatus_to_exitcode(status), ""
    return msgpack.decode(answered, type=tuple[int | None, str])


def _guard(parent: int, answer: int, run_command: Callable[[], tuple[int | None, str]]) -> NoReturn:
    """Be the guard, a child that ends with its `parent`: run the command, write what became of it to `answer`, and exit.

    SIGTERM, which also comes when `parent` ends, ends the command, too.
    """
    try:
        signal.set_wakeup_fd(-1)  # else a signal here would wake the parent's loop
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        signal_at_end_of(parent, signal.SIGTERM)
        become_subreaper()  # daemons of the command come to us when their parents end
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        with after_cleanup():
            os.write(answer, msgpack.encode(run_command()))
    finally:
        os._exit(_NOT_STARTED)  # the parent takes this status where nothing was written


def _run(command: str, env: Mapping[str, str], within: float, stdin: bytes) -> tuple[int | None, str]:
    """Run the command in a shell, and kill the processes that the command leaves behind, whatever ends this call.

    This is called in the guard, a child that `run_in_shell` makes for it, so that all processes below are the command's. Returns
    what `run_in_shell` does.
    """
    from subprocess import PIPE, STDOUT, Popen, TimeoutExpired  # few jobs have such a command

    us, until = os.getpid(), time.monotonic() + within

    def prepare_shell() -> None:
        for notice in (signal.SIGUSR1, signal.SIGUSR2):  # which Slurm sends to all processes of a job
            signal.signal(notice, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal_at_end_of(us, signal.SIGKILL)

    stdin_file = memory_file("stdin")
    os.write(stdin_file, stdin)
    os.lseek(stdin_file, 0, os.SEEK_SET)
    process, code, tail = None, None, b""
    try:
        process = Popen(
            ["/bin/sh", "-c", command],
            stdin=stdin_file,
            stdout=PIPE,
            stderr=STDOUT,
            env={**env, "PATH": f"{env.get('PATH', os.defpath)}{os.pathsep}{os.path.dirname(sys.executable)}"},
            start_new_session=True,
            preexec_fn=prepare_shell,  # noqa: PLW1509 - unsafe only where there are other threads; the guard has none
        )
        os.close(stdin_file)
        assert process.stdout is not None
        tail = _tail_until_end(process.pid, process.stdout.fileno(), until)
    finally:
        code = process.poll() if process is not None else None  # None: it has not ended
        # sparing those that remove names of shared memory and then end by themselves
        signal_leftovers(signal.SIGKILL, tree.descendants(us), sparing=True)
        if process is not None:
            with suppress(TimeoutExpired):  # it is in uninterruptible sleep
                process.wait(_KILLED_WITHIN)
    return code, tail.decode(errors="replace")


def _tail_until_end(pid: int, output: int, until: float) -> bytes:
    """Return the end of what comes from the pipe `output` until the process ends, or until a time (monotonic seconds).

    What daemons of the process write later is not waited for.
    """
    os.set_blocking(output, False)
    ended = os.pidfd_open(pid)
    try:
        poll, tail = select.poll(), b""
        is_open, has_ended = True, False
        poll.register(ended, select.POLLIN)
        poll.register(output, select.POLLIN)
        while not has_ended and (left := until - time.monotonic()) > 0:
            has_ended = any(fd == ended for fd, _ in poll.poll(left * 1000))  # ms
            with suppress(BlockingIOError):  # nothing to read: the end of the process has woken us
                if data := os.read(output, _READ_AT_ONCE):
                    tail = (tail + data)[-_OUTPUT_KEPT:]
                elif is_open:  # all that write to it have closed it
                    is_open = False
                    poll.unregister(output)
        return tail
    finally:
        os.close(ended)


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def do_nothing(signum: int, frame: object) -> None:
    """Ignore a signal. With SIG_IGN in place of this, Python would print that it drops a signal which came just before."""


class _Ended(BaseException):
    """A signal has come; raised by its handler in the block."""


@contextmanager
def after_cleanup() -> Iterator[None]:
    """Let a signal end this process only after the `finally` of the block. Signals that are handled or ignored stay so."""
    ending = [signum for signum in _ENDING_SIGNALS if signal.getsignal(signum) is signal.SIG_DFL]
    received: list[int] = []

    def leave_block(signum: int, _frame: object) -> None:
        for each in ending:
            signal.signal(each, do_nothing)  # a second one would cut the cleanup short
        received.append(signum)
        raise _Ended

    for signum in ending:
        signal.signal(signum, leave_block)
    try:
        yield
    except _Ended:
        pass
    finally:
        for signum in ending:
            signal.signal(signum, signal.SIG_DFL)
    if received:
        os.kill(os.getpid(), received[0])  # ends this process
