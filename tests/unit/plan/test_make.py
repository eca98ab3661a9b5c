import os
from functools import partial
from signal import Signals
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.plan import Agreed, Plan, PlannedAgent, agent_runs
from ddplaunch.plan.cluster import Allocation, Endpoint, Task
from ddplaunch.plan.devices import Core, Device, Hardware
from ddplaunch.plan.devices.interpreter import TorchBuild
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.make import make_plan
from ddplaunch.spec.job import JobSpec, Program, ProgramKind, StreamChoice, Streams
from ddplaunch.system.errors import LaunchError
from tests.unit import builders

CUDA = TorchBuild(version="2.13.0+cu130", cuda="13.0", hip=None, xpu=None, nccl=True)
CPU = TorchBuild(version="2.13.0+cpu", cuda=None, hip=None, xpu=None, nccl=False)
SCRIPT = Program(kind=ProgramKind.SCRIPT, target="train.py", args=("--lr", "0.1"))
# design section 3; MASTER_PORT and the others of a generation are test_plan_variables.py's
OF_THE_JOB = """RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
ROLE_NAME MASTER_ADDR TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS PYTHONUNBUFFERED DDPLAUNCH_RUN_ID DDPLAUNCH_BACKEND DDPLAUNCH_DEVICE"""


spec = partial(builders.spec, program=SCRIPT)


HERE = Allocation(
    cluster="local",
    hosts=("gpu01",),
    node_rank=0,
    endpoint=Endpoint("127.0.0.1", "a single node", None, "a free one is reserved at the start"),
)
A = Endpoint("a", "the first node", None, "a free one is reserved at the start")


def node(gpus: int = 0, cpus: int = 8, *, chosen: tuple[int, ...] | None = None, **changes: Any) -> Node:
    """A machine with GPUs of one model and one NUMA node of cores without hyperthreading."""
    devices = tuple(Device(kind="cuda", index=n, visible_as=str(n), uuid=f"GPU-{n}") for n in range(gpus))
    hardware = Hardware(devices=devices, device_source="NVML" if gpus else "none found", cpus=tuple(range(cpus)))
    values: dict[str, Any] = {
        "host": "gpu01",
        "hardware": hardware,
        "devices": devices if chosen is None else tuple(devices[n] for n in chosen),
        "cores": tuple(Core(cpus=(cpu,), numa_node=0, package=0, cache=0) for cpu in range(cpus)),
        "build": CUDA if gpus else None,
        "python": "/usr/bin/python",
        "bootstrap": "/lib/bootstrap.py",
        "env": {},
        **changes,
    }
    return Node(**values)


def plan(asked: JobSpec | None = None, here: Node | None = None, where: Allocation = HERE) -> Plan:
    return make_plan(asked or spec(), where, here or node(), run_id="run-1")


def each(decided: Plan, name: str) -> list[str]:
    return [worker.variables[name] for worker in decided.workers]


def message(asked: JobSpec, here: Node) -> tuple[str, str | None]:
    with pytest.raises(LaunchError) as raised:
        plan(asked, here)
    assert raised.value.status == 2
    return raised.value.message, raised.value.hint


# --- what is decided, and why


def test_a_machine_without_gpus_runs_one_worker_with_all_cpus() -> None:
    decided = plan()
    assert (decided.world_size, decided.backend, decided.pin) == (1, "gloo", "device")
    assert each(decided, "OMP_NUM_THREADS") == ["8"]
    assert each(decided, "DDPLAUNCH_DEVICE") == ["cpu"]
    assert decided.reasons == {
        "workers": "no accelerator, so one worker",
        "devices": "none found",
        "backend": "no accelerator",
        "threads": "8 usable CPUs / 1 worker",
        "master_addr": "a single node",
        "master_port": "a free one is reserved at the start",
        "pin": "default",
    }
    assert decided.notes == ()


