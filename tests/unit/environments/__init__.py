"""Variables as real launchers set them, captured on hosts of a test bed, and the question that is asked of them.

Slurm 22.05 (`srun -N3 --ntasks-per-node=1` and `=4`, a batch script, salloc), Open MPI 4.1.4 and 5.0.11, MPICH 4.0.2, each
started from a host `head`, or from the host of rank 0, on gpu-a-01 and gpu-a-02. What named files of that bed is left out.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddplaunch.plan.cluster import Allocation
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.discover import discover
from tests.unit.builders import Host, spec


def captured(name: str, **changes: str) -> dict[str, str]:
    """Return a captured environment; a variable that is changed to "" is not there."""
    text = (Path(__file__).parent / f"{name}.env").read_text()
    env = dict(line.split("=", 1) for line in text.splitlines())
    return {key: value for key, value in {**env, **changes}.items() if value}


def found(
    env: Mapping[str, str] | None = None,
    *,
    hostname: str = "here",
    files: Mapping[str, str] | None = None,
    origins: Mapping[str, str] | None = None,
    bad: Collection[str] = (),
    **fields: Any,
) -> Allocation:
    """Return what is discovered for a job with these fields, which leaves out `bad` hosts."""
    asked = spec(origins=origins, **fields)
    return discover(ClusterFacts(spec=asked, env=env or {}, hostname=hostname, here=Host(files), avoided=tuple(bad)))
