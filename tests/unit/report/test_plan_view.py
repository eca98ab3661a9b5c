import json
import shlex
from textwrap import dedent
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.tell import plan_view
from ddplaunch.launcher.tell.plan_view import as_json, shell
from ddplaunch.plan import Plan, PlannedAgent, WorkerPlan
from ddplaunch.spec.job import Given, JobSpec
from ddplaunch.spec.options.resolve import job_spec
from ddplaunch.spec.options.sources import from_variables
from ddplaunch.system.console.tables import Look, written
from tests.unit.builders import plan_of, spec

SHARED = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "4", "WORLD_SIZE": "2"}
REASONS = {
    "workers": "2 accelerators",
    "devices": "NVML",
    "backend": "every worker has a GPU of its own",
    "threads": "8 usable CPUs / 2 workers",
    "master_addr": "a single node",
    "master_port": "a free one is reserved at the start",
    "pin": "default",
}


def uuid(number: int) -> str:
    return f"GPU-{number}932aaaa-1111-2222-3333-444444444444"


def worker(rank: int, **fields: Any) -> WorkerPlan:
    variables = {**SHARED, "RANK": str(rank), "LOCAL_RANK": str(rank), "DDPLAUNCH_DEVICE": f"cuda:{rank}"}
    values: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "node_rank": 0,
        "host": "gpu01",
        "argv": ("python", "train.py"),
        "variables": {**variables, **fields.pop("variables", {})},
        "device": f"cuda:{rank}",
        "devices": (uuid(rank),),
        **fields,
    }
    return WorkerPlan(**values)


def plan(*workers: WorkerPlan, **fields: Any) -> Plan:
    return plan_of(*(workers or (worker(0), worker(1))), **{"backend": "nccl", "reasons": REASONS, **fields})


def table(plan: Plan, asked: JobSpec, look: Look = Look()) -> str:  # noqa: B008 - it is frozen
    return written(plan_view.table(plan, asked), look) + "\n"


def spec_of(*given: Given, **variables: str) -> JobSpec:
    return job_spec([*given, *from_variables(variables)], ["train.py"])


def part(text: str, first_line: str) -> str:
    """One of the parts between empty lines, known by how it begins."""
    return next(part for part in text.rstrip("\n").split("\n\n") if part.startswith(first_line))


def test_the_table_shows_values_reasons_workers_command_variables_and_notes() -> None:
    asked = replace(spec_of(PET_NPROC_PER_NODE="gpu"), verbosity=1)
    assert table(plan(notes=("this is how it is",)), asked) == dedent("""\
        workers  2 on gpu01  2 accelerators
        cluster  local
        address  127.0.0.1   a single node
        port     -           a free one is reserved at the start
        backend  nccl        every worker has a GPU of its own
        threads  4           8 usable CPUs / 2 workers
        devices  2           NVML
        pin      device      default

        note: this is how it is

        from variables and files:
          --nproc-per-node gpu  PET_NPROC_PER_NODE

        rank  device  owns
        0     cuda:0  GPU-0932aaaa
        1     cuda:1  GPU-1932aaaa

        command:
          python train.py

        variables of each worker:
          its device        DDPLAUNCH_DEVICE
          its rank          LOCAL_RANK RANK
          set at the start  DDPLAUNCH_INIT_METHOD DDPLAUNCH_LOG_DIR DDPLAUNCH_TERM
                            MASTER_PORT TORCHELASTIC_ERROR_FILE
                            TORCHELASTIC_RESTART_COUNT

        variables of all workers:
          MASTER_ADDR=127.0.0.1
          OMP_NUM_THREADS=4
          WORLD_SIZE=2
        """)


def test_a_given_port_is_shown() -> None:
    assert "port     4000 " in table(plan(master_port=4000), spec())


def test_a_way_to_meet_other_than_the_usual_is_shown() -> None:
    asked = spec(origins={"init_method": "--init-method"}, init_method="file:/f")
    assert "\ninit     file:/f     --init-method\n" in table(plan(init_method="file:/f"), asked)


