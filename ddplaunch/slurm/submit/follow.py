"""Waits for a job that was submitted, and shows its output as it comes.

Nobody tells of a change of a job or of a file on another host, so both are looked at now and then.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

from ddplaunch.exitcodes import of_signal
from ddplaunch.record import NOTHING, record
from ddplaunch.slurm import scontrol
from ddplaunch.slurm.submit import job_state, output_paths
from ddplaunch.slurm.submit.tail import Tail

LOOK = 0.25  # seconds between two looks at the output
ASK_FIRST, ASK_LAST = 1.0, 5.0  # seconds between two questions to the controller, at first and at last
APPEAR = 3.0  # seconds after the end in which a file may still appear on a shared folder

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@record(kw_only=True)
class Submitted:
    """A job that Slurm has taken."""

    id: str
    cluster: str | None = None  # where several are asked

    @property
    def cancel(self) -> str:
        """The command that ends it."""
        return f"scancel {self.id}" if self.cluster is None else f"scancel --clusters={self.cluster} {self.id}"

    @property
    def parsable(self) -> str:
        """The job as `sbatch --parsable` writes it."""
        return self.id if self.cluster is None else f"{self.id};{self.cluster}"


class _Left(Exception):
    """Whoever waited will not wait any longer."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def wait(job: Submitted, *, tails: Sequence[Tail] = (), follow: bool = False) -> int:
    """Wait until the job ends, telling what becomes of it, and give its status; a signal ends the waiting, not the job.

    `tails` are the files of its output that were there before it.
    """
    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, _leave)
    watch = _Watch(job, tails, follow)
    try:
        return watch.to_the_end()
    except _Left as left:
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        watch.say_below(f"job {job.id} goes on; `{job.cancel}` ends it")
        return of_signal(left.signum)
    except BrokenPipeError:  # whoever read has seen enough
        watch.say_below(f"job {job.id} goes on; `{job.cancel}` ends it")
        return of_signal(signal.SIGPIPE)


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    raise _Left(signum)


class _Watch:
    def __init__(self, job: Submitted, tails: Sequence[Tail], follow: bool) -> None:
        self._job = job
        self._tails = {tail.path: tail for tail in tails}
        self._shown: Mapping[str, int] = NOTHING  # the files of the job, and where each is shown
        self._follow = follow
        self._seen = job_state.Seen()
        self._answered = True
        self._ran = False  # then there is output, soon
        self._mid_line = False
        self._dropped: set[int] = set()  # streams that cannot be written

    def to_the_end(self) -> int:
        pause, ask_at = ASK_FIRST, 0.0
        while True:
            now = time.monotonic()
            if now >= ask_at:
                if self._ask(now):
                    pause = ASK_FIRST
                if self._seen.over:
                    return self._seen.status
                ask_at = time.monotonic() + pause
                pause = min(1.5 * pause, ASK_LAST)
            if self._show() and " running" not in self._seen.line:
                ask_at = 0.0  # it runs, then
            time.sleep(LOOK if self._follow else max(ask_at - time.monotonic(), 0))

    def _ask(self, now: float) -> bool:
        """Ask what the job does, tell it, and say whether there was something to tell."""
        try:
            jobs = scontrol.jobs(os.environ, self._job.id, self._job.cluster)
        except scontrol.UnknownJob:
            seen = job_state.forgotten(self._seen)
            lines: tuple[str, ...] = (seen.ended[""].words,)
        except scontrol.Unknown as error:
            if self._answered:
                self._answered = False
                self.say_below(f"Slurm does not answer, and is asked again: {error}")
            return False
        else:
            self._answered = True
            if self._follow and jobs:
                self._shown = output_paths.of_job(jobs[0])
                self._ran = job_state.has_run(jobs[0])
            seen, lines = job_state.look(self._seen, jobs, now)
        if seen.over:
            self._show_the_rest()
        self._seen = seen
        for line in lines:
            # what tells of an element of an array begins with its name
            self.say_below(f"job {line}" if line.startswith(f"{self._job.id}_") else f"job {self._job.id} {line}")
        return bool(lines)

    def _show(self, *, end: bool = False) -> bool:
        """Show what is new, and say whether there was anything."""
        anything = False
        for path, stream in self._shown.items():
            tail = self._tails.setdefault(path, Tail(path))
            while data := tail.read(end=end):
                self._write(stream, data)
                anything = True
        return anything

    def _show_the_rest(self) -> None:
        give_up = time.monotonic() + APPEAR
        while True:
            self._show(end=True)
            missing = [path for path in self._shown if not self._tails[path].is_there]
            if not missing or not self._ran or time.monotonic() > give_up:
                break
            time.sleep(LOOK)
        if self._ran:
            for path in missing:
                self.say_below(f"{path} cannot be seen from here")

    def _write(self, stream: int, data: bytes) -> None:
        if stream in self._dropped:
            return
        self._mid_line = not data.endswith(b"\n")
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(stream, view) :]
            except BlockingIOError:  # whoever shares the file with us has set O_NONBLOCK
                select.select((), (stream,), ())
            except BrokenPipeError:
                raise
            except OSError as error:
                self._dropped.add(stream)
                reason = (error.strerror or str(error)).lower()
                self.say_below(
                    f"cannot write to {'stdout' if stream == 1 else 'stderr'}: {reason}; the output is in its file"
                )
                return

    def say_below(self, text: str) -> None:
        """Say something on a line of its own."""
        if self._mid_line and os.isatty(2) and os.isatty(1):
            sys.stderr.write("\n")
        self._mid_line = False
        say(f"ddplaunch: {text}")


def say(text: str) -> None:
    """Say something to people."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, AttributeError):
        pass  # nobody is there to be told
