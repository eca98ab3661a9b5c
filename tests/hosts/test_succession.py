"""A network that falls apart under an elastic job: one part of the nodes at most goes on with it, and the others end."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from tests.conftest import until
from tests.hosts.bed import Bed
from tests.hosts.job import HostsJob

HOSTS = ["node0", "node1", "node2", "node3"]
SILENCE = 2  # seconds, the heartbeat timeout of these jobs


@pytest.fixture(scope="module")
def three_hosts(make_bed: Callable[..., Bed]) -> Bed:
    """Four of them."""
    return make_bed(HOSTS)


@pytest.fixture
def start(job: HostsJob, program, light_torch):
    """Start a training on each of these hosts, and wait for its first steps."""

    def start(hosts: Sequence[str], nnodes: str) -> None:
        told = ["--node-rank", "{node_rank}", "--nproc-per-node", 1, "--heartbeat-timeout", f"{SILENCE}s"]
        last_call = ["--rdzv-conf", "last_call_timeout=60"] if nnodes.endswith(str(len(hosts))) else []
        job.at_endpoint(*told, *last_call, program("torch_steps"), nnodes=nnodes, hosts=hosts)
        makes_steps(job, 0, hosts)

    return start


def makes_steps(job: HostsJob, generation: int, hosts: Sequence[str]) -> None:
    """Wait until a generation on these hosts has made some steps."""
    places = [job.sign(f"place-{generation}-{rank}") for rank in range(len(hosts))]
    assert places == [f"{host} {len(hosts)}" for host in hosts]
    line = f"{generation} {hosts[0]}"
    until(lambda: steps(job).count(line) > 5, f"steps of {line}")


def steps(job: HostsJob) -> list[str]:
    """The generation and the host of rank 0 of each step, in the order in which the steps were made."""
    file = job.home / "signs" / "steps"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("nnodes", "parts"),
    [
        ("1:3", (["node0"], ["node1", "node2"])),
        ("1:3", (["node2"], ["node0", "node1"])),
        ("1:4", (["node2", "node3"], ["node0", "node1"])),
        ("1:2", (["node1"], ["node0"])),
    ],
)
def test_of_two_parts_one_goes_on(job, start, nnodes, parts):
    end, go_on = parts
    start(sorted([*end, *go_on]), nnodes)
    job.bed.part(*end)
    makes_steps(job, 1, go_on)
    results = job.wait_each(hosts=end)
    assert {host: result.status for host, result in results.items()} == dict.fromkeys(end, 122), results
    job.put("finish")
    results = job.wait_each(hosts=go_on)
    assert {host: result.status for host, result in results.items()} == dict.fromkeys(go_on, 0), results
    assert [line for line, _ in itertools.groupby(steps(job))] == ["0 node0", f"1 {go_on[0]}"]
    for host in end:
        print(job.err(host))
