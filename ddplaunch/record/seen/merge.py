"""Merges the stacks of many processes: equal ones once, the program's own frames first. Pure; opens no file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import Struct

from ddplaunch.record.seen import Sample
from ddplaunch.record.seen.stack import is_library, location
from ddplaunch.spec.outcome import Frame
from ddplaunch.system.words import count, these_ranks

# what calls a function that it was given: its name says nothing about what is done
_WRAPPERS = {
    "wrapper",
    "wrapped",
    "inner",
    "decorate_context",
    "_call_impl",
    "_wrapped_call_impl",
    "__call__",
    "_fn",
    "<lambda>",
}
# where torch calls a collective, and waits for it, or for the other ranks to come
_COLLECTIVES = (
    *(f"torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "rendezvous")),
    "ddplaunch/worker/store.py",  # the store that rank 0 hosts, which waits for all
)
_MOST_FRAMES = 24  # of a stack that are shown


class Alike(Struct, frozen=True, kw_only=True):
    """Processes with equal stacks."""

    samples: tuple[Sample, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the job that they belong to."""
        return tuple(sorted({sample.rank for sample in self.samples}))

    @property
    def who(self) -> str:
        """Name them as a subject: "ranks 0-2,4", "2 children of rank 3"."""
        if not self.samples[0].child:
            return these_ranks(self.ranks)
        children = "a child" if len(self.samples) == 1 else f"{len(self.samples)} children"
        return f"{children} of {these_ranks(self.ranks)}"


def merge(samples: Iterable[Sample], *, threads: bool = False) -> list[Alike]:
    """Group equal stacks: workers before their children, those of many ranks first; `threads`: of all threads."""
    groups: dict[object, list[Sample]] = {}
    for sample in samples:
        stack = tuple((thread.name, thread.frames) for thread in sample.threads) if threads else sample.main
        groups.setdefault((bool(sample.child), sample.state, stack, sample.native), []).append(sample)
    merged = [Alike(samples=tuple(sorted(found, key=lambda one: (one.rank, one.pid)))) for found in groups.values()]
    return sorted(merged, key=lambda group: (bool(group.samples[0].child), -len(group.ranks), group.ranks))


def where(sample: Sample, cwd: str) -> str:
    """Say where a process is, in one line: "all_reduce, train.py:88 in train_step"."""
    return sample.state or _summary(sample.main, cwd) or "no Python frame"


def own_location(sample: Sample, cwd: str) -> str:
    """Say where in the program's own code a process is: "train.py:88 in train_step"."""
    own = own_frame(sample.main)
    return location(own, cwd) if own is not None else where(sample, cwd)


def own_frame(frames: Iterable[Frame]) -> Frame | None:
    """Return the first frame of the program's own code; `frames` are innermost first."""
    return next((frame for frame in frames if not is_library(frame)), None)


def is_waiting(sample: Sample) -> bool:
    """Whether a process waits for others in a collective, by torch's recorder or by its stack."""
    pending = any(not call.done for group in sample.groups or () for call in group.calls)
    return pending or any(frame.file.endswith(_COLLECTIVES) for frame in sample.main[:1])


def standing(sample: Sample) -> object:
    """Where a process stands: its stack, and how far it has come in its groups. Equal twice, it has not gone on between."""
    groups = (
        (group.name, group.completed, *((call.number, call.done) for call in group.calls))
        for group in sample.groups or ()
    )
    return sample.main, tuple(groups)


def _summary(frames: Sequence[Frame], cwd: str) -> str:
    """Write which function of a library the program calls, and where: "all_reduce, train.py:88 in train_step"."""
    own = next((index for index, frame in enumerate(frames) if not is_library(frame)), None)
    if own is None:
        return location(frames[0], cwd) if frames else ""
    called = next((frame for frame in reversed(frames[:own]) if frame.function not in _WRAPPERS), None)
    here = location(frames[own], cwd)
    return f"{_name(called)}, {here}" if called else here


def _name(frame: Frame) -> str:
    """The name of a function; of one like `__next__` with that of its module."""
    module = frame.file.rpartition("/")[2].removesuffix(".py")
    return f"{module}.{frame.function}" if frame.function.startswith("__") else frame.function


class Line(Struct, frozen=True):
    """A line about stacks."""

    text: str
    who: str = ""  # what stands before it, in a line that begins a group: "ranks 0-2"
    is_library: bool = False  # it is a frame of an installed package or the standard library

    def __str__(self) -> str:
        return f"{self.who}: {self.text}" if self.who else self.text


def lines(groups: Iterable[Alike], cwd: str, *, threads: bool = False) -> list[Line]:
    """Return groups of processes as text: a line that says who is where, and the stack below; a blank line between groups.

    `threads`: also the stacks of all other threads.
    """
    written: list[Line] = []
    for group in groups:
        sample = group.samples[0]
        if written:
            written.append(Line(""))
        written.append(Line(where(sample, cwd), group.who))
        if sample.native:  # the stack as py-spy has written it
            written += (Line(f"  {line}") for line in sample.native.splitlines())
        else:
            # if the innermost frame is the program's own, the line above has named it
            innermost_is_named = bool(sample.main) and not is_library(sample.main[0])
            written += _stack(sample.main[1:] if innermost_is_named else sample.main, cwd, "  ")
        if threads:
            others = [thread for thread in sample.threads if not thread.is_main]
            for number, thread in enumerate(others, 1):  # before Python 3.14 they have no name
                name = thread.name or f"{number} of {len(others)}"
                written += [Line(f"  thread {name}"), *_stack(thread.frames, cwd, "    ")]
    return written


def _stack(frames: Sequence[Frame], cwd: str, indent: str) -> list[Line]:
    """Return the lines of a stack, innermost frame first; of neighbouring frames in libraries, only the first."""
    written: list[Line] = []
    for of_library, neighbours in groupby(frames, is_library):
        found = list(neighbours)
        if of_library:
            more = f" (and {count(len(found) - 1, 'frame')} of libraries)" if len(found) > 1 else ""
            written.append(Line(f"{indent}{location(found[0], cwd)}{more}", is_library=True))
        else:
            written += (Line(f"{indent}{location(frame, cwd)}") for frame in found)
    left = len(written) - _MOST_FRAMES
    return written if left <= 0 else [*written[:_MOST_FRAMES], Line(f"{indent}... and {count(left, 'more frame')}")]
