"""What `ddplaunch profile` costs a running job, beside torch's own profiler in the script, and when its file is there."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bed import Bed, Figure, Measured, program
from rests import wait_until

_WORKERS = 4
_SECONDS = 5


def profiled(bed: Bed) -> Iterator[Figure]:
    """Four workers train; their steps are compared without a profiler, under torch's and under ours."""
    taken, after = zip(*(_one(bed) for _ in range(bed.rounds(3))), strict=True)
    plain, under_torch, under_ours = (Measured.of(column) * 1000 for column in zip(*taken, strict=True))
    yield Figure(
        name=f"profile, {_WORKERS} workers: a step to one under torch's profiler alone",
        value=Measured.of([ours / torchs for _, torchs, ours in taken]),
        unit="x",
        target=1.1,
        how=f"{under_ours:.1f} ms, torch's profiler {under_torch:.1f} ms, without {plain:.1f} ms; {len(taken)} rounds",
    )
    yield Figure(
        name=f"profile, {_WORKERS} workers for {_SECONDS} s: file after",
        value=Measured.of(after),
        unit="s",
        target=10,
        how=f"from the end of the {_SECONDS} s until the command has returned",
    )


def _one(bed: Bed) -> tuple[list[float], float]:
    """Return the seconds of a step in the three ways, and those from the end of the profile to the file."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        job = bed.start([*bed.ddplaunch, "--nproc-per-node", str(_WORKERS), program("profiled"), folder, "40", "3"])
        wait_until((Path(folder) / "begun").exists, "the last phase", job)
        command = [
            *bed.ddplaunch,
            "profile",
            "profiled.py",
            "--seconds",
            str(_SECONDS),
            "--out",
            f"{folder}/trace.json.gz",
        ]
        with subprocess.Popen(
            command, env=bed.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stderr is not None
            next(line for line in child.stderr if "profiling" in line)
            began = time.time()
            rest = child.stderr.read()
        assert child.returncode == 0, rest
        after = time.time() - began - _SECONDS
        (Path(folder) / "window.new").write_text(json.dumps([began, began + _SECONDS]))
        (Path(folder) / "window.new").rename(Path(folder) / "window")
        assert job.wait() == 0
        steps: list[float] = json.loads((Path(folder) / "steps").read_text())
        return steps, after
