from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.plan.variables import environment, first_term, init_file, of_generation, of_place, of_terminal
from tests.unit.builders import plan_of


def worker(rank: int = 0) -> WorkerPlan:
    return WorkerPlan(rank=rank, local_rank=rank, node_rank=0, host="a", argv=("train.py",), variables={})


def plan(**fields: Any) -> Plan:
    return plan_of(worker(), **fields)


def generation(plan: Plan, number: int = 0) -> dict[str, str]:
    return of_generation(plan, generation=number, term=number + 7, port=4000, error_file="/run/error", log_dir="/run")


def test_a_worker_gets_its_plans_variables_over_the_callers_and_those_of_its_generation_over_both() -> None:
    caller = {"HOME": "/root", "RANK": "9", "MASTER_PORT": "1"}
    of_plan = replace(worker(), variables={"RANK": "0", "MASTER_PORT": "2"})
    found = environment(
        caller, plan(), of_plan, generation=0, term=None, port=4000, of_mps={"CUDA_MPS_PIPE_DIRECTORY": "/mps"}
    )
    assert (found["HOME"], found["RANK"], found["MASTER_PORT"]) == ("/root", "0", "4000")
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/mps"


def test_a_worker_knows_its_place_on_every_level() -> None:
    assert of_place(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1, nnodes=2, role="trainer") == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "trainer",
    }


def test_a_generation_has_a_port_a_number_a_term_and_files_of_its_own() -> None:
    assert generation(plan(), 3) == {
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_ERROR_FILE": "/run/error",
        "DDPLAUNCH_INIT_METHOD": "env://",
        "DDPLAUNCH_LOG_DIR": "/run",
        "DDPLAUNCH_TERM": "10",
    }


def test_a_term_replaces_that_of_a_job_around_this_one_and_nodes_that_do_not_communicate_set_none() -> None:
    outer = {"DDPLAUNCH_TERM": "3"}
    assert environment(outer, plan(), worker(), generation=0, term=9, port=1)["DDPLAUNCH_TERM"] == "9"
    assert "DDPLAUNCH_TERM" not in environment({}, plan(), worker(), generation=0, term=None, port=1)


def test_the_first_term_of_a_job_is_greater_than_the_last_one_of_a_run_that_was_over_before() -> None:
    began, shortest = 1_795_858_200.25, 0.005  # seconds; no generation is shorter
    assert first_term(began) == 1_795_858_200_250
    assert first_term(began + 1000 * shortest) > first_term(began) + 1000
    assert first_term(-5.0) == 0, "a clock before 1970 gives a number that messages may hold"


def test_a_job_that_the_cluster_has_started_again_counts_that_as_a_restart() -> None:
    assert generation(plan(requeues=2), 3)["TORCHELASTIC_RESTART_COUNT"] == "5"
    assert generation(plan(requeues=2, init_method="file:/m"), 3)["DDPLAUNCH_INIT_METHOD"] == "file:///m.run-1.3"


@pytest.mark.parametrize(
    ("method", "address", "written"),
    [
        ("env", "10.0.0.1", "env://"),
        ("tcp", "10.0.0.1", "tcp://10.0.0.1:4000"),
        ("tcp", "fe80::1", "tcp://[fe80::1]:4000"),
        ("file:/shared/meet", "10.0.0.1", "file:///shared/meet.run-1.2"),
    ],
)
def test_the_init_method_is_what_torch_takes(method: str, address: str, written: str) -> None:
    there = plan(init_method=method, master_addr=address)
    assert generation(there, 2)["DDPLAUNCH_INIT_METHOD"] == written


def test_a_meeting_file_belongs_to_one_generation_of_one_run() -> None:
    files = {init_file(plan(init_method="file:/f", run_id=run), number) for run in ("a", "b") for number in (0, 1)}
    assert len(files) == 4


@pytest.mark.parametrize("method", ["env", "tcp"])
def test_without_a_file_there_is_none_to_remove(method: str) -> None:
    assert init_file(plan(init_method=method), 0) is None


@given(st.integers(0, 9), st.integers(1, 65535), st.sampled_from(["env", "tcp", "file:/f"]))
def test_variables_are_strings(number: int, port: int, method: str) -> None:
    variables = of_generation(plan(init_method=method), generation=number, term=number, port=port)
    assert all(type(value) is str for value in variables.values())


# --- what a worker is told of the terminal


def told(caller: dict[str, str], of_plan: dict[str, str] | None = None) -> dict[str, str]:
    there = of_terminal(100, 24, highest=3)
    return environment(
        caller,
        plan(),
        replace(worker(), variables=of_plan or {}),
        generation=0,
        term=None,
        port=4000,
        of_terminal=there,
    )


def test_a_worker_is_told_of_a_terminal_and_of_its_width_less_what_stands_around_a_row() -> None:
    found = told({})
    assert (found["FORCE_COLOR"], found["TTY_COMPATIBLE"], found["TTY_INTERACTIVE"]) == ("1", "1", "1")
    assert (found["COLUMNS"], found["LINES"]) == (str(100 - len("[0-3]  slowest ")), "24")


@pytest.mark.parametrize("of_plan", [False, True], ids=["of the shell", "by --env"])
def test_what_the_user_has_set_about_terminals_stands(of_plan: bool) -> None:
    own = {"FORCE_COLOR": "0", "TTY_COMPATIBLE": "0", "COLUMNS": "7"}
    found = told({}, own) if of_plan else told(own)
    assert own.items() <= found.items()
    assert "FORCE_COLOR" not in (told({}, {"NO_COLOR": "1"}) if of_plan else told({"NO_COLOR": "1"}))


def test_a_terminal_without_a_size_gives_none_and_a_narrow_one_leaves_room_for_a_bar() -> None:
    assert "COLUMNS" not in of_terminal(0, 0, highest=1)
    assert of_terminal(12, 5, highest=1)["COLUMNS"] == "20"
