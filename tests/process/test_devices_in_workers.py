"""What the workers of the real command are given: devices of a machine with made-up GPUs, CPUs of this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import PROGRAMS, Job, Result
from tests.fake_nvml import made_up
from tests.fake_nvml.made_up import gpu, mig

CPUS = sorted(os.sched_getaffinity(0))
PLACE = PROGRAMS / "place.py"


class Seen(NamedTuple):
    """What a worker was told about devices; None: the variable was not there."""

    visible: str | None
    device: str | None
    pinned: str | None = None
    local_rank: str | None = None

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> Seen:
        names = ("CUDA_VISIBLE_DEVICES", "DDPLAUNCH_DEVICE", "DDPLAUNCH_PIN_DEVICE", "LOCAL_RANK")
        return cls(*map(variables.get, names))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """The variables that make a command see so many GPUs and such a torch, and nothing of what is really here."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)

    return partial(made_up.machine, library)


def places(job: Job) -> list[dict[str, Any]]:
    """What the workers have put up, by rank."""
    files = sorted((job.home / "signs").glob("place-*"), key=lambda path: int(path.name.removeprefix("place-")))
    return [json.loads(file.read_text()) for file in files]


def all_visible(count: int, visible: str | None = None) -> list[Seen]:
    """Each worker has its own device as the current one of all."""
    return [Seen(visible, f"cuda:{n}", f"cuda:{n}", f"{n}") for n in range(count)]


def own_only(*visible: str, local_rank: str | None = None) -> list[Seen]:
    """Each worker sees its own devices only."""
    return [Seen(tokens, "cuda:0", None, local_rank or f"{n}") for n, tokens in enumerate(visible)]


FOUR = "H200 H200 H200 H200"
EIGHT = f"{FOUR} {FOUR}"
CASES: dict[str, tuple[str, str, dict[str, str], list[Seen]]] = {
    "no GPU": ("", "", {}, [Seen(None, "cpu", None, "0")]),
    "one GPU": ("H200", "", {}, all_visible(1)),
    "four GPUs": (FOUR, "", {}, all_visible(4)),
    "eight GPUs": (EIGHT, "", {}, all_visible(8)),
    "different models": ("A100 H200", "", {}, all_visible(2, f"{gpu(0)},{gpu(1)}")),
    "MIG": ("A100 A100/2", "", {}, own_only(gpu(0), mig(1, 0), mig(1, 1))),
    "device": (FOUR, "--pin device", {}, all_visible(4)),
    "visible": (FOUR, "--pin visible", {}, own_only("0", "1", "2", "3")),
    "none": (FOUR, "--pin none", {}, [Seen(None, f"cuda:{n}", None, f"{n}") for n in range(4)]),
    "virtual": (FOUR, "--virtual-local-rank", {}, own_only("0", "1", "2", "3", local_rank="0")),
    "chosen": (FOUR, "--devices 2,0", {}, all_visible(2, "2,0")),
    "chosen by UUID": (FOUR, f"--devices {gpu(3)}", {}, all_visible(1, "3")),
    "chosen, visible": (FOUR, "--devices 2,0 --pin visible", {}, own_only("2", "0")),
    "several each": (FOUR, "--gpus-per-worker 2", {}, own_only("0,1", "2,3")),
    "shared": (
        "H200 H200",
        "--workers-per-gpu 2",
        {},
        [Seen(None, f"cuda:{n // 2}", f"cuda:{n // 2}", f"{n}") for n in range(4)],
    ),
    "in turn": (
        "H200 H200",
        "--nproc-per-node 3",
        {},
        [Seen(None, f"cuda:{n % 2}", f"cuda:{n % 2}", f"{n}") for n in range(3)],
    ),
    "fewer workers": (FOUR, "--nproc-per-node 2", {}, all_visible(2)),
    "for the CPUs": (FOUR, "--nproc-per-node cpu", {}, [Seen(None, "cpu", None, f"{n}") for n in range(len(CPUS))]),
    "outer list": (EIGHT, "", {"CUDA_VISIBLE_DEVICES": "4,7"}, all_visible(2, "4,7")),
    "outer list, visible": (EIGHT, "--pin visible", {"CUDA_VISIBLE_DEVICES": "4,7"}, own_only("4", "7")),
    "outer list, chosen": (EIGHT, "--devices 1", {"CUDA_VISIBLE_DEVICES": "4,7"}, all_visible(1, "7")),
    "outer UUIDs": (EIGHT, "", {"CUDA_VISIBLE_DEVICES": f"{gpu(6)},{gpu(2)}"}, all_visible(2, f"{gpu(6)},{gpu(2)}")),
    "outer UUIDs, visible": (
        EIGHT,
        "--pin visible",
        {"CUDA_VISIBLE_DEVICES": f"{gpu(6)},{gpu(2)}"},
        own_only(gpu(6), gpu(2)),
    ),
    "all hidden": (EIGHT, "", {"CUDA_VISIBLE_DEVICES": "-1"}, [Seen("-1", "cpu", None, "0")]),
    "list for the workers": (EIGHT, "--env CUDA_VISIBLE_DEVICES=5,1", {}, all_visible(2, "5,1")),
    "command": (
        "H200 H200",
        f"--no-python {sys.executable}",
        {},
        [Seen(None, f"cuda:{n}", None, f"{n}") for n in range(2)],
    ),
    "command, visible": ("H200 H200", f"--pin visible --no-python {sys.executable}", {}, own_only("0", "1")),
}