def test_without_devices_nothing_is_said_of_them() -> None:
    alone = worker(0, device="cpu", devices=(), variables={"DDPLAUNCH_DEVICE": "cpu"})
    text = table(plan(alone), spec())
    assert "\npin" not in text
    assert part(text, "rank") == "rank  device\n0     cpu"


def test_cpus_are_shown_where_workers_are_bound() -> None:
    text = table(plan(worker(0, cpus=(0, 1, 2, 8)), worker(1, cpus=(4, 5, 6, 12))), spec())
    assert part(text, "rank") == dedent("""\
        rank  device  owns          cpus
        0     cuda:0  GPU-0932aaaa  0-2,8
        1     cuda:1  GPU-1932aaaa  4-6,12""")


def test_a_variable_that_differs_is_a_column_unless_a_column_says_the_same() -> None:
    workers = [worker(n, device="cuda:0", variables={"CUDA_VISIBLE_DEVICES": f"{7 - n}"}) for n in range(2)]
    text = table(plan(*workers), spec())
    assert part(text, "rank") == dedent("""\
        rank  device  owns          CUDA_VISIBLE_DEVICES  DDPLAUNCH_DEVICE
        0     cuda:0  GPU-0932aaaa  7                     cuda:0
        1     cuda:0  GPU-1932aaaa  6                     cuda:1""")


def test_nodes_are_told_apart_if_there_are_several() -> None:
    workers = [worker(n, node_rank=n, local_rank=0, host=f"gpu0{n}", variables={"LOCAL_RANK": "0"}) for n in range(2)]
    text = table(plan(*workers, nnodes=2, agents=(PlannedAgent("gpu00", 1), PlannedAgent("gpu01", 1))), spec())
    assert text.startswith("workers  2 on 2 nodes  ")
    assert part(text, "rank") == dedent("""\
        rank  node  host   local rank  device  owns
        0     0     gpu00  0           cuda:0  GPU-0932aaaa
        1     1     gpu01  0           cuda:1  GPU-1932aaaa""")


def test_uuids_stay_whole_where_their_beginnings_are_equal() -> None:
    twins = ["GPU-8932aaaa-1111", "GPU-8932aaaa-2222"]
    text = table(plan(worker(0, devices=(twins[0],)), worker(1, devices=(twins[1],))), spec())
    assert all(twin in text for twin in twins)


def test_several_devices_of_one_worker_stand_in_one_row() -> None:
    text = table(plan(worker(0, devices=(uuid(0), uuid(1)))), spec())
    assert "0     cuda:0  GPU-0932aaaa GPU-1932aaaa\n" in text
    assert "\ndevices  2 " in text


def test_different_commands_are_shown_with_their_ranks() -> None:
    commands = [("python", "a b.py"), ("python", "x"), ("python", "x")]
    text = table(plan(*(worker(n, argv=argv) for n, argv in enumerate(commands))), spec())
    assert part(text, "command") == dedent("""\
        command:
          rank 0     python 'a b.py'
          ranks 1-2  python x""")


def test_values_are_quoted_as_a_shell_wants_it() -> None:
    quoting = {"variables": {"X": "a b"}}
    assert "\n  X='a b'\n" in table(plan(worker(0, **quoting), worker(1, **quoting)), spec(verbosity=1))


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({"DDPLAUNCH_THREADS": "2"}, ["--threads 2  DDPLAUNCH_THREADS"]),
        ({"DDPLAUNCH_GRACE_PERIOD": "1h30m"}, ["--grace-period 1h30m  DDPLAUNCH_GRACE_PERIOD"]),
        ({"PET_STANDALONE": "1"}, ["--standalone  PET_STANDALONE"]),
        ({"DDPLAUNCH_QUIET": "0", "PET_RDZV_ENDPOINT": ""}, []),
        ({"DDPLAUNCH_QUIET": "1"}, ["--quiet  DDPLAUNCH_QUIET"]),
        ({"DDPLAUNCH_HOSTFILE": "my hosts"}, ["--hostfile 'my hosts'  DDPLAUNCH_HOSTFILE"]),
        (
            {"DDPLAUNCH_NPROC_PER_NODE": "4", "PET_LOG_DIR": "logs", "DDPLAUNCH_PIN": "none"},
            ["--nproc-per-node 4  DDPLAUNCH_NPROC_PER_NODE", "--log-dir logs      PET_LOG_DIR"],
        ),
    ],
)
def test_what_was_not_typed_is_shown_as_it_would_be(variables: dict[str, str], lines: list[str]) -> None:
    text = table(plan(), spec_of(Given.typed("pin", "none"), **variables))
    shown = part(text, "from").split("\n")[1:] if "\n\nfrom" in text else []
    assert [line.removeprefix("  ") for line in shown] == lines


