"""How fast the output of workers gets through, and that all of it does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bed import Bed, Beside, Figure, Rounds, program

_WORKERS = 4
_LINES = 100_000
_BLOCK = 65536 // 70 * 70  # bytes, as in floods.py


def lines(bed: Bed) -> Iterator[Figure]:
    """Four workers write 100,000 lines of 70 bytes each, one in each write."""
    count = str(_WORKERS)
    work = [program("writes"), str(_LINES), "1"]
    rounds = bed.rounds(3)
    taken = Rounds(
        rounds,
        lambda: _to_file(bed, [*bed.ddplaunch, "--nproc-per-node", count, *work], b"[%d] "),
        lambda: _to_file(bed, [*bed.torchrun, "--standalone", "--nproc-per-node", count, *work], b""),
    )
    mine, theirs = taken.medians()
    yield Figure(
        name=f"{_WORKERS} x {_LINES:,} lines: to torchrun without --tee",
        value=taken.of(lambda mine, theirs: mine / theirs),
        unit="x",
        target=1,
        how=f"{mine:.2f} s, torchrun {theirs:.2f} s; {rounds} rounds; to a file; no line lost or torn",
        beside=Beside(f"{_WORKERS} workers print {_LINES:,} lines each", mine, theirs, "s"),
    )


def flood(bed: Bed) -> Iterator[Figure]:
    """Four workers write blocks of lines as fast as they can; whoever reads them drops them."""
    blocks = 800 if bed.quick else 2400
    rounds = bed.rounds(3)
    taken = Rounds(rounds, lambda: _discarded(bed, 0), lambda: _discarded(bed, blocks))
    idle, took = taken.medians()
    size = _WORKERS * blocks * _BLOCK / 1e6
    yield Figure(
        name="flood, 4 workers: forwarded with prefixes",
        value=taken.of(lambda idle, took: size / (took - idle)),
        unit="MB/s",
        target=200,
        more_is_better=True,
        how=f"{size:.0f} MB in {took - idle:.2f} s, after the start; {rounds} rounds; logged to {bed.folder.parent}",
    )


def _to_file(bed: Bed, argv: list[str], prefix: bytes) -> float:
    path = bed.folder / "output"
    with path.open("wb") as file:
        took = bed.seconds(argv, stdout=file)
    _verify(path, prefix)
    path.unlink()
    return took


def _verify(path: Path, prefix: bytes) -> None:
    """Check that each worker's lines are all there, whole, and in their order."""
    written = [0] * _WORKERS
    heads = [(prefix % rank if prefix else b"") + b"rank %d line " % rank for rank in range(_WORKERS)]
    with path.open("rb") as file:
        for line in file:
            rank = next((rank for rank, head in enumerate(heads) if line.startswith(head)), None)
            assert rank is not None, f"a torn line: {line!r}"
            expected = heads[rank] + b"%010d " % written[rank]
            assert line.startswith(expected), f"expected {expected!r}, found {line!r}"
            assert len(line) == 70 + (len(prefix % rank) if prefix else 0), f"a torn line: {line!r}"
            assert line.endswith(b"x\n"), f"a torn line: {line!r}"
            written[rank] += 1
    assert written == [_LINES] * _WORKERS, f"lines are missing: {written}"


def _discarded(bed: Bed, blocks: int) -> float:
    reader = bed.start(["cat"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    began = time.perf_counter()
    argv = [*bed.ddplaunch, "--nproc-per-node", str(_WORKERS), program("floods"), str(blocks)]
    bed.seconds(argv, stdout=reader.stdin)
    reader.stdin.close()
    reader.wait()
    return time.perf_counter() - began
