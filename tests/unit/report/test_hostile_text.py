"""No text that a worker leaves behind keeps the agent, which has signals to answer, from its loop."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGABRT

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import first_failure
from ddplaunch.launcher.tell import causes
from ddplaunch.launcher.tell.causes import CAUSES, Evidence, Row, classify
from ddplaunch.launcher.tell.failure import FailureReport, render
from ddplaunch.record.seen.dump import parse_crash
from ddplaunch.record.seen.stack import frames_of, syntax_error_lines
from ddplaunch.spec import error_file
from ddplaunch.spec.outcome import WorkerError, WorkerExit
from ddplaunch.system.console.paint import Paint
from tests.unit.builders import worker_exit

# characters; the small one first, which shows even a cubic search within a minute; a square one takes many seconds with the other
SIZES = (1 << 14, 1 << 18)
LIMIT = 0.1  # seconds of processor time for one search
READING = 0.5  # seconds of processor time for what reads all of a text, once
PLAIN = (
    *(" ", "a", "a.", "1", "\n", "\r", "[", "\x1b[", "/", "lib/python3", "[rank0]: ", "[enforce fail at a.cc:1"),
    *('  File "', '  File "a", line 1, in f\n', "Traceback (most recent call last):\n", "Fatal Python error:\n"),
    *("store->get('x') got error: ", "gloo/transport/a:1] ", "EOFError\n", "SyntaxError: "),
)


def text(piece: str, size: int) -> str:
    return piece * (size // len(piece))


def raised(message: str) -> WorkerExit:
    return end(error=WorkerError(type="RuntimeError", message=message, traceback=message))


def end(*, error: WorkerError | None = None, stderr: str = "") -> WorkerExit:
    return worker_exit(0, 1, None if error else SIGABRT, error=error, stderr_tail=stderr)


def assert_quick(piece: str, function: Callable[..., object], *arguments: object, limit: float = LIMIT) -> None:
    began = time.process_time()
    function(*arguments)
    took = time.process_time() - began
    assert took < limit, f"{took:.2f} s for {piece!r}"


def patterns_of(search: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the patterns that a search applies."""
    patterns: list[str] = []

    class Recorder:
        MULTILINE = re.MULTILINE

        @staticmethod
        def search(pattern: str, text: str, flags: int = 0) -> re.Match[str] | None:
            patterns.append(pattern)
            return re.search(pattern, text, flags)

    with monkeypatch.context() as patch:
        patch.setattr(causes, "re", Recorder)
        patch.setattr(first_failure, "re", Recorder)
        search()
    return patterns


def hostile(patterns: list[str]) -> Iterator[str]:
    """Return what, repeated, comes close to these patterns again and again: their literal pieces, alone and joined."""
    for pattern in patterns:
        runs = re.findall(r"(?:\\\W|[^\\.*+?()\[\]{}|^$])+", pattern)
        pieces = [piece for run in runs if len(piece := re.sub(r"\\(\W)", r"\1", run)) > 1]
        yield from pieces
        yield from (f"{piece}\n" for piece in pieces)
        yield from ("".join(pieces[:at]) for at in range(2, min(len(pieces), 5)))
    yield from PLAIN


@pytest.mark.parametrize("row", CAUSES, ids=[f"{at}-{row.name}" for at, row in enumerate(CAUSES)])
def test_no_row_of_the_table_takes_long_for_any_text(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = patterns_of(lambda: row.predicate(end(), Evidence()), monkeypatch)
    for size in SIZES:
        for piece in hostile(patterns):
            long = text(piece, size)
            assert_quick(piece, row.predicate, raised(long), Evidence())
            assert_quick(piece, row.predicate, end(stderr=long), Evidence())


@pytest.mark.parametrize("kind", ["ImportError", "OSError", "ModuleNotFoundError"])
def test_no_row_takes_long_for_an_exception_of_a_kind_that_it_asks_for(kind: str) -> None:
    for piece in (".so", "a", ".so ", "libnccl.so: "):
        long = text(piece, SIZES[0])
        worker = end(error=WorkerError(type=kind, message=long, traceback=long))
        for row in CAUSES:
            assert_quick(piece, row.predicate, worker, Evidence())


def test_whether_a_failure_follows_another_is_soon_known_for_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = patterns_of(lambda: first_failure.follows_another(raised("")), monkeypatch)
    for size in SIZES:
        for piece in hostile(patterns):
            long = text(piece, size)
            assert_quick(piece, first_failure.follows_another, raised(long))


@pytest.mark.parametrize("piece", PLAIN)
def test_stacks_are_soon_found_in_any_text(piece: str) -> None:
    for size in SIZES:
        long = text(piece, size)
        for of in (long, f'  File "a", line 1, in f\n{long}', f"Fatal Python error:\nCurrent thread\n{long}"):
            error = WorkerError(type="SyntaxError", message="", traceback=of)
            assert_quick(piece, frames_of, error, limit=READING)
            assert_quick(piece, parse_crash, of, limit=READING)
            assert_quick(piece, syntax_error_lines, of, limit=READING)


@pytest.mark.parametrize("piece", PLAIN)
def test_a_report_is_soon_written_whatever_the_worker_wrote(piece: str, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    long = text(piece, error_file.LIMIT // 8)  # JSON writes a character with up to 6
    file.write_text(json.dumps({"message": {"message": long, "extraInfo": {"py_callstack": ""}}}))
    assert_quick(piece, error_file.read, str(file))
    assert error_file.read(str(file)) is not None
    for size in SIZES:
        long = text(piece, size)
        for first, second in ((raised(long), raised(f"{long}b")), (end(stderr=long), end(stderr=f"{long}b"))):
            exits = (first, replace(second, rank=1))
            assert_quick(piece, reported, *exits, limit=2 * READING)


def reported(*exits: WorkerExit) -> str:
    cause = classify(exits[0], Evidence())
    return render(FailureReport(first=exits[0], exits=exits, cause=cause, cwd="/"), Paint(colour=True, links=True))
