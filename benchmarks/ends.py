"""How long after the crash of one worker all others are gone and the command has returned."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bed import Bed, Figure, best, program

_GRACE = 1.0  # seconds


def crash(bed: Bed) -> Iterator[Figure]:
    """One of 8 workers crashes while the others wait."""
    ours = [*bed.ddplaunch, "--nproc-per-node", "8"]
    rounds, few = bed.rounds(9), bed.rounds(3)
    (mine,) = best(rounds, lambda: _after_crash(bed, ours, status=3))
    (theirs,) = best(few, lambda: _after_crash(bed, [*bed.torchrun, "--standalone", *ours[-2:]], status=1))
    how = f"best of {rounds}; torchrun {theirs * 1e3:.0f} ms, best of {few}"
    yield Figure(name="crash, 8 workers: others gone after", value=mine * 1e3, unit="ms", target=25, how=how)
    patient = [*ours, "--grace-period", str(_GRACE)]
    (mine,) = best(few, lambda: _after_crash(bed, patient, "stubborn", status=3))
    slow = [*bed.torchrun, "--standalone", *ours[-2:], "--shutdown-timeout", str(int(_GRACE))]
    theirs = _after_crash(bed, slow, "stubborn", status=1)
    how = f"{mine * 1e3:.0f} ms with {_GRACE:g} s of grace; best of {few}; torchrun --shutdown-timeout {_GRACE:g}: {theirs:.1f} s"
    name = "crash, others ignore SIGTERM: beyond the grace period"
    yield Figure(name=name, value=(mine - _GRACE) * 1e3, unit="ms", target=50, how=how)


def _after_crash(bed: Bed, launcher: Sequence[str], *words: str, status: int) -> float:
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        command = bed.start([*launcher, program("waits"), folder, "crash", *words])
        ended = command.wait()
        now = time.monotonic()
        left = bed.left()
        assert ended == status, f"{launcher[0]} ended with {ended}, not {status}"
        assert not left, f"{launcher[0]} left processes: {left}"
        return now - float(Path(folder, "crashed").read_text())
