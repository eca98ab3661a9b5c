"""The lines that a job or a generation is stopped and closed with, the failure summary aside. Pure."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from signal import SIGINT, SIGKILL, SIGQUIT
from typing import TYPE_CHECKING

from ddplaunch.record.seen import Whereabouts
from ddplaunch.spec.outcome import StartFailure, Traces, WorkerExit
from ddplaunch.system.console.paint import plain
from ddplaunch.system.errors import MORE_OPEN_FILES, indented
from ddplaunch.system.words import count, duration, signal_name, size, these_ranks, tilde

if TYPE_CHECKING:  # an agent that joins others needs none of it
    from ddplaunch.launcher.decide.job import State
    from ddplaunch.launcher.decide.node import SignalReceived

_NOT_FOUND = "give the program's path, or a name that is in PATH"
_NOT_EXECUTABLE = "is it a program for this machine, and executable (`chmod +x`)?"
_START_HINTS = {
    errno.ENOENT: _NOT_FOUND,
    errno.ENOTDIR: _NOT_FOUND,
    errno.EACCES: _NOT_EXECUTABLE,
    errno.ENOEXEC: _NOT_EXECUTABLE,
    errno.E2BIG: (
        "its variables and arguments are too long together, which a quarter of `ulimit -s` limits. "
        "`env | wc -c` counts the bytes of this shell's variables"
    ),
    errno.EMFILE: MORE_OPEN_FILES,
    errno.ENFILE: "the machine is at its limit of open files: see `sysctl fs.file-max`",
    errno.EAGAIN: "the machine is at a limit of processes: see `ulimit -u`, and pids.max of the control group",
}
_VISIBLE = 1 << 20  # bytes written since a stop that are more than last words to a log
_IF_SLOW = "hint: if it was only slow, let a rank print a line now and then, or give `--hang-timeout` a longer time"
_KEYS: dict[int, str] = {SIGINT: " (Ctrl-C)", SIGQUIT: " (Ctrl-\\)"}


def headline(text: str) -> str:
    """Return the first line of a closing line or of a report, in any colours, as the public record has it."""
    return plain(text).partition("\n")[0].removeprefix("ddplaunch: ").removeprefix("error: ")


def render_finished(workers: int, seconds: float, *, restarts: int = 0, nodes: int = 1) -> str:
    """Return the line for a job whose workers all ended with 0: "4 workers finished in 12.3 s"."""
    on = f" on {count(nodes, 'node')}" if nodes > 1 else ""
    after = f" after {count(restarts, 'restart')}" if restarts else ""
    return f"{count(workers, 'worker')}{on} finished in {duration(seconds)}{after}"


def render_after_notice(workers: int, notice: int, seconds: float, *, nodes: int = 1) -> str:
    """Return the line for a job whose workers all left after a notice: "4 workers left after SIGUSR1, 12.3 s after the start"."""
    on = f" on {count(nodes, 'node')}" if nodes > 1 else ""
    return f"{count(workers, 'worker')}{on} left after {signal_name(notice)}, {duration(seconds)} after the start"


def starting_again(wait: float, number: int, used: int, most: int, window: float | None) -> str:
    """Return the line before another generation: "starting all workers again in 2 s (restart 1 of 3)".

    `used` of `most` restarts are used, which a generation that makes progress gives back; a `window` is the time of the budget.
    """
    pause = f" in {wait:g} s" if wait else ""
    if window is not None:
        budget = f", at most {most} in {duration(window)}"
    else:
        budget = f" of {most}" if used == number else f", {used} of {most} used"
    return f"starting all workers again{pause} (restart {number}{budget})"


def render_start_failure(who: str, failure: StartFailure) -> str:
    """Return the report of a worker that could not be started."""
    hint = _START_HINTS.get(failure.errno)
    return f"error: {who} could not be started: {indented(failure.reason)}\n" + (f"\nhint: {hint}\n" if hint else "")


def render_stopping(grace_period: float, running: int, nnodes: int, *, next_ctrl_c_kills: bool) -> str:
    """Return a line on what is being stopped, and that a second Ctrl-C kills; of other nodes no number of workers is known."""
    what = count(running, "worker") if nnodes == 1 else f"the workers on {nnodes} nodes"
    return f"stopping {what}, up to {duration(grace_period)}{'; Ctrl-C again kills' if next_ctrl_c_kills else ''}"


def render_repeated(event: SignalReceived, front: int) -> str:
    """Return a line on which request to stop a signal repeats, and how to kill now; `front` is the pid of the command."""
    again, first = signal_name(event.signum), signal_name(event.repeats_request_of)
    sent = f"`kill -QUIT {front}`" if event.quit_kills else f"{again} once more"
    kills = f"{sent} kills the workers at once"
    if again == first:
        return f"the second {again} counts as the first one. {kills}"
    return f"{again} counts as the same request to stop as {first} before it. {kills}"


def render_still_running(written: Mapping[int, int], left: float) -> str:
    """Return a line on who still runs after a stop, with the bytes that each has written since, and how long they have."""
    rank, most = max(written.items(), key=lambda item: item[1], default=(0, 0))
    saves = f"; rank {rank} has written {size(most)} since" if most >= _VISIBLE else ""
    return f"{these_ranks(sorted(written))} still {'runs' if len(written) == 1 else 'run'}{saves}; up to {duration(left)} more"


def render_stuck(ranks: Sequence[int], seconds: float) -> str:
    """Return a line on who is killed early: "rank 0 was asked to end and has not moved for 5 s: SIGKILL"."""
    was, has = ("was", "has") if len(ranks) == 1 else ("were", "have")
    return f"{these_ranks(ranks)} {was} asked to end and {has} not moved for {duration(seconds)}: SIGKILL"


def render_stopped(signum: int, after: float | None, exits: Sequence[WorkerExit]) -> str:
    """Return the line for a job that a signal ended: "stopped by SIGINT (Ctrl-C) after 3 min 2 s; 4 workers ended in 0.2 s".

    `after` is the number of seconds from the start of the job to the signal; None: no worker had been started yet.
    """
    when = "before the workers were started" if after is None else f"after {duration(after)}"
    return f"stopped by {signal_name(signum)}{_KEYS.get(signum, '')} {when}{_ends(exits)}"


def render_short(first: WorkerExit, why: str) -> str:
    """Return what can be said of a failure where the full report cannot be made; `why` is what that has raised."""
    ended = f"ended with status {first.status}" if first.signal is None else f"was {first.how}"
    lines = [f"error: rank {first.rank} (pid {first.pid} on {first.host}) {ended}"]
    if first.error is not None:
        lines.append(f"  {first.error.type}: {first.error.message}")
    if first.log is not None:
        lines.append(f"  logs {first.log}")
    lines.append(f"  this summary is short, since what writes the full one has failed: {why}")
    return "\n".join(map(indented, lines)) + "\n"


def render_timeout(timeout: float, exits: Sequence[WorkerExit]) -> str:
    """Return the line for a job at its --timeout: "stopped: --timeout of 2 h was reached; 4 workers ended in 0.2 s"."""
    return f"stopped: --timeout of {duration(timeout)} was reached{_ends(exits)}"


def render_hang(found: Whereabouts, timeout: float, state: State, traces: Mapping[int, Traces], home: str) -> str:
    """Return the report of a hang: what is wrong, who is where, what became of the workers, where their stacks are.

    `traces` are the facts of the nodes, by the ranks of their workers. Each node keeps its workers' stacks in its log folder:
    the report names that of the rank for which the others wait, or else of the lowest rank.
    """
    explanation, lines = found.explanation, found.locations
    still = f"no worker had moved for {duration(timeout)}"
    with_folder = (rank for rank in (*found.awaited, *sorted(traces)) if rank in traces and traces[rank].log_folder)
    rank = next(with_folder, None) if lines else None
    stacks = []
    if rank is not None:
        hosts = {end.rank: end.host for end in state.generation.exits}
        on = f" on {hosts[rank]}" if rank in hosts and len(state.members.taking_part) > 1 else ""
        stacks = [f"stacks {tilde(traces[rank].log_folder or '', home)}/stacks/{state.generation.number}.txt{on}"]
    how_ended = _ends(state.generation.exits).removeprefix("; ")
    stopped = [how_ended] if how_ended else []
    sections = [
        [f"error: the job hangs: {explanation}   ({still})" if explanation else f"error: the job hangs: {still}"],
        [f"  {line}" for line in lines if line != explanation],
        [f"  {line}" for line in (*stopped, *stacks)],
        [] if found.is_explained else [_IF_SLOW],  # a hint for a job that may only be slow
    ]
    return "\n\n".join("\n".join(map(indented, section)) for section in sections if section) + "\n"


def _ends(exits: Sequence[WorkerExit]) -> str:
    """Return how long the workers took to end, and which of them had to be killed: "; 4 workers ended in 0.2 s"; "" if none."""
    stopped = [end for end in exits if end.stopped_with is not None]
    if not stopped:
        return ""
    took = [end.at - end.stopped_at for end in stopped if end.stopped_at is not None]
    killed = [end.rank for end in stopped if end.stopped_with == SIGKILL]
    text = f"; {count(len(stopped), 'worker')} ended" + (f" in {duration(max(took))}" if took else "")
    return text + (f", {these_ranks(killed)} by SIGKILL" if killed else "")
