"""Completion as it is used: a shell of each kind, the line from the help, and the Tab key."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.conftest import PATIENCE

CTRL_A, ENTER, TAB = "\x01", "\r", "\t"
SHELLS = {
    "bash": ("--norc --noprofile -i", 'eval "$(ddplaunch completion bash)"', TAB * 2),  # the first Tab lists nothing
    "zsh": ("-f -i", 'autoload -Uz compinit && compinit -u; eval "$(ddplaunch completion zsh)"', TAB),
    "fish": ("--no-config -i", "ddplaunch completion fish | source", ""),
}


class Shell:
    """A shell that completes, in a folder with a script and a folder of logs."""

    def __init__(self, name: str, home: Path):
        options, start, self.lists = SHELLS[name]
        self.name = name
        (home / "bin").mkdir()
        command = home / "bin/ddplaunch"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ddplaunch "$@"\n')
        command.chmod(0o755)
        (home / "train.py").touch()
        (home / "profit.py").touch()
        (home / "logs").mkdir()
        (home / "lab").mkdir()
        (home / "lab/fit.py").touch()
        env = {"PATH": f"{home}/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
        self.child = pexpect.spawn(
            name, options.split(), env=env, cwd=str(home), encoding="utf-8", timeout=PATIENCE, dimensions=(40, 120)
        )
        self.child.delaybeforesend = None
        self.child.send(f"{start}; echo rea''dy{ENTER}")
        self.child.expect_exact("ready\r\n")

    def line_after(self, typed: str, *, keys: str = TAB) -> str:
        """What stands in the line after these keys; a shell takes the next only when it has completed."""
        self.child.send(f"{typed}{keys}{CTRL_A}echo l''ine {ENTER}")
        self.child.expect(r"\nline ([^\r\n]*)\r+\n")
        # zsh takes the / of a folder away at the end of a line
        return str(self.child.match.group(1)).strip().rstrip("/")

    def listed(self, typed: str) -> set[str]:
        """What is offered."""
        if self.name == "fish":  # what Tab shows there is drawn over the line, and gone with the next key
            self.child.send(f"complete -C '{typed}'; echo e''nd{ENTER}")
            self.child.expect(r"\nend\r\n")
        else:
            self.line_after(typed, keys=self.lists)
        return set(re.split(r"[\s()]+", str(self.child.before)))


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    if request.param != "bash" and not shutil.which(request.param):
        pytest.skip(f"there is no {request.param} on this machine")
    started = Shell(request.param, tmp_path)
    yield started
    started.child.close(force=True)


@pytest.mark.parametrize("shell", ["zsh"], indirect=True)  # bash sorts by itself, and `complete -C` in fish does
def test_runs_are_offered_with_the_newest_first_also_where_two_are_described_alike(
    shell: Shell, tmp_path: Path
) -> None:
    now, programs = time.time() - 86400, {"kkkk": "b.py", "wwww": "a:c.py", "zzzz": "b.py"}  # by name, the oldest first
    for number, (name, program) in enumerate(programs.items()):
        folder = tmp_path / f".local/state/ddplaunch/runs/20260101-00000{number}-{name}"
        folder.mkdir(parents=True)
        began = {
            "v": 1,
            "event": "job_started",
            "at": now + number,
            "mono": 1,
            "run_id": folder.name,
            "program": program,
        }
        (folder / "events.jsonl").write_text(json.dumps(began) + "\n")
    shell.line_after("ddplaunch logs ", keys=shell.lists)
    listed = re.findall(r"^(\w{4})  -- (.*?) began 24 h ago *$", shell.child.before.replace("\r", ""), re.MULTILINE)
    assert [one for one in listed if programs.get(one[0]) == one[1]] == [*programs.items()][::-1]
    assert shell.line_after("ddplaunch logs ww") == "ddplaunch logs wwww"


def test_tab_completes_verbs_files_options_and_values(shell: Shell) -> None:
    assert shell.listed("ddplaunch ") >= {"run", "plan", "submit", "completion", "train.py"}
    assert shell.listed("ddplaunch profi") >= {"profile", "profit.py"}  # a verb does not hide a script
    for typed, completed in [
        ("ddplaunch sub", "ddplaunch submit"),
        ("ddplaunch tr", "ddplaunch train.py"),
        ("ddplaunch plan --nproc-per-n", "ddplaunch plan --nproc-per-node"),
        ("ddplaunch --backend g", "ddplaunch --backend gloo"),
        ("ddplaunch --tee 3 --cluster=sl", "ddplaunch --tee 3 --cluster=slurm"),
        ("ddplaunch --log-dir=lo", "ddplaunch --log-dir=logs"),
        ("ddplaunch -m la", "ddplaunch -m lab"),
        ("ddplaunch -m lab.f", "ddplaunch -m lab.fit"),
        ("ddplaunch --devices c", "ddplaunch --devices cpu"),
        ("ddplaunch doctor --only shm,lim", "ddplaunch doctor --only shm,limits"),
    ]:
        assert shell.line_after(typed) == completed
