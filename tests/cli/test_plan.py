"""`ddplaunch plan` as people see it: the real command, on machines with made-up GPUs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

import ddplaunch
from tests.conftest import Job
from tests.fake_nvml import made_up
from tests.forks import Commands

Plan = Callable[..., str]
VARIABLES = re.compile(r"\nvariables of all workers:\n(?:  .*\n)*")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(job: Job, library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, str]]:
    """A folder with train.py, and the variables that make a command see so many GPUs and a torch with CUDA."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    (job.home / "train.py").write_text("open('started', 'w')\n")
    return partial(made_up.machine, library)


@pytest.fixture
def plan(job: Job, commands: Commands, machine: Callable[[str], dict[str, str]]) -> Plan:
    """Shows a plan, with names that stand for this host, this interpreter and our package, and single spaces."""

    def show(words: str, gpus: str = "", **variables: str) -> str:
        result = commands.run(job, "plan", "--run-id", "run-1", *words.split(), env={**machine(gpus), **variables})
        assert (result.status, result.err) == (0, "")
        assert all(line == line.rstrip() for line in result.out.splitlines())
        text = result.out.replace(f" on {socket.gethostname()} ", " on HOST ").replace(sys.executable, "PYTHON")
        text = text.replace(os.path.dirname(ddplaunch.__file__), "PACKAGE")
        return re.sub(r"(?<=\S) +", " ", text)

    return show


def test_a_plan_on_a_machine_without_gpus(plan: Plan) -> None:
    assert plan("-v --nproc-per-node 2 --threads 3 train.py --lr 0.1") == dedent("""\
        workers 2 on HOST --nproc-per-node
        cluster local
        address 127.0.0.1 a single node
        port - a free one is reserved at the start
        backend gloo no accelerator
        threads 3 --threads
        devices 0 none found

        rank device
        0 cpu
        1 cpu

        command:
          PYTHON PACKAGE/worker/bootstrap.py script train.py --lr 0.1

        variables of each worker:
          its rank LOCAL_RANK RANK ROLE_RANK
          set at the start DDPLAUNCH_INIT_METHOD DDPLAUNCH_LOG_DIR DDPLAUNCH_TERM
                            MASTER_PORT TORCHELASTIC_ERROR_FILE
                            TORCHELASTIC_RESTART_COUNT

        variables of all workers:
          DDPLAUNCH_BACKEND=gloo
          DDPLAUNCH_DEVICE=cpu
          DDPLAUNCH_RUN_ID=run-1
          GROUP_RANK=0
          GROUP_WORLD_SIZE=1
          LOCAL_WORLD_SIZE=2
          MASTER_ADDR=127.0.0.1
          NODE_RANK=0
          OMP_NUM_THREADS=3
          PYTHONUNBUFFERED=1
          ROLE_NAME=default
          ROLE_WORLD_SIZE=2
          TORCHELASTIC_MAX_RESTARTS=0
          TORCHELASTIC_RUN_ID=run-1
          TORCHELASTIC_USE_AGENT_STORE=False
          TORCH_NCCL_ASYNC_ERROR_HANDLING=1
          WORLD_SIZE=2
        """)


def test_a_plan_with_chosen_gpus_of_which_each_worker_sees_its_own(plan: Plan, job: Job) -> None:
    (job.home / "ddplaunch.toml").write_text('pin = "visible"\nenv = { NCCL_DEBUG = "INFO" }\n')
    shown = plan("-v --devices 2,0 train.py", "H200 H200 H200 H200", PET_MAX_RESTARTS="3", OMP_NUM_THREADS="4")
    assert VARIABLES.sub("", shown) == dedent("""\
        workers 2 on HOST 2 accelerators
        cluster local
        address 127.0.0.1 a single node
        port - a free one is reserved at the start
        backend nccl every worker has a GPU of its own
        threads 4 OMP_NUM_THREADS=4 was set
        devices 2 --devices, of 4 (NVML)
        pin visible ddplaunch.toml

        note: each worker sees only its own devices, so LOCAL_RANK is not a device
              index: use DDPLAUNCH_DEVICE

        from variables and files:
          --pin visible ddplaunch.toml
          --max-restarts 3 PET_MAX_RESTARTS
          --env NCCL_DEBUG=... ddplaunch.toml

        rank device owns CUDA_VISIBLE_DEVICES
        0 cuda:0 GPU-20000000 2
        1 cuda:0 GPU-00000000 0

        command:
          PYTHON PACKAGE/worker/bootstrap.py script train.py

        variables of each worker:
          its rank LOCAL_RANK RANK ROLE_RANK
          set at the start DDPLAUNCH_INIT_METHOD DDPLAUNCH_LOG_DIR DDPLAUNCH_TERM
                            MASTER_PORT TORCHELASTIC_ERROR_FILE
                            TORCHELASTIC_RESTART_COUNT
        """)


