"""Where the workers of a job in Slurm were, and what they were told about that."""

import json

from tests.conftest import PROGRAMS
from tests.slurm.job import Batch, SlurmJob
from tests.slurm.started import EACH, NODES

PLACE = PROGRAMS / "place.py"


def places(job: SlurmJob) -> list[dict[str, str]]:
    """The variables that workers have put up, by rank."""
    files = sorted((job.home / "signs").glob("place-*"), key=lambda path: int(path.name.removeprefix("place-")))
    return [json.loads(file.read_text())["variables"] for file in files]


def seats(job: SlurmJob) -> list[tuple[str, ...]]:
    """Where each worker was, and what it was told about that."""
    names = ("SLURMD_NODENAME", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [tuple(place[name] for name in names) for place in places(job)]


def expected(nodes: int = NODES, each: int = EACH) -> list[tuple[str, ...]]:
    """What `seats` should be."""
    world = nodes * each
    return [
        (f"node{rank // each + 1}", f"{rank}", f"{rank % each}", f"{rank // each}", f"{world}", f"{each}")
        for rank in range(world)
    ]


def done(batch: Batch) -> str:
    """Wait until a job has ended well, and give its output."""
    assert batch.wait() == "COMPLETED", batch.output()
    return batch.output()
