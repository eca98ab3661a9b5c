"""A folder with a torchrun that is ddplaunch: what it writes, what it refuses to, and what its torchrun does differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Job

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
SHOW = "import os, sys; print(sys.argv[1:], os.environ.get('WORLD_SIZE'))\n"


@pytest.fixture
def shimmed(job: Job) -> Job:
    """A job's home with a shim and a script in it."""
    (job.home / "show.py").write_text(SHOW)
    made = job.run("shim", "shim of mine", cwd=job.home)
    folder = f"'{job.home}/shim of mine'"
    line = f'export PATH={folder}:"$PATH" PYTHONPATH={folder}"${{PYTHONPATH:+:$PYTHONPATH}}"\n'
    assert (made.status, made.out) == (0, line)
    return job


def typed(job: Job, line: str, **env: str) -> tuple[int, list[str]]:
    """The status and sorted output of a line in a shell that uses the shim."""
    shell = 'eval "$(cat line)"; ' + line
    (job.home / "line").write_text(job.run("shim", "shim of mine", cwd=job.home).out)
    done = subprocess.run(
        ["sh", "-c", shell], cwd=job.home, env={**job.env, **env}, stdout=subprocess.PIPE, check=False
    )
    return done.returncode, sorted(done.stdout.decode().splitlines())


PYTHON = sys.executable


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("torchrun show.py", ["[] 1"]),
        ("torchrun --standalone --nproc_per_node=2 show.py --help", ["[0] ['--help'] 2", "[1] ['--help'] 2"]),
        (f"{PYTHON} -u -W ignore -m torch.distributed.run -m show a", ["['a'] 1"]),
        (f"{PYTHON} -m torch.distributed.launch show.py a", ["['--local-rank=0', 'a'] 1"]),
        (f"{PYTHON} -m torch.distributed.launch --use_env show.py a", ["['a'] 1"]),
        (f"{PYTHON} show.py -m torch.distributed.run", ["['-m', 'torch.distributed.run'] None"]),
    ],
)
def test_what_starts_torchrun_starts_ddplaunch(shimmed: Job, line: str, shown: list[str]) -> None:
    assert typed(shimmed, line) == (0, shown)


def test_it_says_once_which_programs_no_shim_reaches_and_what_to_type(job: Job) -> None:
    first = job.run("shim", "shim", cwd=job.home).expect(0)
    for program in ("accelerate launch", "fabric run", "tune run", "`ddplaunch --nproc-per-node N train.py ARGS`"):
        assert program in first.err
    assert job.run("shim", "shim", cwd=job.home).expect(0).err == ""


def test_the_number_of_workers_is_one_unless_something_says_more(shimmed: Job) -> None:
    assert typed(shimmed, "torchrun show.py", PET_NPROC_PER_NODE="2")[1] == ["[0] [] 2", "[1] [] 2"]


def test_its_help_says_what_it_is(shimmed: Job) -> None:
    status, lines = typed(shimmed, "torchrun --nproc-per-node 2 --help")
    assert status == 0
    assert any(line.startswith("This torchrun is ddplaunch, by `ddplaunch shim`.") for line in lines)


def test_a_mistake_behind_the_old_module_is_one_error(shimmed: Job) -> None:
    line = f"{PYTHON} -m torch.distributed.launch --nproc_per_node = 2 show.py 2>&1"
    assert typed(shimmed, line) == (2, ["", "error: --nproc_per_node =: a value has no blanks around its =",
                                        "hint: type `--nproc_per_node 2`"])  # fmt: skip


def test_a_sitecustomize_that_was_there_is_imported(shimmed: Job) -> None:
    (shimmed.home / "site").mkdir()
    (shimmed.home / "site" / "sitecustomize.py").write_text("print('theirs')\n")
    assert typed(shimmed, f"{PYTHON} -c pass", PYTHONPATH=str(shimmed.home / "site")) == (0, ["theirs"])


def test_a_torchrun_that_is_not_ours_stays(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "torchrun").write_text("torch's\n")
    refused = job.run("shim", str(folder))
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.startswith(f"error: {folder}/torchrun exists and is not ours\n")
    assert os.listdir(folder) == ["torchrun"]


@pytest.mark.parametrize("name", ["torchrun", "sitecustomize.py"])
def test_nothing_is_written_through_a_link(job: Job, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refused = job.run("shim", str(folder))
    assert refused.status == 2
    assert refused.err.startswith(f"error: {folder}/{name} exists and is not ours\n")
    assert os.listdir(folder) == [name]
    assert not (tmp_path / "elsewhere").exists()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(job: Job, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "torchrun")
    assert "torchrun exists and is not ours" in job.run("shim", str(tmp_path)).err


@root_only
def test_what_runs_as_you_is_written_into_folders_only_that_nobody_else_can_change(job: Job, tmp_path: Path) -> None:
    for name, owner, mode in (("theirs", 54321, 0o755), ("open", -1, 0o1777), ("ours", -1, 0o755)):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, owner, -1)
        (tmp_path / name).chmod(mode)
    for folder, why in (
        ("theirs", "belongs to another user (54321)"),
        ("open", "every user may write to"),
        ("theirs/below", "theirs is theirs"),
    ):
        refused = job.run("shim", str(tmp_path / folder))
        assert (refused.status, refused.out) == (2, "")
        assert why in refused.err
    assert job.run("shim", str(tmp_path / "ours")).status == 0
    assert job.run("shim", str(tmp_path / "ours")).status == 0
    assert sorted(os.listdir(tmp_path / "ours")) == ["sitecustomize.py", "torchrun"]