def test_a_plan_for_more_workers_than_gpus_with_arguments_of_their_own(plan: Plan) -> None:
    shown = plan("-v --nproc-per-node 3 --threads 1 --master-port 4000 train.py --out=${local_rank}", "H200 H200")
    assert VARIABLES.sub("", shown) == dedent("""\
        workers 3 on HOST --nproc-per-node
        cluster local
        address 127.0.0.1 a single node
        port 4000 --master-port
        backend gloo 3 workers share 2 GPUs, which NCCL refuses
        threads 1 --threads
        devices 2 NVML
        pin device default

        note: 3 workers on 2 devices: set_device(LOCAL_RANK) fails from local rank 2 on;
              use DDPLAUNCH_DEVICE, or --virtual-local-rank

        rank device owns
        0 cuda:0 GPU-00000000
        1 cuda:1 GPU-10000000
        2 cuda:0 GPU-00000000

        command:
          rank 0 PYTHON PACKAGE/worker/bootstrap.py script train.py --out=0
          rank 1 PYTHON PACKAGE/worker/bootstrap.py script train.py --out=1
          rank 2 PYTHON PACKAGE/worker/bootstrap.py script train.py --out=2

        variables of each worker:
          its device DDPLAUNCH_DEVICE DDPLAUNCH_PIN_DEVICE
          its rank LOCAL_RANK RANK ROLE_RANK
          set at the start DDPLAUNCH_INIT_METHOD DDPLAUNCH_LOG_DIR DDPLAUNCH_TERM
                            MASTER_PORT TORCHELASTIC_ERROR_FILE
                            TORCHELASTIC_RESTART_COUNT
        """)


def test_mig_instances_are_shown_by_the_names_that_cuda_takes(plan: Plan) -> None:
    shown = plan("--threads 1 train.py", "A100/2")
    assert "\ndevices 2 NVML\npin visible CUDA shows a process no more than one MIG instance\n" in shown
    assert f"\n1 cuda:0 MIG-00000001 {made_up.mig(0, 1)}\n" in shown


ASSUMED = "note: no other host was asked: each is planned like this one, "


@pytest.mark.parametrize("hosts", ["gpu01:2", "gpu01,gpu01", "gpu[01,01]"])
def test_a_single_host_has_a_worker_for_each_of_its_slots_and_is_listed_once_for_each(plan: Plan, hosts: str) -> None:
    shown = plan(f"--hosts {hosts} train.py")
    assert re.search(r"workers +2 on gpu01 +as given for each host\n", shown)


def test_hosts_that_were_not_asked_are_not_said_to_have_what_this_one_has(plan: Plan) -> None:
    shown = plan("--hosts gpu01:2,gpu02:4 train.py", "H200 H200")
    assert shown.startswith("workers 6 on 2 nodes as given for each host\n")
    assert shown.count(" - unknown until gpu01 is reached\n") == 3
    assert "note: no host was asked: each finds its own devices" in shown
    assert "cuda:" not in shown
    assert "accelerator" not in shown
    assert ASSUMED in plan(f"--hosts {os.uname().nodename},gpu02 train.py")


@pytest.mark.parametrize(
    "words", ["--nproc-per-node gpu", "--gpus-per-worker 2", "--devices 0,1", "--mps", "--workers-per-gpu 2", ""]
)
def test_what_a_login_node_lacks_is_no_error_of_a_job_on_other_hosts(plan: Plan, words: str) -> None:
    shown = plan(f"--hosts gpu01,gpu02 {words} train.py")
    assert shown.startswith("workers 2 on 2 nodes unknown until gpu01 is reached, and each host is shown with one\n")


def test_what_is_given_is_known_of_hosts_that_were_not_asked(plan: Plan) -> None:
    shown = plan("--hosts gpu01,gpu02 --nproc-per-node 2 --backend nccl --threads 3 train.py")
    assert shown.startswith("workers 4 on 2 nodes --nproc-per-node\n")
    assert "\nbackend nccl --backend\nthreads 3 --threads\ndevices - unknown until gpu01 is reached\n" in shown