def test_a_machine_with_gpus_runs_one_worker_on_each() -> None:
    decided = plan(spec(), node(4))
    assert [(worker.rank, worker.device, worker.devices) for worker in decided.workers] == [
        (n, f"cuda:{n}", (f"GPU-{n}",)) for n in range(4)
    ]
    assert (decided.backend, decided.reasons["backend"]) == ("nccl", "every worker has a GPU of its own")
    assert each(decided, "DDPLAUNCH_BACKEND") == ["nccl"] * 4
    assert each(decided, "OMP_NUM_THREADS") == ["2"] * 4
    assert decided.notes == ()


@pytest.mark.parametrize(
    ("asked", "here", "reason"),
    [
        (spec(), node(4), "NVML"),
        (spec(nproc_per_node=1), node(4), "of 4 (NVML)"),
        (spec(devices=("2", "0")), node(4, chosen=(2, 0)), "--devices, of 4 (NVML)"),
        (spec(devices=("1", "0")), node(2, chosen=(1, 0)), "--devices, NVML"),
        (spec(nproc_per_node="cpu"), node(4), "of 4 (NVML)"),
    ],
)
def test_the_devices_are_told_with_the_way_they_were_found(asked: JobSpec, here: Node, reason: str) -> None:
    assert plan(asked, here).reasons["devices"] == reason


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("workers", {"nproc_per_node": 2, "origins": {"nproc_per_node": "ddplaunch.toml"}}, "ddplaunch.toml"),
        ("backend", {"backend": "mpi"}, "--backend"),
        ("threads", {"threads": 3, "origins": {"threads": "DDPLAUNCH_THREADS"}}, "DDPLAUNCH_THREADS"),
        ("pin", {"pin": "none"}, "--pin"),
    ],
)
def test_a_value_that_was_given_names_its_origin(name: str, fields: dict[str, Any], reason: str) -> None:
    assert plan(spec(**fields)).reasons[name] == reason


def test_the_plan_says_which_node_it_is_for_and_where_the_workers_meet() -> None:
    there = replace(HERE, endpoint=Endpoint("10.0.0.1", "--master-addr", 4000, "PET_MASTER_PORT"))
    decided = plan(spec(), node(), there)
    assert (decided.cluster, decided.nnodes, decided.node_rank) == ("local", 1, 0)
    assert (decided.master_addr, decided.master_port) == ("10.0.0.1", 4000)
    assert each(decided, "MASTER_ADDR") == ["10.0.0.1"]
    assert (decided.reasons["master_addr"], decided.reasons["master_port"]) == ("--master-addr", "PET_MASTER_PORT")
    assert decided.workers[0].host == "gpu01"


def test_notes_come_from_options_cluster_devices_torch_binding_and_pin_in_this_order() -> None:
    here = node(2, build=CPU)
    here = replace(here, hardware=replace(here.hardware, notes=("of the devices",)))
    asked = spec(remarks=("of the options",), nproc_per_node=3, cpu_bind="cores")
    assert plan(asked, here, replace(HERE, notes=("of the cluster",), warnings=("and of its hosts",))).notes == (
        "of the options",
        "of the cluster",
        "and of its hosts",
        "of the devices",
        "torch 2.13.0+cpu is a CPU build, so it cannot use the accelerators: "
        "install another, or use --nproc-per-node cpu",
        "3 workers on 2 devices: set_device(LOCAL_RANK) fails from local rank 2 on; "
        "use DDPLAUNCH_DEVICE, or --virtual-local-rank",
    )


def test_a_torch_without_gpus_is_no_news_to_a_job_for_the_cpus() -> None:
    assert plan(spec(nproc_per_node="cpu"), node(2, build=CPU)).notes == ()


# --- variables


def test_every_worker_gets_every_variable() -> None:
    for worker in plan(spec(nproc_per_node=2), node(2)).workers:
        assert set(OF_THE_JOB.split()) <= set(worker.variables)


def test_the_variables_of_the_job_say_what_was_asked() -> None:
    variables = plan(spec(max_restarts=3, role="trainer", env=(("A", "1"),)), node()).workers[0].variables
    assert variables["TORCHELASTIC_MAX_RESTARTS"] == "3"
    assert variables["ROLE_NAME"] == "trainer"
    assert variables["A"] == "1"
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert variables["DDPLAUNCH_RUN_ID"] == variables["TORCHELASTIC_RUN_ID"] == "run-1"


