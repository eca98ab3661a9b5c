"""What `ddplaunch check` prints: where ranks disagree, which failed, and what was compared; for people, or as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from ddplaunch.record.seen.stack import frames_of
from ddplaunch.spec.outcome import Frame
from ddplaunch.system.console.tables import BAD, GOOD, NAME, NOTE, Block, line, section, sentence
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import compress, count, duration, some, these_ranks
from ddplaunch.tools.check.compare import Compared, in_short, where
from ddplaunch.tools.check.notes import Trace
from ddplaunch.tools.check.run import Wanted

_SCHEMA = 1
_NEEDS_GPU = re.compile(
    r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|No HIP GPUs|invalid device ordinal"
    r"|current compilation's accelerator support|'torch\._C' has no attribute '_cuda_"
)
_MOST_LINES = 5  # of the output of a rank that failed without an exception,
_LONGEST_LINE = 300  # and characters of a line: a progress bar may be one line of megabytes


class Checked(Struct, frozen=True, kw_only=True):
    """All that is known once the ranks have been compared."""

    wanted: Wanted
    traces: Sequence[Trace]
    compared: Compared
    seconds: float  # that the check took
    cwd: str  # the folder of the program: paths are shown relative to it

    @property
    def is_wrong(self) -> bool:
        """Whether the job would not run: ranks disagree, or one does not get through."""
        return bool(self.compared.mismatches) or any(trace.is_wrong for trace in self.traces)

    def where(self, frames: Sequence[Frame]) -> str:
        """Return where in the program's own code a stack is: "train.py:88 in train"; "" for no stack."""
        return where(frames, self.cwd)


def blocks(checked: Checked) -> Iterator[Block]:
    """Yield the mismatches and failures, then the limits of the check, then a line that sums all up."""
    wanted, traces, compared = checked.wanted, checked.traces, checked.compared
    for mismatch in compared.mismatches:
        yield line(("mismatch: ", BAD), mismatch.text)
    for text, output, hint in _failures(checked):
        parts = [line(("error: ", BAD), text), *(line((f"  {words}", NOTE)) for words in output)]
        yield section(*parts, *([sentence("hint: ", hint)] if hint else []))
    if notes := list(_notes(checked)):
        yield section(*(sentence(("note: ", NAME), text) for text in notes))
    failed = [trace.rank for trace in traces if trace.is_wrong]
    if compared.mismatches:
        verdict = ("disagree", BAD)
    elif failed:
        verdict = (f"{len(failed)} of them did not get through" if len(traces) > 1 else "did not get through", BAD)
    elif compared.groups:
        verdict = (f"agree in {count(compared.calls, 'collective')} of {count(compared.groups, 'group')}", GOOD)
    else:
        verdict = ("got through", GOOD)
    yield line(
        f"{these_ranks(wanted.ranks)} of {wanted.world_size}: ",
        verdict,
        f", {_steps_done(traces)} ({duration(checked.seconds)})",
    )


def _steps_done(traces: Sequence[Trace]) -> str:
    low, high = min(trace.steps for trace in traces), max(trace.steps for trace in traces)
    return count(high, "step") if low == high else f"{low} to {high} steps"


class _Failure(NamedTuple):
    """Why a rank did not get through."""

    text: str  # "raised ValueError: ...", to follow the rank
    location: str = ""  # "train.py:88 in train"
    hint: str = ""


def _failures(checked: Checked) -> Iterator[tuple[str, list[str], str]]:
    """Yield for ranks that did not get through a sentence, the end of their output, and a hint; equal ones once."""
    traces_by_failure: dict[_Failure, list[Trace]] = {}
    for trace in checked.traces:
        if trace.is_wrong:
            traces_by_failure.setdefault(_failure(checked, trace), []).append(trace)
    for failure, traces in traces_by_failure.items():
        first = traces[0]
        # of a rank that ended with a status or by a signal, its output alone may say why
        lines = first.output.splitlines()[-_MOST_LINES:] if first.end == "failed" else []
        output = [text if len(text) <= _LONGEST_LINE else f"...{text[-_LONGEST_LINE:]}" for text in lines]
        at = f": {failure.location}" if failure.location else ""
        yield f"{these_ranks([trace.rank for trace in traces])} {failure.text}{at}", output, failure.hint


