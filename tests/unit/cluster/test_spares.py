"""How many nodes run workers and how many are spares, by what was asked for and what the cluster has."""

import pytest

from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.discover import discover
from ddplaunch.spec.job import Given
from ddplaunch.spec.options.resolve import job_spec
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import Host


def nodes(*options: str) -> tuple[int, int]:
    given = [Given.typed(*option.split("=")) for option in options]
    asked = job_spec(given, ["train.py"])
    return discover(ClusterFacts(spec=asked, env={}, hostname="here", here=Host())).nnodes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("simulate=share", "nnodes=2", "spares=1"), (2, 3)),
        (("simulate=share", "nnodes=2:4", "spares=1"), (2, 5)),
        (("hosts=a,b,c", "nnodes=2", "spares=1"), (2, 3)),
        (("hosts=a,b,c", "spares=1"), (2, 3)),
        (("hosts=a,b", "spares=1"), (1, 2)),
    ],
)
def test_spares_come_on_top_of_the_nodes_that_run_workers(options: tuple[str, ...], expected: tuple[int, int]) -> None:
    assert nodes(*options) == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("spares=1",), "--spares 1, but there is 1 node"),
        (("hosts=a,b", "spares=2"), "--spares 2, but there are 2 nodes"),
        (("hosts=a,b", "nnodes=2", "spares=1"), "--nnodes 2 with --spares 1, but there are 2 nodes"),
    ],
)
def test_more_spares_than_there_are_nodes_are_refused(options: tuple[str, ...], error: str) -> None:
    with pytest.raises(LaunchError, match=error):
        nodes(*options)
