"""The verbs that speak with one running job: `ddplaunch attach` (pdb in a worker), `ddplaunch stop` and `ddplaunch stacks`."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.record.seen import Group
from ddplaunch.record.seen.collectives import explain, lines_of_nccl_ras
from ddplaunch.record.seen.merge import Line, lines, merge
from ddplaunch.record.seen.reasons import reasons
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import AskStacks
from ddplaunch.spec.program import working_directory
from ddplaunch.system.console.tables import NAME, NOTE, ODD, Block, Look, line, section, written
from ddplaunch.system.errors import LaunchError, indented, say, visible
from ddplaunch.system.exitcodes import NODE_LOST, OK
from ddplaunch.system.fields import Malformed
from ddplaunch.system.process.apart import disk_watch_paused
from ddplaunch.system.words import count, duration
from ddplaunch.tools.runs import choice, client, find
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.find import Known, heading

UNREACHED = 1  # the exit status where no debugger gets in, since the worker runs no Python
_DEBUGGER_WITHIN = 10.0  # seconds
_STOP_WITHIN = 5.0  # seconds until the agent has taken a request to stop
_STOP_SENT_WITHIN = 0.2  # seconds for the same, where the agent has not answered just now


@contextmanager
def _connection(run: Known, *, hint: str | None = None) -> Iterator[socket.socket]:
    """Connect to a run, for a conversation in the body of `with`.

    Raises:
        LaunchError: the run is silent (`hint` is the hint then), or gives a malformed answer.
        OSError: the run has ended.
    """
    assert run.replies is not None
    try:
        with run.replies.socket_path.connect() as sock:
            yield sock
    except (TimeoutError, BlockingIOError):  # the second by connect(): too many wait there already
        what = f"run {run.name} does not answer: its agent is stopped, or hangs"
        raise LaunchError(what, hint=hint, status=NODE_LOST) from None
    except Malformed as error:
        raise LaunchError(f"run {run.name} gives an answer that this version does not understand: {error}") from None


# --- attach


def attach(env: Mapping[str, str], named: str | None, rank_typed: str | None) -> int:
    """Debug a rank of the job that is meant, and return the exit status; `rank_typed`: the value of -r; None: not typed."""
    if rank_typed is not None and not rank_typed.isdecimal():
        raise LaunchError(f"-r {rank_typed}: expected a number, 0 or larger", hint="ddplaunch attach -r 0")
    if not (os.isatty(0) and os.isatty(1)):
        raise LaunchError(
            "ddplaunch attach needs a terminal, but stdin or stdout is none",
            hint="`ddplaunch stacks` shows where the workers are, and needs none",
        )
    run = choice.choose_running(env, named, "attach", *(["-r", rank_typed] if rank_typed is not None else []))
    assert run.replies is not None
    world_size = run.replies.run.world_size if run.replies.run is not None else 0  # 0: not known
    if rank_typed is None and world_size > 1:
        raise LaunchError(f"run {run.name} has {count(world_size, 'worker')}: which one?", hint="ddplaunch attach -r 0")
    rank = int(rank_typed or 0)
    if world_size and rank >= world_size:
        raise choice.no_such_ranks(run.name, [rank], world_size)
    try:
        with _connection(run) as sock:
            return _debug(sock, run, rank, Look.of_stdout(env))
    except OSError:
        raise LaunchError(f"run {run.name} has just ended", status=NODE_LOST) from None


def _debug(sock: socket.socket, run: Known, rank: int, look: Look) -> int:
    """Carry the conversation between the terminal and pdb in the worker of a rank; return the exit status.

    The worker sends what pdb says, and sometimes asks for a line; it lets the script go on when the conversation ends. `look` is
    for the stack that is shown where no debugger gets in.
    """
    try:
        for reply in client.replies_of(sock, requests.Attach(rank), _DEBUGGER_WITHIN):
            match reply:
                case requests.RequestRefused(runs_no_python=True):
                    say(f"rank {rank} runs no Python just now, so that no debugger can open; it is here:\n")
                    here = text_of_stacks(run, WantedStacks(ranks=str(rank)), look)
                    sys.stdout.write(f"{here}\n")
                    return UNREACHED
                case requests.RequestRefused(reason):
                    raise LaunchError(f"run {run.name}: {indented(reason)}")
                case requests.Done():
                    say(f"this is {heading(run)}")
                    say(f"rank {rank} is held; `c`, `q` or Ctrl-D lets it go on")
                    # at the prompt Ctrl-C only drops the line
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    import readline  # noqa: F401 - lines that are typed can be edited from now on
                case requests.Said(text, asks_for_line, is_last):
                    if not asks_for_line:
                        sys.stdout.write(visible(text))
                        sys.stdout.flush()
                    elif (line := _read_line(text, sock)) is not None:
                        sock.sendall(f"{line}\n".encode(errors="replace"))
                    else:
                        break
                    if is_last:
                        break
        else:  # the connection was closed before pdb had said its last
            raise _Lost
    except KeyboardInterrupt:
        pass
    except (_Lost, ConnectionError):
        sys.stdout.write("\n")
        say(f"rank {rank} is held no more: it has ended, or its job is being stopped")
        return OK
    say(f"rank {rank} goes on")
    return OK


class _Lost(Exception):
    """The worker is not at the other end any more."""


def _read_line(prompt: str, sock: socket.socket) -> str | None:
    """Read a line from the terminal; None at its end (Ctrl-D).

    input() waits for the terminal alone, so the kernel is asked for SIGIO when something happens at the socket: the handler then
    ends the waiting if the worker is lost.

    Raises:
        _Lost: the connection was closed meanwhile.
    """

    def raise_if_lost(*_: object) -> None:
        with suppress(BlockingIOError):
            if not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise _Lost

    signal.signal(signal.SIGIO, raise_if_lost)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, os.O_ASYNC)
    try:
        raise_if_lost()  # no signal comes for what has happened before
        while True:
            try:
                with disk_watch_paused():
                    return input(visible(prompt))
            except EOFError:
                sys.stdout.write("\n")
                return None
            except KeyboardInterrupt:
                sys.stdout.write("\n")  # the line is thrown away, as by any pdb
            except SystemError as error:
                # a handler raised just when input() had its result: that of Ctrl-C, or the one above
                if not isinstance(error.__cause__, KeyboardInterrupt):
                    raise _Lost from error
    finally:
        fcntl.fcntl(sock, fcntl.F_SETFL, 0)


# --- stop


def stop(env: Mapping[str, str], named: Sequence[str], *, every: bool = False) -> int:
    """Stop the jobs that are named, the only job, or with `every` all jobs of this host, side by side; return the exit status.

    Raises:
        LaunchError: a name is that of no job here, so that none is stopped; or a job does not take the request.
    """
    if every and named:
        raise LaunchError(f"--all and {named[0]} do not go together", hint="leave one of them out")
    here = [*map(find.of_running, find.running(env))] if every else []
    names: Sequence[str | None] = named or [None]  # None: the only job; if there is none, or several, that is an error
    chosen = here or [choice.choose_running(env, name, "stop") for name in names]
    statuses, errors = list[int](), list[LaunchError]()
    each_once = {run.replies.socket_path: run for run in chosen if run.replies}
    stops = [_stop(run) for run in each_once.values()]
    # `_stop` yields twice: first each job takes the request, and only then is the end of any awaited (None: to the last yield)
    for number_of_yields in (1, None):
        for stopping in stops:
            try:
                statuses += [status for status in islice(stopping, number_of_yields) if status is not None]
            except LaunchError as error:  # the others are stopped all the same
                errors.append(error)
    if not errors:
        return max(statuses)
    for other in errors[1:]:
        say(other.message)
    raise errors[0]


def _stop(run: Known) -> Iterator[int | None]:
    """Ask a job to stop; yield None once the job has taken the request, and the exit status once it has ended.

    Raises LaunchError: the job does not take the request.
    """
    name, began = run.name, time.monotonic()
    assert run.replies is not None
    nnodes, what_ends = 1, name
    try:
        with _connection(run, hint="send SIGTERM to the command that started it; a second one kills the job") as sock:
            # an agent that has not answered just now is asked to stop all the same, and does so when it can
            within = _STOP_WITHIN if run.replies.run is not None else _STOP_SENT_WITHIN
            for reply in client.replies_of(sock, requests.StopRun(), within):
                match reply:
                    case requests.Run(phase="waiting"):
                        what_ends = f"this node of {name}"
                        say(f"{name} waits for node 0. Stopping this node, and no other that waits for it")
                        yield None
                    case requests.Run(nnodes=nnodes):
                        say(f"stopping {heading(run)}, as Ctrl-C does; Ctrl-C here only ends the waiting")
                        yield None
                    case requests.Done(status):
                        say(f"{what_ends} has ended with status {status}, {duration(time.monotonic() - began)} later")
                        yield OK
                        return
                    case requests.RequestRefused(reason):
                        raise LaunchError(f"run {name} does not take the request: {indented(reason)}")
    except OSError:
        pass  # the agent ended before it said how the job ended
    if nnodes > 1:
        say(f"who coordinates {name} was lost before its end. Its other nodes stop their workers")
        yield NODE_LOST
    else:
        say(f"{name} has ended; its status is not known")
        yield OK


STACKS_WITHIN = 1.0  # seconds that workers have
_TRAVEL_TIME = 1.5  # seconds, for the child that asks them and for the channel
_NATIVE_WITHIN = 10.0  # seconds that py-spy has


class WantedStacks(Struct, frozen=True, kw_only=True):
    """What is to be shown, as it was typed."""

    ranks: str | None = None
    threads: bool = False  # all of them, not only the main one
    native: bool = False  # with frames of C, by py-spy
    as_json: bool = False

    @property
    def typed(self) -> list[str]:
        """The options, to be typed again."""
        given = {"--threads": self.threads, "--native": self.native, "--json": self.as_json}
        ranks = ["-r", self.ranks] if self.ranks is not None else []
        return [*ranks, *(flag for flag, is_given in given.items() if is_given)]


def show_stacks(env: Mapping[str, str], named: str | None, want: WantedStacks) -> str:
    """Return the stacks of the job that is meant, for stdout."""
    choice.ranks_meant(want.ranks)
    if want.native and not shutil.which("py-spy"):
        raise LaunchError("--native needs py-spy, which is not installed here", hint="type `pip install py-spy`")
    run = choice.choose_running(env, named, "stacks", *want.typed)
    if not want.as_json:
        say(f"stacks of {heading(run)}")
    return text_of_stacks(run, want, Look.of_stdout(env))


def text_of_stacks(run: Known, want: WantedStacks, look: Look) -> str:
    """Ask this job for its stacks, and return them as text in colours and a width (`look`), or as JSON.

    Raises:
        LaunchError: no node has answered, or there is no such rank.
    """
    ranks, name = choice.ranks_meant(want.ranks), run.name  # ranks: None for all
    replies = _ask_for_stacks(run, want)
    samples = replies.samples
    # 0: the nodes have not met, so that it is not known
    world_size = replies.run.world_size if replies.run is not None else 0
    if ranks is not None and world_size:
        possible = {sample.rank for sample in samples}.union(range(world_size))
        if unknown := sorted(ranks - possible):
            raise choice.no_such_ranks(name, unknown, world_size)
    shown = [sample for sample in samples if ranks is None or sample.rank in ranks]
    # the program's paths are shown as its own report shows them, where both have the same working directory
    cwd = working_directory() or ""
    waits = [*reasons(samples, cwd), *explain(samples, cwd)]  # errors that ranks have printed, then who waits for whom
    silent = find.silent(replies.nodes)
    if replies.problem:
        silent.append(f"run {name} {indented(replies.problem)}")
    if want.as_json:
        import json

        data = {"run_id": run.run_id, "waits": waits, "problems": silent, "processes": [_plain(one) for one in shown]}
        return json.dumps(data, indent=1)
    is_suspended = replies.run is not None and replies.run.phase == "suspended"
    parts: list[list[Block]] = [
        [line((f"run {name} is suspended", ODD))] if is_suspended else [],
        [line((text, ODD)) for text in waits],
        [_line(each) for each in lines(merge(shown, threads=want.threads), cwd, threads=want.threads)],
        [line(text) for text in lines_of_nccl_ras(samples)],
        [line((text, ODD)) for text in silent],
    ]
    blocks = [section(*part) for part in parts if part]
    return written(blocks, look) if blocks else f"run {name} has no worker now"


def _ask_for_stacks(run: Known, want: WantedStacks) -> RunReplies:
    """Ask a run for the stacks of its workers; raise LaunchError if no node has answered."""
    assert run.replies is not None
    within = _NATIVE_WITHIN if want.native else STACKS_WITHIN
    question = AskStacks(within, want.threads, want.native)
    replies = client.ask(run.replies.socket_path, question, within + _TRAVEL_TIME)
    if replies is None or (replies.problem and not replies.nodes):
        problem = replies.problem if replies is not None else "has just ended"
        raise LaunchError(f"run {run.name} {indented(problem)}", status=NODE_LOST)
    return replies


def _line(shown: Line) -> Block:
    if shown.who:
        return line((shown.who, NAME), ": ", shown.text)
    return line((shown.text, NOTE if shown.is_library else ""))


def _plain(value: Any) -> Any:
    """Return a Struct as JSON has it; the members of a group as numbers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    if not isinstance(value, Struct):
        return value
    fields = {**asdict(value), "members": value.ranks} if isinstance(value, Group) else asdict(value)
    return {name: _plain(part) for name, part in fields.items()}
