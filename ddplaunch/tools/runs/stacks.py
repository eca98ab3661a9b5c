"""`ddplaunch stacks`: where the workers of a running job are, and who waits for whom; as text or as JSON."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.record.seen import Group
from ddplaunch.record.seen.collectives import explain, ras_lines
from ddplaunch.record.seen.merge import Line, lines, merge
from ddplaunch.record.seen.reasons import reasons
from ddplaunch.record.window.questions import AskStacks
from ddplaunch.spec.program import working_directory
from ddplaunch.system.console.tables import NAME, NOTE, ODD, Block, Look, line, section, written
from ddplaunch.system.errors import LaunchError, indented, say
from ddplaunch.system.exitcodes import NODE_LOST
from ddplaunch.tools.runs import choice, client, find
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.find import Known, heading

WITHIN = 1.0  # seconds that workers have
_TRAVEL_TIME = 1.5  # seconds, for the child that asks them and for the channel
_NATIVE_WITHIN = 10.0  # seconds that py-spy has


class Wanted(Struct, frozen=True, kw_only=True):
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


def show(env: Mapping[str, str], named: str | None, want: Wanted) -> str:
    """Return the stacks of the job that is meant, for stdout."""
    choice.ranks_meant(want.ranks)
    if want.native and not shutil.which("py-spy"):
        raise LaunchError("--native needs py-spy, which is not installed here", hint="type `pip install py-spy`")
    run = choice.choose_running(env, named, "stacks", *want.typed)
    if not want.as_json:
        say(f"stacks of {heading(run)}")
    return text_of(run, want, Look.of_stdout(env))


def text_of(run: Known, want: Wanted, look: Look) -> str:
    """Ask this job for its stacks, and return them as text in colours and a width (`look`), or as JSON.

    Raises:
        LaunchError: no node has answered, or there is no such rank.
    """
    ranks, name = choice.ranks_meant(want.ranks), run.name  # ranks: None for all
    replies = _ask(run, want)
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
        [line(text) for text in ras_lines(samples)],
        [line((text, ODD)) for text in silent],
    ]
    blocks = [section(*part) for part in parts if part]
    return written(blocks, look) if blocks else f"run {name} has no worker now"


def _ask(run: Known, want: Wanted) -> RunReplies:
    """Ask a run for the stacks of its workers; raise LaunchError if no node has answered."""
    assert run.replies is not None
    within = _NATIVE_WITHIN if want.native else WITHIN
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