def test_workers_know_which_signals_are_notices() -> None:
    told = plan(spec(requeue_on=(Signals.SIGUSR1, Signals.SIGTERM)), node()).workers[0].variables
    assert told["DDPLAUNCH_NOTICE_SIGNALS"] == "SIGUSR1,SIGTERM"
    assert "DDPLAUNCH_NOTICE_SIGNALS" not in plan(spec(), node()).workers[0].variables


def test_torchruns_name_of_the_job_is_its_own() -> None:
    variables = plan(spec(rdzv_id="job-7"), node()).workers[0].variables
    assert (variables["TORCHELASTIC_RUN_ID"], variables["DDPLAUNCH_RUN_ID"]) == ("job-7", "run-1")


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED"])
def test_a_default_gives_way_to_the_callers_own_value(name: str) -> None:
    assert each(plan(spec(), node()), name) == ["1"]
    assert each(plan(spec(), node(env={name: "0"})), name) == ["0"]
    assert each(plan(spec(env=((name, ""),)), node(env={name: "0"})), name) == [""]


@pytest.mark.parametrize(
    ("fields", "env", "value", "reason"),
    [
        ({}, {}, "2", "8 usable CPUs / 4 workers"),
        ({}, {"OMP_NUM_THREADS": "3"}, "3", "OMP_NUM_THREADS=3 was set"),
        ({}, {"OMP_NUM_THREADS": ""}, "2", "8 usable CPUs / 4 workers"),
        ({"env": (("OMP_NUM_THREADS", "5"),)}, {"OMP_NUM_THREADS": "3"}, "5", "OMP_NUM_THREADS=5 was set"),
        ({"threads": 7}, {"OMP_NUM_THREADS": "3"}, "7", "--threads"),
        ({"threads": 7, "env": (("OMP_NUM_THREADS", "5"),)}, {}, "7", "--threads"),
    ],
)
def test_threads_are_divided_unless_somebody_said_how_many(fields, env, value, reason):
    decided = plan(spec(nproc_per_node=4, **fields), node(env=env))
    assert each(decided, "OMP_NUM_THREADS") == [value] * 4
    assert decided.reasons["threads"] == reason


def test_a_quota_counts_more_than_cpus() -> None:
    here = node()
    here = replace(here, hardware=replace(here.hardware, cpu_quota=2.5))
    decided = plan(spec(nproc_per_node=2), here)
    assert each(decided, "OMP_NUM_THREADS") == ["1", "1"]
    assert decided.reasons["threads"] == "2 usable CPUs / 2 workers"


def test_a_worker_bound_to_a_share_of_its_own_has_no_more_threads_than_that() -> None:
    """exclusive shares a node out to all of its devices, used or not."""
    decided = plan(spec(numa_binding="exclusive", nproc_per_node=2), node(4))
    assert [worker.cpus for worker in decided.workers] == [(0, 1), (2, 3)]
    assert each(decided, "OMP_NUM_THREADS") == ["2", "2"]


def test_workers_that_share_their_cpus_divide_all() -> None:
    decided = plan(spec(cpu_bind="numa", nproc_per_node=2), node())
    assert [worker.cpus for worker in decided.workers] == [tuple(range(8))] * 2
    assert each(decided, "OMP_NUM_THREADS") == ["4", "4"]


def test_a_virtual_local_rank_is_0_everywhere() -> None:
    decided = plan(spec(virtual_local_rank=True), node(2))
    assert each(decided, "LOCAL_RANK") == ["0", "0"]
    assert each(decided, "RANK") == ["0", "1"]
    assert each(decided, "CUDA_VISIBLE_DEVICES") == ["0", "1"]
    assert each(decided, "DDPLAUNCH_DEVICE") == ["cuda:0", "cuda:0"]
    assert [worker.local_rank for worker in decided.workers] == [0, 1]


# --- what is run


