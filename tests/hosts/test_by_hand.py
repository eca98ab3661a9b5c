"""Agents that users start on two hosts, by each way to say where node 0 is: all train, and find rank 0 where they should."""

import json

import pytest

from tests.conftest import until

HOSTS = ["node0", "node1"]
THIRD = "node2"


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed([*HOSTS, THIRD], names="both")


@pytest.fixture
def address(bed):
    """Return what is typed on a host, filled in: the name and addresses of node 0, and the host's own."""

    def address(host: str, typed: str) -> str:
        v4, v6 = (bed.address(HOSTS[0], family=family) for family in bed.families)
        own = bed.address(host)
        return typed.format(name=bed.name(HOSTS[0]), v4=v4, v6=v6, mapped=f"::ffff:{v4}", own=own)

    return address


LAST_CALL = ("--rdzv-conf", "last_call_timeout=60")
STATIC = ("--node-rank", "{node_rank}", "--master-addr")
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint")
TYPED = [
    *[(*STATIC, typed) for typed in ("{name}", "{v4}", "{v6}", "{mapped}")],
    ("--node-rank", "{node_rank}", "--rdzv-backend", "static", "--rdzv-endpoint", "[{v6}]:29500"),
    *[(*C10D, typed) for typed in ("{name}:29400", "{v4}:29400", "{v4}", "[{v6}]:29400", "[{v6}]", "{v6}", "{mapped}")],
    ("--node-rank", "{node_rank}", *C10D, "{v4}:29400"),
    (*C10D, "{v4}", "--local-addr", "{own}"),
]
NNODES = [
    ("--nnodes", "2"),
    ("--nnodes", "1:2", *LAST_CALL),
    ("--nnodes", "1:2", "--spares", "1", "--rdzv-conf", "last_call_timeout=1"),
]


@pytest.fixture
def start(job, address):
    """Start the command on hosts, with these words for where node 0 is."""

    def start(typed, *args, hosts=HOSTS):
        for host in hosts:
            filled = [word if word == "{node_rank}" else address(host, word) for word in typed]
            job.start_each("--rdzv-timeout", "20s", *filled, *args, hosts=[host])

    return start


def meet(job):
    """Wait for the commands, and return the variables of the two workers."""
    results = job.wait_each()
    assert {result.status for result in results.values()} == {0}, results
    variables = [json.loads(sign)["variables"] for sign in job.signs("place", 2)]
    assert {place["WORLD_SIZE"] for place in variables} == {"2"}
    return variables


@pytest.mark.parametrize("nnodes", NNODES, ids=" ".join)
@pytest.mark.parametrize("typed", TYPED, ids=" ".join)
def test_two_hosts_meet_where_that_was_typed(job, program, address, start, typed, nnodes):
    start(typed, *nnodes, program("place"))
    (where,) = {place["MASTER_ADDR"] for place in meet(job)}
    assert where in [address(HOSTS[0], one) for one in ("{name}", "{v4}", "{v6}", "{mapped}")]
    assert where in " ".join(address(HOSTS[0], one) for one in typed if one != "{node_rank}")


def test_one_that_has_no_rank_meets_one_that_has(job, program, start):
    start(("--node-rank", "0", *C10D, "{v4}"), *NNODES[1], program("place"), hosts=HOSTS[:1])
    start((*C10D, "{v4}"), *NNODES[1], program("place"), hosts=HOSTS[1:])
    assert [place["GROUP_RANK"] for place in meet(job)] == ["0", "1"]


@pytest.mark.parametrize("typed", [(*STATIC, "{v4}"), (*C10D, "[{v6}]:29400")], ids=" ".join)
def test_nodes_that_may_come_and_go_train(job, program, light_torch, start, typed):
    job.put("go")
    start(typed, *NNODES[1], program("exact_training"), 3)
    assert {result.status for result in job.wait_each().values()} == {0}
    assert len(set(job.signs("weights", len(HOSTS)))) == 1


@pytest.mark.parametrize("typed", [(*STATIC, "{v4}"), (*C10D, "[{v6}]:29400")], ids=" ".join)
def test_a_node_0_that_comes_back_is_met_where_that_was_typed(job, program, address, start, typed):
    args = ("--nnodes", "2:3", *LAST_CALL, program("restarts"), "goes_on_until_told")
    start(typed, *args, hosts=[*HOSTS, THIRD])
    job.signs("place-0", 3)
    job.bed.power_cut(HOSTS[0])
    until(lambda: "to come back" in job.err(THIRD), "the loss")
    job.bed.boot(HOSTS[0])
    start(typed, *args, hosts=HOSTS[:1])
    places = [json.loads(sign) for sign in job.signs("place-1", 3)]
    ((where,),) = [{place["MASTER_ADDR"] for place in places}]
    assert where in " ".join(address(HOSTS[0], one) for one in typed if one != "{node_rank}")
    job.put("finish")
    assert {result.status for result in job.wait_each(hosts=[*HOSTS, THIRD]).values()} == {0}
