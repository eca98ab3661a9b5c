"""ddplaunch.toml and our table in pyproject.toml: what they take, and what is said of wrong ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddplaunch.cli.job import parse, resolve
from ddplaunch.spec.job import JobSpec, StreamChoice, Streams
from ddplaunch.system.errors import LaunchError


def spec(folder: Path, *words: str) -> JobSpec:
    """The job of `ddplaunch WORDS train.py` in this folder."""
    return resolve(parse([*words, "train.py"]), {}, str(folder))


def refused(folder: Path) -> str:
    """What is said of `ddplaunch train.py` in this folder instead, as it stands on stderr."""
    with pytest.raises(LaunchError) as caught:
        spec(folder)
    assert caught.value.status == 2
    return caught.value.render()


FILE = """
nproc_per_node = 4
grace-period = "1m"
timeout = 90
devices = [0, "GPU-8932"]
tee = "0:3,1:2"
log-dir = "logs"
env-file = ["train.env"]
python = "bin/python"
[env]
NCCL_DEBUG = "INFO"
LEVEL = 3
"""


def test_a_file_takes_numbers_texts_arrays_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch.toml").write_text(FILE)
    (tmp_path / "train.env").write_text("LEVEL=2\nFROM_FILE=1\n")
    job = spec(tmp_path, "--env", "LEVEL=4")
    assert (job.nproc_per_node, job.grace_period, job.timeout) == (4, 60.0, 90.0)
    assert job.devices == ("0", "GPU-8932")
    assert job.tee == StreamChoice(by_local_rank={0: Streams.BOTH, 1: Streams.ERR})
    assert dict(job.env) == {"FROM_FILE": "1", "NCCL_DEBUG": "INFO", "LEVEL": "4"}


def test_paths_in_a_file_are_taken_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch.toml").write_text("log-dir = 'logs'\npython = 'bin/python'\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    job = spec(inner)
    assert (job.log_dir, job.program.python) == (str(tmp_path / "logs"), str(tmp_path / "bin/python"))
    (tmp_path / "ddplaunch.toml").write_text("python = 'python3.12'\n")
    assert spec(inner).program.python == "python3.12"


WRONG_FILES = [
    (
        "nproc-per-nod = 4",
        "error: nproc-per-nod in ddplaunch.toml is not an option\n\nhint: did you mean `nproc-per-node`?\n",
    ),
    (
        "nproc-per-node = 4\nnproc_per_node = 4",
        "error: nproc-per-node and nproc_per_node in ddplaunch.toml are the same option\n\nhint: leave one out\n",
    ),
    (
        "nproc-per-node = true",
        "error: nproc-per-node in ddplaunch.toml: expected a string or a number, not a boolean\n",
    ),
    ("nproc-per-node = [4]", "error: nproc-per-node in ddplaunch.toml: expected a string or a number, not an array\n"),
    ("run-id = 2026-01-01", "error: run-id in ddplaunch.toml: expected a string or a number, not a date or a time\n"),
    ("standalone = 1", "error: standalone in ddplaunch.toml: expected true or false, not a number\n"),
    ("env = 'A=1'\n[role]", "error: role in ddplaunch.toml: expected a string or a number, not a table\n"),
    ("env = {A = true}", "error: env in ddplaunch.toml: expected a table or an array of strings, not a table\n"),
    (
        "devices = [true]",
        "error: devices in ddplaunch.toml: expected a string, a number or an array of them, not an array\n",
    ),
    (
        "nproc-per-node = 'four'",
        (
            'error: nproc-per-node = "four" in ddplaunch.toml: expected a number from 1 to 65536, "gpu", "cpu" or "auto"\n\n'
            'hint: type for example `nproc-per-node = "4"`\n'
        ),
    ),
    (
        "threads = 0",
        "error: threads = 0 in ddplaunch.toml: expected a number from 1\n\nhint: type for example `threads = 4`\n",
    ),
    ("threads =", "error: ddplaunch.toml is not valid TOML: Invalid value (at end of document)\n"),
]


@pytest.mark.parametrize(("content", "said"), WRONG_FILES)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "ddplaunch.toml").write_text(content)
    assert refused(tmp_path) == said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch.toml").write_bytes(b"role = '\xff'\n")
    assert refused(tmp_path).startswith("error: ddplaunch.toml is not valid TOML: 'utf-8' codec can't decode")
    (tmp_path / "ddplaunch.toml").unlink()
    (tmp_path / "ddplaunch.toml").symlink_to("ddplaunch.toml")
    assert refused(tmp_path) == "error: cannot read ddplaunch.toml: too many levels of symbolic links\n"


NOT_OURS: dict[str, Callable[[Path], object]] = {
    "it is not a regular file": os.mkdir,
    "it is not a regular file ": os.mkfifo,
    "it is not a regular file  ": lambda path: path.symlink_to("/dev/zero"),
    "it is larger than 1 MiB": lambda path: path.write_text(f"# [tool.ddplaunch] {'x' * (1 << 20)}"),
}


@pytest.mark.parametrize("name", ["ddplaunch.toml", "pyproject.toml"])
@pytest.mark.parametrize(("why", "make"), NOT_OURS.items(), ids=NOT_OURS)
def test_what_is_no_file_of_ours_is_ignored_and_one_above_is_looked_for(
    tmp_path: Path, name: str, why: str, make: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_text("[tool.ddplaunch]\nthreads = 7\n" if name == "pyproject.toml" else "threads = 7\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    make(inner / name)
    job = spec(inner)
    assert (job.threads, job.remarks) == (7, (f"{name} is ignored: {why.strip()}",))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_of_another_user_is_ignored(tmp_path: Path, kind: str) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    os.chown(tmp_path / "pyproject.toml", 54321, -1)  # has nothing for us
    path = tmp_path / "ddplaunch.toml"
    if kind == "link":
        (tmp_path / "ours").write_text("threads = 7\n")
        path.symlink_to(tmp_path / "ours")
    else:
        path.write_text("threads = 7\n")
    os.chown(path, 54321, -1, follow_symlinks=False)
    job = spec(tmp_path)
    assert (job.threads, job.remarks) == (None, ("ddplaunch.toml is ignored: it belongs to another user (54321)",))


def test_our_table_in_pyproject_must_be_a_table(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[[tool.ddplaunch]]\nthreads = 1\n")
    assert refused(tmp_path) == "error: [tool.ddplaunch] in pyproject.toml is not a table\n"