def test_no_variable_has_a_value_that_a_host_which_was_not_asked_decides(job: Job, commands: Commands) -> None:
    (job.home / "train.py").touch()

    def planned(*words: str) -> str:
        result = commands.run(job, "plan", "--hosts", "gpu01,gpu02", *words, "train.py")
        assert result.status == 0, result.err
        return result.out

    decided_there = ("DDPLAUNCH_BACKEND", "DDPLAUNCH_DEVICE", "OMP_NUM_THREADS")
    as_table, as_shell, as_data = planned("-v"), planned("--sh"), json.loads(planned("--json"))
    assert all(
        f"{name}=" not in as_table + as_shell and name in as_table and name in as_shell for name in decided_there
    )
    assert as_data["backend"] is None
    for worker in as_data["workers"]:
        assert worker["device"] is None
        assert not worker["variables"].keys() & set(decided_there)
    given = json.loads(planned("--json", "--backend", "nccl", "--threads", "3"))
    assert given["backend"] == given["workers"][1]["variables"]["DDPLAUNCH_BACKEND"] == "nccl"
    assert given["workers"][0]["variables"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("words", ["", "--nnodes 2 --simulate", "--hosts localhost"])
def test_a_plan_of_this_host_alone_assumes_nothing(plan: Plan, words: str) -> None:
    assert ASSUMED not in plan(f"{words} train.py")


def test_simulated_nodes_have_their_parts_of_the_machine_as_when_they_run(plan: Plan) -> None:
    shown = plan("--nnodes 2 --simulate train.py", "H200 H200 H200 H200")
    assert shown.startswith("workers 4 on 2 nodes 2 accelerators\n")
    assert "\n2 1 node-1 0 cuda:2 GPU-20000000\n" in shown


def test_simulated_nodes_that_share_devices_have_gloo(plan: Plan) -> None:
    shown = plan("--nnodes 2 --simulate=share train.py", "H200")
    assert "\nbackend gloo the simulated nodes share their devices, which NCCL refuses\n" in shown


def test_an_option_without_effect_is_noted(plan: Plan) -> None:
    assert "\nnote: --monitor-interval 5 has no effect: " in plan("--monitor-interval 5 train.py")


def test_the_table_is_no_wider_than_a_terminal(
    job: Job, commands: Commands, machine: Callable[[str], dict[str, str]]
) -> None:
    shown = commands.run(job, "plan", "--gpus-per-worker", 2, "train.py", env=machine("H200 " * 8)).out
    _, _, parts = shown.partition("\n\n")  # the names of hosts may be long
    assert max(len(line) for line in parts.splitlines() if "bootstrap.py" not in line) <= 80  # to be copied: not broken


def test_a_plan_starts_nothing_and_leaves_nothing(job: Job, machine: Callable[[str], dict[str, str]]) -> None:
    assert job.run("plan", "train.py", env=machine("H200 H200")).status == 0
    assert not (job.home / "started").exists()
    assert not list((job.home / "state").iterdir())
    job.nothing_left()


def test_the_same_words_give_the_same_plan(plan: Plan) -> None:
    assert plan("--json train.py", "H200 H200") == plan("--json train.py", "H200 H200")


def test_json_is_the_plan_alone_on_stdout(plan: Plan) -> None:
    data = json.loads(plan("--json --threads 2 train.py", "H200", DDPLAUNCH_PIN="none"))
    assert data["origins"] == {"run_id": "--run-id", "threads": "--threads", "pin": "DDPLAUNCH_PIN"}
    assert [worker["device"] for worker in data["workers"]] == ["cuda:0"]


REFUSED = [
    (
        "--nproc-per-node gpu train.py",
        "",
        "--nproc-per-node gpu: this node has no accelerator (none found)",
        "--nproc-per-node cpu, or a number",
    ),
    (
        "--gpus-per-worker 3 train.py",
        "H200 H200",
        "--gpus-per-worker 3: 1 worker needs 3 GPUs, but the job has only 2",
        "--gpus-per-worker 2",
    ),
    (
        "--workers-per-gpu 2 --nproc-per-node 5 train.py",
        "H200 H200",
        "--workers-per-gpu 2: 5 workers need 3 GPUs, but the job has only 2",
        "--nproc-per-node 4",
    ),
    ("--devices 0,4 train.py", "H200 H200", "--devices 0,4: there is no device 4; this node has 0-1", "--devices 0,1"),
    (
        "--pin device train.py",
        "A100/2",
        "--pin device: CUDA shows a process no more than one MIG instance",
        "--pin visible",
    ),
    (
        "--pin device --no-python true",
        "H200",
        "--pin device: it works inside python, but --no-python runs a command",
        "--pin visible",
    ),
    (
        "--nnodes 3 train.py",
        "",
        "--nnodes 3: neither the hosts nor the rank of this node are given",
        """give them in one of four ways:
  over ssh:         ddplaunch --hosts a,b,c SCRIPT
  in a Slurm job:   srun --nodes 3 --ntasks-per-node 1 ddplaunch SCRIPT
  on each by hand:  ddplaunch --nnodes 3 --node-rank 0 --master-addr HOST SCRIPT
  on this machine:  ddplaunch --nnodes 3 --simulate SCRIPT""",
    ),
    ("--node-rank 1 train.py", "", "--node-rank 1: the job has one node, and its rank is 0", "leave --node-rank out"),
    ("--debug 2 --nproc-per-node 2 train.py", "", "--debug 2: the job has ranks 0 to 1", "--debug 0"),
    (
        "--nproc-per-node 0 train.py",
        "",
        '--nproc-per-node 0: expected a number from 1 to 65536, "gpu", "cpu" or "auto"',
        "type for example `--nproc-per-node 4`",
    ),
]


@pytest.mark.parametrize("verb", ["plan", "run"])
@pytest.mark.parametrize(("words", "gpus", "message", "hint"), REFUSED)
def test_what_cannot_be_is_refused_alike_by_plan_and_run(
    job: Job,
    commands: Commands,
    machine: Callable[[str], dict[str, str]],
    verb: str,
    words: str,
    gpus: str,
    message: str,
    hint: str,
) -> None:
    result = commands.run(job, verb, *words.split(), env=machine(gpus))
    assert (result.status, result.out, result.err) == (2, "", f"error: {message}\n\nhint: {hint}\n")
    assert not (job.home / "started").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("gpus-per-worker = 2", "gpus-per-worker = 2 in ddplaunch.toml: 1 worker needs 2 GPUs, but the job has only 1"),
        ("devices = [0, 9]", "devices = 0,9 in ddplaunch.toml: there is no device 9; this node has 0 alone"),
    ],
)
def test_a_mistake_in_a_file_is_written_as_it_stands_there(
    job: Job, commands: Commands, machine: Callable[[str], dict[str, str]], content: str, said: str
) -> None:
    (job.home / "ddplaunch.toml").write_text(f"{content}\n")
    result = commands.run(job, "plan", "train.py", env=machine("H200"))
    assert (result.status, result.err.splitlines()[0]) == (2, f"error: {said}")


