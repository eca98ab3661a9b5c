"""The command lines of torch's own tests of torchrun: what is decided for each. compatibility.md lists those tests.

What a real torchrun would do with them was tried apart; tests/cli/test_shim.py starts jobs by that name.
"""

import socket
from collections.abc import Mapping

import pytest

from ddplaunch.cli.job import parse, resolve
from ddplaunch.plan import Plan
from ddplaunch.plan.cluster import Allocation
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.discover import discover
from ddplaunch.plan.make import make_plan
from ddplaunch.record.folders import run_id_of
from ddplaunch.spec.job import JobSpec, StreamChoice, Streams
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import Host
from tests.unit.plan.test_make import node

SHIM = {"PET_NPROC_PER_NODE": "1"}  # as torchrun's default
OURS = "--monitor-interval=1 --start-method=spawn"  # without effect, as under torchrun when a script is run
ONE_NODE = f"--nnodes=1 --nproc-per-node=4 {OURS}"
ELASTIC = f"--nnodes=1:2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400 --rdzv-id=7 {OURS}"
STATIC = f"{ONE_NODE} --master-addr=localhost --master-port=29511 --node-rank=0"
SCRIPT = ("script", "train.py", "--out=d")
COMMAND = ("/bin/sh", "train.sh", "d")


def asked(line: str, variables: Mapping[str, str]) -> tuple[JobSpec, Allocation]:
    """The job of a command line, and where it runs."""
    spec = resolve(parse(line.split()), {**SHIM, **variables}, None)
    return spec, discover(ClusterFacts(spec=spec, env={}, hostname=socket.gethostname(), here=Host()))


def planned(line: str, variables: Mapping[str, str] | None = None, gpus: int = 0) -> Plan:
    """What node 0 is to start."""
    spec, allocation = asked(line, variables or {})
    return make_plan(spec, allocation, node(gpus, cpus=3), run_id=run_id_of(spec))


PLANNED = {
    "a script": (f"{ONE_NODE} --rdzv-id=7 train.py --out=d", {}, 0, 4, SCRIPT),
    "a script, where each node is started by hand": (f"{STATIC} train.py --out=d", {}, 0, 4, SCRIPT),
    "a program": (f"{ONE_NODE} --rdzv-id=7 --no-python /bin/sh train.sh d", {}, 0, 4, COMMAND),
    "no number of workers": (f"--nnodes=1 --rdzv-id=7 {OURS} --no-python /bin/sh train.sh d", {}, 0, 1, COMMAND),
    "all by variables": (
        "/bin/sh train.sh d",
        {
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "4",
            "PET_RDZV_ID": "7",
            "PET_MONITOR_INTERVAL": "1",
            "PET_START_METHOD": "spawn",
            "PET_NO_PYTHON": "1",
            "PET_MODULE": "0",
        },
        0,
        4,
        COMMAND,
    ),
    "auto, without GPUs": (f"--nnodes=1 --nproc-per-node=auto {OURS} train.py --out=d", {}, 0, 3, SCRIPT),
    "auto, with GPUs": (f"--nnodes=1 --nproc-per-node=auto {OURS} train.py --out=d", {}, 2, 2, SCRIPT),
    "gpu": (f"--nnodes=1 --nproc-per-node=gpu {OURS} train.py --out=d", {}, 2, 2, SCRIPT),
    "one of up to two nodes": (f"{ELASTIC} --max-restarts=0 train.py --out=d", {}, 0, 4, SCRIPT),
    "standalone": (f"{ONE_NODE} --standalone train.py --out=d", {}, 0, 4, SCRIPT),
    "the path of a script": (f"--run-path {ONE_NODE} train.py --out=d", {}, 0, 4, SCRIPT),
    "torchrun's own logs": (f"--run-path {ONE_NODE} --logs_specs=default train.py --out=d", {}, 0, 4, SCRIPT),
}


@pytest.mark.parametrize(("line", "variables", "gpus", "workers", "program"), PLANNED.values(), ids=PLANNED)
def test_each_starts_what_torchrun_starts(line, variables, gpus, workers, program):
    plan = planned(line, variables, gpus)
    assert [worker.rank for worker in plan.workers] == list(range(workers))
    assert {worker.argv[-3:] for worker in plan.workers} == {program}
    if "rdzv-id=7" in line or "PET_RDZV_ID" in variables:
        assert {worker.variables["TORCHELASTIC_RUN_ID"] for worker in plan.workers} == {"7"}


REFUSED = {
    "a program is no module": f"{ONE_NODE} --no-python --module /bin/sh train.sh",
    "no such number": "--nnodes=1 --nproc-per-node=unknown train.py",
    "no such range of nodes": "--nnodes=2:20:30 train.py",
    "no such plug-in for logs": f"--run-path {ONE_NODE} --logs_specs=missing train.py",
}


@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED)
def test_what_torchrun_refuses_is_refused_before_anything_starts(line: str) -> None:
    with pytest.raises(LaunchError) as caught:
        planned(line)
    assert caught.value.status == 2


def test_variables_that_do_not_go_together_are_refused_as_flags_are() -> None:
    with pytest.raises(LaunchError, match="PET_MODULE"):
        planned("/bin/sh train.sh", {"PET_NO_PYTHON": "1", "PET_MODULE": "1"})


@pytest.mark.parametrize("quote", ["", "'"], ids=["bare", "with quotes that reached us"])
def test_settings_of_the_rendezvous_say_how_long_the_nodes_wait(quote: str) -> None:
    settings = f"{quote}join_timeout=5,last_call_timeout=1,timeout=5{quote}"
    spec, where = asked(f"{ELASTIC} --rdzv-conf={settings} train.py", {})
    assert (spec.rdzv_timeout, spec.last_call, where.nnodes) == (5, 1, (1, 2))


def test_a_port_that_was_given_is_the_one_at_which_torch_meets() -> None:
    plan = planned(f"{STATIC} train.py")
    assert (plan.master_addr, plan.master_port) == ("localhost", 29511)


def test_the_prefix_of_a_line_may_be_a_variable_of_the_caller() -> None:
    prefix = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "}
    spec, _ = asked(f"{ONE_NODE} --redirect=3 --tee=3 --no-python /bin/sh train.sh", prefix)
    assert spec.log_line_prefix_template == "[rank${rank}]: "
    assert spec.tee == spec.redirects == StreamChoice(default=Streams.BOTH)