@pytest.mark.parametrize(("gpus", "words", "outer", "expected"), CASES.values(), ids=CASES)
def test_workers_are_to_be_told_their_devices(job, commands, machine, gpus, words, outer, expected):
    result = commands.run(job, "plan", "--json", *words.split(), PLACE, env={**machine(gpus), **outer}).expect(0)
    plan = json.loads(result.out)
    assert [Seen.of({**outer, **worker["variables"]}) for worker in plan["workers"]] == expected


@pytest.mark.parametrize("case", ["several each", "MIG", "outer UUIDs, visible", "list for the workers", "command"])
def test_workers_are_told_their_devices(job: Job, machine: Callable[..., dict[str, str]], case: str) -> None:
    gpus, words, outer, expected = CASES[case]
    job.run(*words.split(), PLACE, env={**machine(gpus), **outer}).expect(0)
    assert [Seen.of(place["variables"]) for place in places(job)] == expected


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        ("13.0", "2 workers, nccl (every worker has a GPU of its own)"),
        (None, "2 workers, gloo (torch 2.13.0+cpu is a CPU build)"),
    ],
)
def test_the_backend_is_said_with_its_reason(job, machine, cuda, said):
    result = job.run(PLACE, env=machine("H200 H200", cuda)).expect(0)
    assert said in result.err
    backend = said.split()[2]
    assert [place["variables"]["DDPLAUNCH_BACKEND"] for place in places(job)] == [backend] * 2


# --- CPUs

needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def bound(job: Job) -> list[list[int]]:
    return [place["cpus"] for place in places(job)]


def threads(job: Job) -> list[int]:
    return [int(place["variables"]["OMP_NUM_THREADS"]) for place in places(job)]


@needs_two_cpus
def test_workers_bound_to_cores_have_different_cpus(job: Job) -> None:
    job.run("--nproc-per-node", 2, "--cpu-bind", "cores", PLACE)
    first, second = bound(job)
    assert first and second and not set(first) & set(second)
    assert set(first + second) <= set(CPUS)
    for worker in places(job):
        assert int(worker["variables"]["OMP_NUM_THREADS"]) <= len(worker["cpus"])


def test_workers_that_are_not_bound_may_use_all_cpus(job: Job) -> None:
    job.run("--nproc-per-node", 2, PLACE)
    assert bound(job) == [CPUS, CPUS]


def restricted(job: Job, *words: object) -> Result:
    """Run the command on one CPU only, as taskset would."""
    return job.run(*words, preexec_fn=lambda: os.sched_setaffinity(0, CPUS[-1:]))


@pytest.mark.parametrize("binding", [(), ("--cpu-bind", "cores"), ("--cpu-bind", "numa"), ("--numa-binding", "node")])
def test_the_cpus_that_the_command_was_given_are_all_that_workers_get(job: Job, binding: tuple[str, ...]) -> None:
    assert restricted(job, "--nproc-per-node", "cpu", *binding, PLACE).status == 0
    assert bound(job) == [CPUS[-1:]]
    assert threads(job) == [1]


# --- the plan in the shell


def planned(job: Job, form: str, words: tuple[object, ...], env: dict[str, str]) -> str:
    result = job.run("plan", form, "--run-id", "pasted", *words, PLACE, env=env).expect(0)
    return result.out


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ("", ("--nproc-per-node", 2)),
        ("H200 H200", ("--pin", "visible")),
        ("H200 H200", ("--master-port", 4000, "--init-method", "tcp", "--role", "a role")),
        pytest.param(
            "",
            ("--nproc-per-node", 2, "--cpu-bind", "cores"),
            marks=[needs_two_cpus, pytest.mark.skipif(not shutil.which("taskset"), reason="needs taskset")],
        ),
    ],
)
def test_a_pasted_plan_gives_workers_what_the_plan_says(job, machine, gpus, words):
    env = machine(gpus)
    words = (*words, "--env", 'X= it\'s "$HOME"\n `id` \\ ü')
    plan = json.loads(planned(job, "--json", words, env))
    script = planned(job, "--sh", words, env)
    caller = {**job.env, **env}
    subprocess.run(["sh", "-eu"], input=script.encode(), env=caller, cwd=job.home, check=True, timeout=60)
    found = places(job)
    assert len(found) == len(plan["workers"]) == 2
    for place, worker in zip(found, plan["workers"], strict=True):
        of_generation = {
            "MASTER_PORT": str(plan["master_port"] or 29500),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_ERROR_FILE": "",
            "DDPLAUNCH_INIT_METHOD": "tcp://127.0.0.1:4000" if plan["init_method"] == "tcp" else "env://",
            "DDPLAUNCH_LOG_DIR": "",
        }
        of_shell = {name: place["variables"].get(name) for name in ("PWD", "OLDPWD", "SHLVL", "_")}
        expected = {**caller, **of_shell, **worker["variables"], **of_generation}
        assert place["variables"] == {name: value for name, value in expected.items() if value is not None}
        assert place["cpus"] == (worker["cpus"] or CPUS)


def test_the_plan_that_is_shown_is_the_one_that_is_run(job: Job, machine: Callable[..., dict[str, str]]) -> None:
    env, words = machine("H200 H200"), ("--pin", "visible", "--threads", 3)
    shown = json.loads(planned(job, "--json", words, env))
    assert job.run("--run-id", "pasted", *words, PLACE, env=env).status == 0
    run = json.loads((job.folder / "plan.json").read_text())
    del run["agent_pid"], run["slurm_job"], run["srun_job"]
    assert run == shown