def test_variables_of_workers_that_were_not_typed_are_shown_once() -> None:
    asked = spec(origins={"env": "pyproject.toml, --env"}, env=(("A", "1 2"), ("B", "3")))
    assert "\n  --env 'A=1 2' --env B=3  pyproject.toml, --env\n" in table(plan(), asked)
    assert "from variables" not in table(plan(), spec(origins={"env": "--env"}, env=(("A", "1"),)))


def test_sentences_are_broken_at_80_columns_but_never_inside_an_option() -> None:
    note = "word " * 12 + "and then there is --virtual-local-rank which is not broken " + "word " * 10
    lines = part(table(plan(notes=(note, "another")), spec()), "note").split("\n")
    assert all(len(line) <= 80 for line in lines)
    assert [line for line in lines if "--virtual-local-rank" in line]
    assert [line[:6] for line in lines] == ["note: ", "      ", "      ", "note: "]


def test_json_holds_the_whole_plan() -> None:
    data = json.loads(as_json(plan(worker(0, cpus=(1, 2)), notes=("n",)), {"threads": "--threads"}))
    assert data == {
        "v": 1,
        "run_id": "run-1",
        "cluster": "local",
        "nnodes": 1,
        "world_size": 1,
        "master_addr": "127.0.0.1",
        "master_port": None,
        "init_method": "env",
        "backend": "nccl",
        "pin": "device",
        "reasons": REASONS,
        "origins": {"threads": "--threads"},
        "notes": ["n"],
        "workers": [
            {
                "rank": 0,
                "local_rank": 0,
                "node_rank": 0,
                "host": "gpu01",
                "device": "cuda:0",
                "devices": [uuid(0)],
                "cpus": [1, 2],
                "argv": ["python", "train.py"],
                "wrap": [],
                "variables": {**SHARED, "RANK": "0", "LOCAL_RANK": "0", "DDPLAUNCH_DEVICE": "cuda:0"},
            }
        ],
    }


@pytest.mark.parametrize(("nnodes", "control", "has_term"), [(2, True, True), (2, False, False), (1, False, True)])
def test_nodes_that_do_not_communicate_are_shown_without_a_term(nnodes: int, control: bool, has_term: bool) -> None:
    agents = tuple(PlannedAgent(f"gpu0{number}", 1) for number in range(nnodes))
    text = table(plan(worker(0), nnodes=nnodes, agents=agents), replace(spec(), no_control=not control, verbosity=1))
    assert ("DDPLAUNCH_TERM" in text) == has_term


def test_the_shell_form_sets_no_term() -> None:
    assert "DDPLAUNCH_TERM" not in shell(plan())


def test_the_shell_form_is_one_command_line_for_each_worker() -> None:
    lines = shell(plan(worker(0, variables={"X": "it's"}), worker(1, cpus=(1, 2)), master_port=4000)).splitlines()
    assert [lines[0], lines[2]] == ["# rank 0", "# rank 1"]
    assert len(lines) == 4
    words = shlex.split(lines[1])
    assert words[0] == "env"
    assert words[-2:] == ["python", "train.py"]
    assert {"RANK=0", "X=it's", "MASTER_PORT=4000", "TORCHELASTIC_RESTART_COUNT=0"} <= set(words)
    assert shlex.split(lines[3])[-5:] == ["taskset", "-c", "1-2", "python", "train.py"]


def test_the_shell_form_says_that_the_port_only_stands_for_another() -> None:
    lines = shell(plan()).splitlines()
    assert lines[0] == "# ddplaunch would reserve a free port; 29500 stands for it here"
    assert all("MASTER_PORT=29500 " in line for line in lines if line.startswith("env"))