@pytest.mark.parametrize(
    ("program", "argv", "interpreter"),
    [
        (SCRIPT, ("/usr/bin/python", "/lib/bootstrap.py", "script", "train.py", "--lr", "0.1"), "/usr/bin/python"),
        (
            Program(kind=ProgramKind.MODULE, target="pkg.train", python="python3.12"),
            ("python3.12", "/lib/bootstrap.py", "module", "pkg.train"),
            "python3.12",
        ),
        (Program(kind=ProgramKind.COMMAND, target="bash", args=("-c", "x")), ("bash", "-c", "x"), None),
    ],
)
def test_a_program_is_run_as_its_kind_wants(program: Program, argv: tuple[str, ...], interpreter: str | None) -> None:
    decided = plan(spec(program=program))
    assert decided.workers[0].argv == argv
    assert decided.interpreter == interpreter


@pytest.mark.parametrize(
    ("argument", "seen"),
    [
        ("--out=log-${local_rank}", ["--out=log-0", "--out=log-1"]),
        ("$local_rank", ["0", "1"]),
        ("$$local_rank ${other}", ["$local_rank ${other}"] * 2),
        ("local_rank", ["local_rank"] * 2),
        ("${LOCAL_RANK} $", ["${LOCAL_RANK} $"] * 2),
    ],
)
def test_torchruns_macro_in_an_argument_becomes_the_local_rank(argument: str, seen: list[str]) -> None:
    decided = plan(spec(program=replace(SCRIPT, args=(argument,)), nproc_per_node=2))
    assert [worker.argv[-1] for worker in decided.workers] == seen


@pytest.mark.parametrize(
    ("asked", "method"),
    [("env", "env"), ("tcp", "tcp"), ("file:/a/b", "file:/a/b"), ("file:b", f"file:{os.getcwd()}/b")],
)
def test_a_meeting_file_is_the_same_wherever_a_worker_goes(asked: str, method: str) -> None:
    assert plan(spec(init_method=asked)).init_method == method


# --- terminal and stdin


@pytest.mark.parametrize(
    ("fields", "terminal"),
    [
        ({}, [True]),
        ({"nproc_per_node": 1}, [True]),
        ({"nproc_per_node": 2}, [False, False]),
        ({"output": "prefix"}, [False]),
        ({"log_dir": "logs"}, [False]),
        ({"local_ranks_filter": frozenset({0})}, [False]),
        ({"tee": StreamChoice(default=Streams.BOTH)}, [False]),
        ({"redirects": StreamChoice(by_local_rank={0: Streams.ERR})}, [False]),
        ({"redirects": StreamChoice(by_local_rank={1: Streams.ERR})}, [True]),
        ({"duplicate_stdout_filters": ("loss",)}, [False]),
        ({"duplicate_stderr_filters": ("loss",)}, [False]),
        ({"nproc_per_node": 2, "debug_rank": 1}, [False, True]),
        ({"output": "prefix", "debug_rank": 0}, [True]),
    ],
)
def test_one_worker_has_the_terminal_unless_its_output_is_wanted_otherwise(fields, terminal):
    assert [worker.terminal for worker in plan(spec(**fields)).workers] == terminal


def test_rank_0_reads_the_callers_stdin() -> None:
    assert [worker.stdin for worker in plan(spec(nproc_per_node=2)).workers] == [True, False]


def test_while_one_rank_is_debugged_no_other_reads_the_callers_stdin() -> None:
    assert [worker.stdin for worker in plan(spec(nproc_per_node=2, debug_rank=1)).workers] == [False, False]


def test_a_breakpoint_stops_only_the_rank_that_is_debugged() -> None:
    debugged = plan(spec(nproc_per_node=3, debug_rank=1))
    assert [worker.variables.get("PYTHONBREAKPOINT") for worker in debugged.workers] == ["0", None, "0"]
    own = plan(spec(nproc_per_node=3, debug_rank=1, env=(("PYTHONBREAKPOINT", "ipdb.set_trace"),)))
    assert {worker.variables["PYTHONBREAKPOINT"] for worker in own.workers} == {"ipdb.set_trace"}


# --- refusals


