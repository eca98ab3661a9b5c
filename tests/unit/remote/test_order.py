"""The orders for hosts, and what the hosts make of them."""

from __future__ import annotations

import os

import pytest

from ddplaunch.cli.job import parse, resolve
from ddplaunch.launcher.start import dispatch
from ddplaunch.plan.cluster import Allocation, Endpoint
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.reach import order as orders
from ddplaunch.reach import protocol
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.console.streams import Screen, Stream

OUT = frozenset({Stream.OUT})
SCREEN = Screen(terminals=OUT, colour=frozenset(), live=OUT, links=True, columns=100, lines=30)


def spec_of(*arguments: str) -> JobSpec:
    return resolve(parse(arguments), {}, None)


def order_of(spec: JobSpec, hosts: list[Host], node_rank: int, env: dict[str, str] | None = None) -> protocol.HostOrder:
    allocation = Allocation(
        cluster="ssh",
        nnodes=(1, len(hosts)),
        hosts=tuple(host.address for host in hosts),
        endpoint=Endpoint(None, "node 0 says", spec.master_port, ""),
        hosts_to_start_on=tuple(hosts),
        starter="ssh",
    )
    written = orders.Orders(
        spec=spec, allocation=allocation, env=env or {}, cwd="/work", run_id="r-1", token="t", screen=SCREEN
    )
    return protocol.order(protocol.encode(written.for_host(node_rank)))


def there(order: protocol.HostOrder) -> JobSpec:
    return order.job.spec()


HOSTS = [Host(name="ann@a"), Host(name="b", slots=3), Host(name="c", devices=("1", "GPU-7"))]


def test_a_host_gets_the_job_without_what_concerns_only_where_it_was_typed():
    spec = spec_of(
        "--hosts", "a,b", "--nnodes", "2", "--master-port", "29500", "--max-restarts", "2", "train.py", "--hosts", "x"
    )
    got = there(order_of(spec, HOSTS, 0))
    assert (got.max_restarts, got.program) == (2, spec.program)
    assert (got.hosts, got.nnodes, got.master_port, got.run_id) == (None, (1, 1), None, "r-1")


def test_slots_and_devices_of_a_host_are_its_own():
    spec = spec_of("--hosts", "a,b,c", "train.py")
    assert [there(order_of(spec, HOSTS, node_rank)).nproc_per_node for node_rank in range(3)] == [None, 3, None]
    assert there(order_of(spec, HOSTS, 2)).devices == ("1", "GPU-7")


def test_options_keep_their_origin_and_their_text():
    spec = resolve(parse(["--hosts", "a", "--rdzv-timeout", "5", "-m", "train"]),
                        {"PET_RDZV_CONF": "join_timeout=60,last_call_timeout=7", "DDPLAUNCH_TIMEOUT": "1h30m"}, None)  # fmt: skip
    got = there(order_of(spec, HOSTS, 0))
    assert (got.rdzv_timeout, got.last_call, got.rdzv_conf, got.timeout) == (5.0, 7.0, spec.rdzv_conf, 5400.0)
    assert got.typed("timeout", "90m") == "DDPLAUNCH_TIMEOUT=90m"
    assert got.program == spec.program


def test_what_the_command_has_chosen_for_want_of_an_option_is_chosen_on_each_host():
    spec = dispatch.within_outer_grace(spec_of("--hosts", "a", "train.py"), {"SLURM_JOB_ID": "7"})
    got = there(order_of(spec, HOSTS, 0))
    assert (got.grace_period, got.origin("grace_period")) == (25.0, "default")


def test_arguments_and_variables_need_not_be_text():
    odd = os.fsdecode(b"\xff caf\xe9")
    order = order_of(spec_of("--hosts", "a", "train.py", odd), HOSTS, 0, {"ODD": odd})
    assert there(order).program.args == (odd,)
    assert orders.variables(order) == {"ODD": odd}


def test_variables_from_files_travel_apart_and_with_their_origin(tmp_path):
    odd = os.fsdecode(b"caf\xc3\xa9")
    (tmp_path / "a.env").write_text(f"A={odd}\nB=file\n")
    spec = spec_of("--hosts", "a", "--env-file", f"{tmp_path}/a.env", "--env", "B=typed", "train.py")
    order = order_of(spec, HOSTS, 0)
    assert not [
        word for word in (*order.job.program, *(text for one in order.job.given for text in one)) if b"caf" in word
    ]
    got = there(order)
    assert (dict(got.env), got.origins_of_secrets) == ({"A": odd, "B": "typed"}, {"A": "--env-file"})
    assert dict(got.env) == dict(spec.env)
    assert got.origins_of_secrets == spec.origins_of_secrets


def test_the_screen_travels():
    assert order_of(spec_of("train.py"), HOSTS, 0).screen == SCREEN


@pytest.mark.parametrize("number", [1, 3])
def test_each_host_follows_the_command_that_has_sent_its_order(number):
    allocation = orders.allocation(order_of(spec_of("train.py"), HOSTS[:number], number - 1))
    assert (allocation.node_rank, allocation.has_front) == (number - 1, True)
    assert allocation.rendezvous is not None
    assert (allocation.rendezvous.coordinator, allocation.rendezvous.addresses) == (False, (os.uname().nodename,))
