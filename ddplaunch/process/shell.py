"""A shell's command that the user gave: it has a time limit, its output is bounded, and nothing of it is left."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from ddplaunch.process import tree
from ddplaunch.process.ending import after_cleanup
from ddplaunch.process.linux import become_subreaper, cease_to_be_subreaper, memory_file, signal_at_end_of

_KILLED = 2.0  # seconds that the end of a killed process may take
_KEPT = 2048  # bytes of the end of its output
_MOST = 1 << 20  # bytes that are read at once: what is left in a pipe when the command has ended


def run_in_shell(command: str, env: Mapping[str, str], within: float, stdin: bytes = b"") -> tuple[int | None, str]:
    """Return the exit status of a command, -n if signal n ended it, and the end of its output, with stderr.

    The status is None if it was killed because it still ran after `within` seconds. Blocks until then: call it in a child.
    """
    from subprocess import PIPE, STDOUT, Popen, TimeoutExpired  # few jobs have such a command

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal_at_end_of(us, signal.SIGKILL)

    us, until = os.getpid(), time.monotonic() + within
    given = memory_file("stdin")
    os.write(given, stdin)
    os.lseek(given, 0, os.SEEK_SET)
    become_subreaper()  # daemons of the command come to us when their parents end
    not_ours = {process.pid for process in tree.descendants(us)}
    process, code, tail = None, None, b""
    with after_cleanup():
        try:
            process = Popen(
                ["/bin/sh", "-c", command],
                stdin=given,
                stdout=PIPE,
                stderr=STDOUT,
                env=dict(env),
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - who calls this has one thread
            )
            os.close(given)
            assert process.stdout is not None
            tail = _tail_until_end(process.pid, process.stdout.fileno(), until)
        finally:
            code = process.poll() if process is not None else None
            for left in tree.descendants(us, not_ours):
                tree.signal_process(left, signal.SIGKILL)
            if process is not None:
                with suppress(TimeoutExpired):  # it is in uninterruptible sleep
                    process.wait(_KILLED)
                assert process.stdout is not None
                process.stdout.close()
            tree.reap(not_ours)
            cease_to_be_subreaper()
    return code, tail.decode(errors="replace")


def _tail_until_end(pid: int, output: int, until: float) -> bytes:
    """Return the end of what a pipe brings until the process ends. What daemons of the process write later is not waited for."""
    os.set_blocking(output, False)
    ended = os.pidfd_open(pid)
    try:
        poll, tail = select.poll(), b""
        is_open, has_ended = True, False
        poll.register(ended, select.POLLIN)
        poll.register(output, select.POLLIN)
        while not has_ended and (left := until - time.monotonic()) > 0:
            has_ended = any(fd == ended for fd, _ in poll.poll(left * 1000))
            with suppress(BlockingIOError):
                if data := os.read(output, _MOST):
                    tail = (tail + data)[-_KEPT:]
                elif is_open:
                    is_open = False
                    poll.unregister(output)
        return tail
    finally:
        os.close(ended)