@pytest.mark.parametrize(
    ("asked", "here", "said", "hint"),
    [
        (spec(debug_rank=4, nproc_per_node=4), node(), "--debug 4: the job has ranks 0 to 3", "--debug 0"),
        (spec(debug_rank=1), node(), "--debug 1: the job has rank 0 alone", "--debug 0"),
        (
            spec(cpu_bind="cores", nproc_per_node=9),
            node(),
            "--cpu-bind cores: 9 workers need CPUs of their own, but the job may use only 8 CPUs",
            "--cpu-bind none",
        ),
        (
            spec(numa_binding="exclusive", nproc_per_node=3),
            node(cpus=2),
            "--numa-binding exclusive: 3 workers need CPUs of their own, but the job may use only 2 CPUs",
            "leave --numa-binding out",
        ),
        (
            spec(cpu_bind="cores"),
            node(cores=()),
            "--cpu-bind cores: the cores of this node are not known",
            "--cpu-bind none",
        ),
        (
            spec(gpus_per_worker=3),
            node(2),
            "--gpus-per-worker 3: 1 worker needs 3 GPUs, but the job has only 2",
            "--gpus-per-worker 2",
        ),
        (
            spec(program=Program(kind=ProgramKind.COMMAND, target="bash"), pin="device"),
            node(2),
            "--pin device: it works inside python, but --no-python runs a command",
            "--pin visible",
        ),
    ],
)
def test_what_does_not_fit_the_node_is_refused(asked: JobSpec, here: Node, said: str, hint: str) -> None:
    assert message(asked, here) == (said, hint)


# --- what holds for every plan

specs = st.builds(
    spec,
    nproc_per_node=st.one_of(st.none(), st.integers(1, 12), st.sampled_from(["gpu", "cpu", "auto"])),
    gpus_per_worker=st.one_of(st.none(), st.integers(1, 4)),
    pin=st.sampled_from([None, "device", "visible", "none"]),
    virtual_local_rank=st.booleans(),
    threads=st.one_of(st.none(), st.integers(1, 4)),
    cpu_bind=st.sampled_from(["none", "cores", "numa"]),
    backend=st.sampled_from(["auto", "gloo", "nccl"]),
    env=st.sampled_from([(), (("A", "1"),), (("OMP_NUM_THREADS", "2"),)]),
    program=st.sampled_from(
        [SCRIPT, Program(kind=ProgramKind.COMMAND, target="bash"), Program(kind=ProgramKind.MODULE, target="a.b")]
    ),
)
nodes = st.builds(node, st.integers(0, 8), st.integers(1, 12), build=st.sampled_from([CUDA, CPU, None]))


@given(specs, nodes)
def test_every_plan_is_whole(asked: JobSpec, here: Node) -> None:
    try:
        decided = plan(asked, here)
    except LaunchError as error:
        assert error.message.startswith("--"), "it names what was asked"
        assert error.hint
        return
    size = decided.world_size
    assert [worker.rank for worker in decided.workers] == list(range(size))
    assert each(decided, "RANK") == [str(rank) for rank in range(size)]
    assert [worker.local_rank for worker in decided.workers] == list(range(size))
    tokens = {device.uuid for device in here.hardware.devices}
    for worker in decided.workers:
        variables = worker.variables
        assert set(OF_THE_JOB.split()) <= set(variables)
        assert all(type(value) is str for value in variables.values())
        assert 0 <= int(variables["LOCAL_RANK"]) < int(variables["LOCAL_WORLD_SIZE"]) == size
        assert variables["WORLD_SIZE"] == str(size)
        assert int(variables["OMP_NUM_THREADS"]) >= 1
        assert set(worker.devices) <= tokens
        assert set(worker.cpus) <= set(here.hardware.cpus)
        assert worker.device == variables["DDPLAUNCH_DEVICE"]
        assert bool(worker.devices) is worker.device.startswith("cuda:")
        assert variables.get("DDPLAUNCH_PIN_DEVICE", worker.device) == worker.device
    if asked.gpus_per_worker:
        owned = [device for worker in decided.workers for device in worker.devices]
        assert len(owned) == len(set(owned)) == size * asked.gpus_per_worker
    if asked.cpu_bind == "cores":
        bound = [cpu for worker in decided.workers for cpu in worker.cpus]
        assert len(bound) == len(set(bound))
    assert plan(asked, here) == decided, "the same spec on the same node gives the same plan"


# --- several nodes


