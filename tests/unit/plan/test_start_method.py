"""When workers are forked, and what the server that forks them has in its environment."""

from functools import partial
from typing import Any

import pytest

from ddplaunch.plan import WorkerPlan
from ddplaunch.plan.cluster import Allocation, Endpoint
from ddplaunch.plan.start_method import PRELOAD, Preload, choose_keep_warm, choose_preload
from ddplaunch.plan.variables import of_fork_server, of_place, of_warm_interpreter
from ddplaunch.spec.job import ProgramKind
from tests.unit import builders
from tests.unit.builders import plan_of

spec = partial(builders.spec, start_method="forkserver")


def worker(rank: int = 0, variables: dict[str, str] | None = None, **fields: Any) -> WorkerPlan:
    place = of_place(
        rank=rank, local_rank=rank, world_size=2, local_world_size=2, node_rank=0, nnodes=1, role="default"
    )
    of_all = {**place, "OMP_NUM_THREADS": "4", "MASTER_ADDR": "a", **(variables or {})}
    return WorkerPlan(rank=rank, local_rank=rank, node_rank=0, host="a", argv=("python",), variables=of_all, **fields)


WORKERS = (worker(0), worker(1))


def test_torch_and_what_its_steps_import_are_imported() -> None:
    assert choose_preload(spec(), WORKERS, {}) == Preload(PRELOAD)


def test_the_user_chooses_what_is_imported() -> None:
    assert choose_preload(spec(preload=("numpy",)), WORKERS, {}) == Preload(("numpy",))
    assert choose_preload(spec(preload=()), WORKERS, {}) == Preload(())


@pytest.mark.parametrize(
    ("asked", "workers", "caller", "why"),
    [
        (spec(ProgramKind.COMMAND), WORKERS, {}, "a command cannot be forked from an interpreter"),
        (spec(), (worker(terminal=True),), {}, "the worker that has the terminal is a fresh process"),
        (
            spec(),
            (worker(cpus=(0,)),),
            {"OMP_PROC_BIND": "close"},
            "OMP_PROC_BIND and CPUs of its own for each worker need fresh processes",
        ),
    ],
)
def test_it_is_said_why_workers_are_fresh_processes_nevertheless(asked, workers, caller, why):
    assert choose_preload(asked, workers, caller) == Preload(None, why)


TORCH = b"import torch"


def test_left_to_us_they_are_forked_if_the_script_imports_torch_first() -> None:
    assert choose_preload(spec(start_method="auto", preload=("json",)), WORKERS, {}, TORCH) == Preload(PRELOAD[:-1])
    assert choose_preload(spec(start_method="auto"), WORKERS, {}, TORCH + b".optim") == Preload(PRELOAD)
    assert choose_preload(spec(start_method="auto"), WORKERS, {}, b"print(1)\nimport torch") == Preload(None)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "COVERAGE_PROCESS_START"])
def test_left_to_us_they_are_fresh_where_each_process_begins_with_something(name: str) -> None:
    assert choose_preload(spec(start_method="auto"), WORKERS, {name: "x"}, TORCH) == Preload(None)


def test_left_to_us_they_are_fresh_if_they_have_the_terminal_or_cpus_of_their_own() -> None:
    for workers in ((worker(terminal=True),), (worker(cpus=(0,)), worker(1, cpus=(1,)))):
        assert choose_preload(spec(start_method="auto"), workers, {}, TORCH) == Preload(None)


@pytest.mark.parametrize(("cpus", "caller"), [((0,), {}), ((), {"OMP_PROC_BIND": "close"}), ((0,), {"OMP_PLACES": ""})])
def test_one_of_openmps_binding_and_ours_does_no_harm(cpus: tuple[int, ...], caller: dict[str, str]) -> None:
    assert choose_preload(spec(), (worker(cpus=cpus),), caller) == Preload(PRELOAD)


def test_the_server_has_what_all_workers_have_and_no_place_among_them() -> None:
    plan = plan_of(worker(0, {"CUDA_VISIBLE_DEVICES": "0"}), worker(1, {"CUDA_VISIBLE_DEVICES": "1"}))
    assert of_fork_server({"HOME": "/root", "OMP_NUM_THREADS": "1"}, plan) == {"HOME": "/root", "OMP_NUM_THREADS": "4"}


def here(cluster: str = "local", **fields: Any) -> Allocation:
    return Allocation(cluster=cluster, endpoint=Endpoint("127.0.0.1", "", None, ""), **fields)


def test_what_has_imported_is_kept_for_so_many_minutes_if_that_is_asked_for() -> None:
    assert choose_keep_warm(spec(keep_warm=5), PRELOAD, here(), {}) == (300, "")
    assert choose_keep_warm(spec(), PRELOAD, here(), {}) == (None, "")
    assert choose_keep_warm(spec(keep_warm=5), None, here(), {}) == (None, "")


@pytest.mark.parametrize(
    ("allocation", "caller", "why"),
    [
        (here("slurm"), {}, "a warm interpreter serves only jobs on this machine"),
        (here(nnodes=(2, 2)), {}, "a warm interpreter serves only jobs on this machine"),
        (here(), {"PBS_JOBID": "7"}, "nothing may outlive a batch job, and PBS_JOBID is set"),
        (
            here(),
            {"JOB_ID": "7", "SGE_TASK_ID": "undefined"},
            "nothing may outlive a batch job, and SGE_TASK_ID is set",
        ),
        (here(), {"TORCHELASTIC_RUN_ID": "a"}, "nothing may outlive the job whose worker has started this one"),
        (here(), {"SUDO_UID": "1000"}, "no process of another user is to stay after sudo"),
        (here(), {"DDPLAUNCH_CALL": "a"}, "a warm interpreter cannot run a function"),
    ],
)
def test_nothing_is_kept_where_it_would_outlive_what_it_should_not(allocation, caller, why):
    assert choose_keep_warm(spec(keep_warm=5), PRELOAD, allocation, caller) == (None, why)


def test_what_is_kept_has_no_variable_that_differs_from_shell_to_shell() -> None:
    caller = {"HOME": "/root", "PWD": "/tmp", "SSH_CLIENT": "10.0.0.1 1 2", "TMUX": "/tmp/tmux-0", "PYTHONPATH": "lib"}
    kept = of_warm_interpreter(caller, plan_of(worker(0)))
    assert kept == {"HOME": "/root", "PYTHONPATH": "lib", "OMP_NUM_THREADS": "4"}