def _failure(checked: Checked, trace: Trace) -> _Failure:
    """Return why a rank that `is_wrong` did not get through."""
    if trace.end == "late":
        text = f"did not come to the end of step {trace.steps + 1} in {duration(checked.wanted.seconds)}"
        hint = "no other rank answers in a check. If the script only needs more time, `--timeout 15m` gives it"
        return _Failure(text, checked.where(trace.frames), hint)
    error = trace.error
    if error is None:
        verb = "was" if trace.how_it_ended.startswith("killed") else "ended with"
        return _Failure(f"{verb} {trace.how_it_ended}")
    first_line = Redactor().text(error.message.strip().partition("\n")[0][:300])
    exception = f"{error.type}: {first_line}" if first_line else error.type
    hint = ""
    # a call whose `peer`, which is always noted then, should have sent objects
    futile = next((call for call in trace.calls if call.got_nothing), None)
    if _NEEDS_GPU.search(error.message):
        hint = (
            "a check runs on the CPU, unless this machine has as many GPUs as a node of the job. Let the script choose: "
            '`device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"`'
        )
    elif futile is not None:
        hint = (
            f"it got nothing from rank {futile.peer} by {futile.operation} ({checked.where(futile.frames)}), because that "
            f"rank was not checked before. `--ranks {compress({*checked.wanted.ranks, futile.peer or 0})}` checks both"
        )
    innermost_first = tuple(reversed(frames_of(error)))
    return _Failure(f"raised {exception}", checked.where(innermost_first), hint)


def _notes(checked: Checked) -> Iterator[str]:
    """Yield the limits of this check: ranks that stopped early, steps that never came, groups with one checked rank."""
    wanted, traces, compared = checked.wanted, checked.traces, checked.compared
    # a check goes no further than a save: the program would write files as the whole job does
    saving: dict[tuple[int, str], list[int]] = {}  # ranks, by the steps that were done and the line
    for trace in traces:
        if trace.end == "saves":
            saving.setdefault((trace.steps, checked.where(trace.frames)), []).append(trace.rank)
    for (steps, location), ranks in saving.items():
        after = f"after step {steps}" if steps else "before a step"
        yield f"{these_ranks(ranks)} would save {after}: {location}. Nothing after that was checked"
    stopped_by_number = [trace for trace in traces if trace.end == "calls"]
    if stopped_by_number:
        ranks, step = [trace.rank for trace in stopped_by_number], stopped_by_number[0].steps + 1
        yield f"{these_ranks(ranks)} asked for so many collectives that their check ended in step {step}"
    took_step_or_stopped = any(trace.steps or trace.is_wrong or trace.end == "saves" for trace in traces)
    if not any(trace.groups for trace in traces):
        yield "no rank has made a process group, so there was nothing to compare"
    elif not compared.mismatches and not took_step_or_stopped:
        yield "no rank has taken a step of an optimizer, so the whole program was checked"
    if compared.uncompared:  # of each such group, one more rank is named
        mates = (next(rank for rank in group if rank not in wanted.ranks) for group in compared.uncompared)
        groups = some(map(in_short, compared.uncompared), 2)
        yield (
            f"of {count(len(compared.uncompared), 'group')} ({groups}) only one rank was checked. "
            f"`--ranks {compress({*wanted.ranks, *mates})}` compares more"
        )


def as_json(checked: Checked) -> str:
    """Return all as JSON; docs/guides/simulate.md has the schema."""
    ranks, compared = [], checked.compared
    for trace in checked.traces:
        failure = _failure(checked, trace) if trace.is_wrong else _Failure("", checked.where(trace.frames))
        of_rank = {"rank": trace.rank, "end": trace.end, "steps": trace.steps, "calls": len(trace.calls)}
        ranks.append({**of_rank, "seconds": round(trace.seconds, 3), "error": failure.text, "where": failure.location})
    report = {
        "schema": _SCHEMA,
        "world_size": checked.wanted.world_size,
        "nproc_per_node": checked.wanted.nproc_per_node,
        "agree": not checked.is_wrong,
        "seconds": round(checked.seconds, 3),
        "collectives": compared.calls,
        "groups": compared.groups,
        "mismatches": [
            {"step": one.step, "group": one.group, "text": one.text, "sides": one.sides} for one in compared.mismatches
        ],
        "ranks": ranks,
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