def agents(*counts: int) -> tuple[PlannedAgent, ...]:
    return tuple(PlannedAgent(f"host{index}", count) for index, count in enumerate(counts))


def agreed_plan(place: int, counts: tuple[int, ...], asked: JobSpec | None = None, **changes: Any) -> Plan:
    where = replace(HERE, cluster="static", nnodes=(len(counts),) * 2, node_rank=place, endpoint=A)
    asked = asked or spec(nproc_per_node=counts[place])
    agreed = Agreed(
        run_id="run-1",
        index=place,
        agent_runs=agent_runs(agents(*counts)),
        address="a",
        backend="gloo",
        backend_reason="agreed",
    )
    return make_plan(asked, where, node(), run_id="run-1", agreed=agreed, **changes)


def test_ranks_are_node_major_and_nodes_may_have_different_counts() -> None:
    decided = agreed_plan(1, (2, 3, 1), agents=agents(2, 3, 1))
    assert each(decided, "RANK") == ["2", "3", "4"]
    assert each(decided, "LOCAL_RANK") == ["0", "1", "2"]
    assert set(each(decided, "WORLD_SIZE")) == {"6"}
    assert set(each(decided, "LOCAL_WORLD_SIZE")) == {"3"}
    assert set(each(decided, "GROUP_RANK")) == set(each(decided, "NODE_RANK")) == {"1"}
    assert set(each(decided, "GROUP_WORLD_SIZE")) == {"3"}
    assert (decided.world_size, decided.nnodes, decided.node_rank) == (6, 3, 1)
    assert {worker.host for worker in decided.workers} == {"host1"}


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_rank_of_the_job_is_planned_exactly_once(counts: list[int]) -> None:
    ranks = [rank for place in range(len(counts)) for rank in each(agreed_plan(place, tuple(counts)), "RANK")]
    assert ranks == [str(rank) for rank in range(sum(counts))]


def test_what_the_nodes_agreed_on_wins_over_what_this_one_would_choose() -> None:
    decided = agreed_plan(0, (2, 2), interface="eth0")
    assert (decided.backend, decided.reasons["backend"]) == ("gloo", "agreed")
    assert set(each(decided, "GLOO_SOCKET_IFNAME")) == {"eth0"}


def test_only_rank_0_of_the_job_reads_stdin() -> None:
    assert [worker.stdin for worker in agreed_plan(0, (2, 2)).workers] == [True, False]
    assert not any(worker.stdin for worker in agreed_plan(1, (2, 2)).workers)


def test_one_worker_of_several_nodes_is_not_passed_through() -> None:
    assert not agreed_plan(0, (1, 1)).workers[0].terminal


def test_without_a_word_from_others_all_nodes_are_taken_to_be_like_this_one() -> None:
    where = replace(HERE, cluster="static", nnodes=(3, 3), node_rank=2, endpoint=A, hosts=())
    decided = plan(spec(nproc_per_node=4), where=where)
    assert each(decided, "RANK") == ["8", "9", "10", "11"]
    assert decided.agents == (PlannedAgent("node-0", 4), PlannedAgent("node-1", 4), PlannedAgent("gpu01", 4))


def test_a_command_for_each_rank_has_one_worker_at_the_place_that_the_cluster_says() -> None:
    task = Task(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, nnodes=2)
    decided = plan(spec(), node(4), replace(HERE, cluster="mpi", task=task, endpoint=A))
    (worker,) = decided.workers
    assert (worker.rank, worker.local_rank, worker.device) == (5, 1, "cuda:1")
    assert {name: worker.variables[name] for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")} == {
        "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"
    }  # fmt: skip


def test_a_command_for_each_rank_that_sees_one_device_takes_it_whatever_its_local_rank() -> None:
    task = Task(rank=3, world_size=4, local_rank=3, local_world_size=4, node_rank=0, nnodes=1)
    (worker,) = plan(spec(), node(1), replace(HERE, cluster="slurm", task=task, endpoint=A)).workers
    assert worker.device == "cuda:0"


