"""Wrong command lines and what is said to each, in `wrong.txt`: its status if that is not 2, the error, the hint."""

from __future__ import annotations

import os
import re
import shlex
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ddplaunch.cli.command import VERBS
from ddplaunch.cli.main import application
from tests.cli.typed import said, typed

TABLE = Path(__file__).parent / "wrong.txt"


def entries() -> Iterator[tuple[str, str]]:
    """Each command line with its answer."""
    for block in TABLE.read_text(encoding="utf-8").split("\n\n"):
        if block.startswith("$ "):
            line, _, answer = block.removeprefix("$ ").partition("\n")
            yield line, answer.rstrip("\n")


ENTRIES = list(entries())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what people take for a script in it, and an environment that sets no option."""
    for name, text in [
        ("train.py", "pass\n"),
        ("notebook.ipynb", '{"cells": []}\n'),
        ("config.yaml", "lr: 0.1\n"),
        ("config.json", '{"lr": 0.1}\n'),
        ("run.sh", "python train.py\n"),
        ("job.sbatch", "#!/bin/bash\n#SBATCH --nodes=2\npython train.py\n"),
        ("data.csv", "step,loss\n1,2\n"),
        ("README", "How to train\n"),
        ("hosts.txt", "a\nb\n"),
        ("a.out", "\x7fELF\0"),
        ("scripts/main.py", "pass\n"),
        ("pkg/train.py", "pass\n"),
        ("empty/nothing", ""),
        ("my train.py", "pass\n"),
        ("venv/bin/python", "#!/bin/sh\n"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty/nothing").unlink()
    for name in ("venv/bin/python", "a.out"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dangling.py").symlink_to("gone.py")
    os.mkfifo(tmp_path / "pipe")
    for name in ("bad.zip", "model.pt"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data.pkl", "")
    for name in os.environ:
        if name.startswith(("PET_", "DDPLAUNCH_", "SLURM_", "PBS_", "TORCH_ELASTIC_")) or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "answer"), ENTRIES, ids=[line for line, _ in ENTRIES])
def test_a_wrong_command_line_starts_nothing_and_says_what_to_type(folder: Path, line: str, answer: str) -> None:
    words = shlex.split(line)
    env = dict(word.split("=", 1) for word in words[: words.index("ddplaunch")])
    status, err = said(*words[words.index("ddplaunch") + 1 :], **env)
    text = err.replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON").replace("\n\n", "\n").rstrip("\n")
    assert (f"= {status}\n{text}" if status != 2 else text) == answer
    assert not (folder / "state").exists()


def test_the_table_is_long() -> None:
    assert len({line for line, _ in ENTRIES}) >= 200


def suggested() -> Iterator[tuple[str, str]]:
    """Each whole command line of ddplaunch that a hint says to type, with the line that was wrong."""
    for line, answer in ENTRIES:
        # what comes after "then" needs what is to be typed before
        for whole in re.findall(r"(?<!then )`([^`]+)`", answer.partition("hint: ")[2]):
            words = shlex.split(whole)
            if "ddplaunch" in words and not {"...", "VERB"} & {*words}:
                yield whole, line


SUGGESTED = dict(suggested())
# what only another machine has, and what only the user knows
NEEDS = {"--devices": "has no accelerator", "--nnodes": "neither the hosts nor the rank of this node are given"}


@pytest.mark.parametrize("whole", SUGGESTED)
def test_a_line_that_a_hint_says_to_type_is_accepted(folder: Path, whole: str) -> None:
    words = shlex.split(whole)
    verb, *rest = words[words.index("ddplaunch") + 1 :]
    if verb == "help":
        assert typed(*words[words.index("ddplaunch") + 1 :]).exit_code == 0
        return
    if verb in VERBS and verb != "plan":
        command = application.get_command(click.Context(application), verb)
        assert command is not None
        assert command.make_context(verb, rest)
        return
    several = {"PET_NPROC_PER_NODE": "4"} if {"--debug", "--debugpy"} & {*words} else {}
    result = typed("plan", *([verb] if verb != "plan" else []), *rest, **several)
    excused = [reason for option, reason in NEEDS.items() if option in words]
    assert result.exit_code == 0 or any(reason in result.stderr for reason in excused), result.stderr