def test_a_reader_of_the_plan_that_goes_away_is_no_error(job: Job, machine: Callable[[str], dict[str, str]]) -> None:
    argv = ["sh", "-c", '"$@" | head -1', "sh", *job.argv("plan", "--nproc-per-node", 256, "train.py")]
    found = subprocess.run(argv, env={**job.env, **machine("")}, capture_output=True, cwd=job.home, check=True)
    assert found.stdout.startswith(b"workers  256 on ")
    assert found.stderr == b""


@pytest.mark.parametrize("form", ["", "--json ", "--sh "])
def test_the_values_of_files_are_shown_nowhere(plan: Plan, job: Job, form: str) -> None:
    (job.home / "ddplaunch.toml").write_text('env = { TOKEN_OF_FILE = "s3cret" }\n')
    (job.home / "my.env").write_text("API_KEY=s3cret\nSEED=s3cret\n")
    shown = plan(f"{form}--env-file my.env --env SEED=7 train.py", "")
    assert "s3cret" not in shown
    assert "API_KEY" in shown
    assert "SEED" in shown


def test_why_nothing_is_forked_and_so_nothing_kept_is_one_reason_in_two_sentences(plan: Plan) -> None:
    shown = plan("--keep-warm 5 --no-python true")
    assert "\nnote: --keep-warm 5 has no effect: a command cannot be forked" in shown
    assert "kept warm nothing: a command cannot be forked" in shown


def test_a_plan_begins_with_its_values_and_notes_and_fits_a_small_terminal(plan: Plan) -> None:
    lines = plan("--nproc-per-node 8 --max-restarts 1 train.py").splitlines()
    assert len(lines) <= 24
    assert lines[0].startswith("workers 8 ")
    assert lines[-1] == "with -v: the variables of the workers"
    many = plan("--nproc-per-node 512 train.py", PET_MAX_RESTARTS="3").splitlines()
    at = next(number for number, line in enumerate(many) if line.startswith("note: 512 workers share "))
    assert at < 24
    assert "  --max-restarts 3 PET_MAX_RESTARTS" in many[:24]