@pytest.mark.parametrize(
    ("cpus", "together", "machine", "threads", "bound"),
    [
        (8, 8, 8, "2", (2, 3)),
        (8, 8, 64, "2", (2, 3)),  # a job with a part of the machine
        (2, 8, 64, "2", (0, 1)),  # the cluster has bound each to its own
        (8, None, 8, "2", (2, 3)),
        (2, None, 8, "2", (0, 1)),
        (8, 16, 8, "2", (2, 3)),  # a cluster that believes in more than there are
    ],
    ids=str,
)
def test_commands_for_each_rank_share_the_cpus_that_the_cluster_does_not_share_out(
    cpus: int, together: int | None, machine: int, threads: str, bound: tuple[int, ...]
) -> None:
    """Each of four knows only its own."""
    task = Task(rank=1, world_size=4, local_rank=1, local_world_size=4, node_rank=0, nnodes=1, node_cpus=together)
    here = node(cpus=cpus)
    here = replace(here, hardware=replace(here.hardware, machine_cpus=machine))
    (worker,) = plan(spec(cpu_bind="cores"), here, replace(HERE, cluster="slurm", task=task, endpoint=A)).workers
    assert (worker.variables["OMP_NUM_THREADS"], worker.cpus) == (threads, bound)


def test_commands_for_each_rank_that_see_all_devices_get_the_cpus_near_their_own() -> None:
    task = Task(rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, nnodes=1)
    here = node(2, cpus=8)
    near = [replace(device, cpus=tuple(range(4 * n, 4 * n + 4))) for n, device in enumerate(here.devices)]
    here = replace(here, devices=tuple(near), hardware=replace(here.hardware, devices=tuple(near)),
                   cores=tuple(Core(cpus=(cpu,), numa_node=cpu // 4, package=0, cache=0) for cpu in range(8)))  # fmt: skip
    (worker,) = plan(spec(cpu_bind="cores"), here, replace(HERE, cluster="slurm", task=task, endpoint=A)).workers
    assert worker.cpus == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("asked", "gpus", "number", "reason"),
    [
        ({}, 0, 4, "no accelerator: as many as tasks per node in slurm"),
        ({}, 2, 2, "2 accelerators"),
        ({"nproc_per_node": 3}, 0, 3, "--nproc-per-node"),
        ({"nproc_per_node": "cpu"}, 0, 8, "--nproc-per-node cpu: 8 usable CPUs"),
    ],
)
def test_tasks_that_the_cluster_was_asked_for_are_workers_where_there_is_no_accelerator(asked, gpus, number, reason):
    granted = replace(HERE, cluster="slurm", tasks_per_node=4)
    plan = make_plan(spec(**asked), granted, node(gpus), run_id="run")
    assert (len(plan.workers), plan.reasons["workers"]) == (number, reason)


# --- how they are started


IMPORTS = b"import torch"


def test_more_workers_than_cpus_that_import_torch_are_forked() -> None:
    crowded = make_plan(spec(nproc_per_node=3, start_method="auto"), HERE, node(cpus=2, script=IMPORTS), run_id="a")
    assert crowded.preload is not None
    assert not crowded.preload_is_asked
    assert crowded.reasons["start"] == "3 workers share 2 CPUs"


@pytest.mark.parametrize(
    ("fields", "here"),
    [
        ({"nproc_per_node": 2, "start_method": "auto"}, node(cpus=2, script=IMPORTS)),
        ({"nproc_per_node": 3, "start_method": "auto"}, node(cpus=2, script=b"print('hello')")),
        ({"nproc_per_node": 3}, node(cpus=2, script=IMPORTS)),
        (
            {"nproc_per_node": 3, "start_method": "auto", "devices": ("cpu",)},
            node(gpus=1, chosen=(), cpus=2, script=IMPORTS),
        ),
        ({"nproc_per_node": 3, "start_method": "auto"}, node(cpus=2)),
    ],
    ids=["a CPU for each", "no torch", "not asked for", "there is a GPU", "no text"],
)
def test_otherwise_they_are_fresh_processes(fields: dict[str, Any], here: Node) -> None:
    fresh = make_plan(spec(**fields), HERE, here, run_id="a")
    assert fresh.preload is None
    assert "start" not in fresh.reasons
