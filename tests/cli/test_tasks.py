"""Of the tasks of an srun, the first one says what is wrong with their line; below a task any process says it too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DDPLAUNCH = f"{sys.executable} -m ddplaunch"
WRONG = [
    ("--nosuch train.py", "--nosuch"),
    ("doctor --nosuch", "--nosuch"),
]


def run(shell: str, folder: Path, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", "-c", shell], cwd=folder, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(("line", "word"), WRONG)
def test_a_wrong_line_is_told_by_the_first_task_alone(tmp_path: Path, line: str, word: str) -> None:
    as_task = f"export SLURM_TASK_PID=$$; exec {DDPLAUNCH} {line}"
    status, text = run(as_task, tmp_path, SLURM_PROCID="0")
    assert (status, word in text) == (2, True)
    assert run(as_task, tmp_path, SLURM_PROCID="7") == (2, "")


def test_a_wrong_value_is_told_by_each_task_since_that_of_others_may_be_right(tmp_path: Path) -> None:
    as_task = f"export SLURM_TASK_PID=$$; exec {DDPLAUNCH} --master-port $((65535 + SLURM_PROCID)) train.py"
    status, text = run(as_task, tmp_path, SLURM_PROCID="7")
    assert (status, "--master-port 65542" in text) == (2, True)


def test_a_wrong_line_below_a_shell_of_another_task_is_told(tmp_path: Path) -> None:
    status, text = run(f"export SLURM_TASK_PID=$PPID; {DDPLAUNCH} --nosuch; exit $?", tmp_path, SLURM_PROCID="7")
    assert (status, "--nosuch" in text) == (2, True)


def test_what_is_wrong_with_a_file_is_told_by_each_task_since_others_may_have_another(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch.toml").write_text("nproc-per-node = 'many'\n")
    as_task = f"export SLURM_TASK_PID=$$; exec {DDPLAUNCH} train.py"
    status, text = run(as_task, tmp_path, SLURM_PROCID="7")
    assert (status, "ddplaunch.toml" in text) == (2, True)
