"""What is said about a program that cannot be run, before anything starts."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from ddplaunch.spec.job import Program, ProgramKind
from ddplaunch.spec.program import check
from ddplaunch.system.errors import LaunchError
from tests.capabilities import bound_by_modes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, a directory, a package, a program and a file that is none; the current one."""
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text("pass\n")
    (tmp_path / "scripts" / "main.py").write_text("pass\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("pass\n")
    (tmp_path / "dangling.py").symlink_to("gone.py")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bin").mkdir()
    for name, mode in (("tool", 0o755), ("notes", 0o644)):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(mode)
    for name, member in (("good.zip", "__main__.py"), ("bad.zip", "other.py")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, "pass\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(kind: ProgramKind, target: str, python: str | None = None) -> Program:
    return Program(kind=kind, target=target, python=python)


def said(one: Program, path: str | None = "bin") -> tuple[int, str]:
    with pytest.raises(LaunchError) as caught:
        check(one, path)
    return caught.value.status, caught.value.render()


RUNNABLE = [
    (ProgramKind.SCRIPT, "train.py"),
    (ProgramKind.SCRIPT, "./scripts/../train.py"),
    (ProgramKind.SCRIPT, "app"),
    (ProgramKind.SCRIPT, "good.zip"),
    (ProgramKind.COMMAND, "tool"),
    (ProgramKind.COMMAND, "bin/tool"),
    (ProgramKind.MODULE, "app"),
    (ProgramKind.MODULE, "train"),
    (ProgramKind.MODULE, "json.tool"),
    (ProgramKind.MODULE, "sys"),
]


@pytest.mark.parametrize(("kind", "target"), RUNNABLE)
def test_what_can_be_run_passes(kind: ProgramKind, target: str) -> None:
    check(program(kind, target), "bin")


SCRIPTS = [
    ("trian.py", "trian.py does not exist\n\nhint: did you mean `train.py`?"),
    ("scripts/mian.py", "scripts/mian.py does not exist\n\nhint: did you mean `scripts/main.py`?"),
    ("nowhere/x.py", "nowhere/x.py does not exist\n\nhint: the folder nowhere does not exist"),
    ("train.py/x.py", "train.py/x.py does not exist\n\nhint: the folder train.py does not exist"),
    ("json.tool", "json.tool does not exist\n\nhint: to run a module, type `ddplaunch -m json.tool`"),
    (
        "tool",
        "tool does not exist\n\nhint: to run a command that is no Python script, type `ddplaunch --no-python tool ...`",
    ),
    ("unlike", "unlike does not exist\n\nhint: looked in {folder}"),
    ("/unlike", "/unlike does not exist"),
    ("dangling.py", "dangling.py is a link to gone.py, which does not exist"),
    ("scripts", "scripts is a directory without __main__.py\n\nhint: name the script in it, such as scripts/main.py"),
    ("empty", "empty is a directory without __main__.py\n\nhint: python runs a directory by the __main__.py in it"),
    ("bad.zip", "bad.zip is a zip file without __main__.py\n\nhint: python runs a zip file by the __main__.py in it"),
    ("pipe", "pipe is not a file that every worker can read from its beginning\n\nhint: write it to a file"),
    ("-", "a script cannot come from standard input: every worker would need all of it\n\nhint: write it to a file"),
    ("", "the name of the script is empty\n\nhint: a variable of the shell that is not set leaves an empty name"),
    ("a" * 300, "cannot read " + "a" * 300 + ": file name too long"),
    ("a\0b", "cannot read a\\x00b: embedded null byte"),
]


@pytest.mark.parametrize(("target", "text"), SCRIPTS)
def test_a_script_that_cannot_be_run(folder: Path, target: str, text: str) -> None:
    assert said(program(ProgramKind.SCRIPT, target)) == (2, f"error: {text.format(folder=folder)}\n")


def test_a_script_that_cannot_be_read(folder: Path) -> None:
    (folder / "train.py").chmod(0)
    with bound_by_modes():
        assert said(program(ProgramKind.SCRIPT, "train.py")) == (2, "error: cannot read train.py: permission denied\n")


COMMANDS = [
    ("nosuch", 127, "nosuch was not found on PATH"),
    ("train.py", 127, "train.py was not found on PATH\n\nhint: leave --no-python out"),
    ("./nosuch", 127, "./nosuch does not exist"),
    ("", 127, "a command without a name was not found on PATH"),
    ("notes", 126, "bin/notes is not executable\n\nhint: type `chmod +x bin/notes`"),
    ("./train.py", 126, "./train.py is not executable\n\nhint: type `chmod +x ./train.py`; or leave --no-python out"),
    ("./scripts", 126, "./scripts is a directory"),
    ("./dangling.py", 126, "./dangling.py is a link to a missing file"),
]


@pytest.mark.parametrize(("target", "status", "text"), COMMANDS)
def test_a_command_that_cannot_be_run(target: str, status: int, text: str) -> None:
    assert said(program(ProgramKind.COMMAND, target)) == (status, f"error: {text}\n")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"#!/bin/sh\r\n", "./it has the line ends of Windows\n\nhint: type `sed -i 's/\\r$//' ./it`"),
        (b"#!/usr/bin/env sh\r\n", "./it has the line ends of Windows\n\nhint: type `sed -i 's/\\r$//' ./it`"),
        (b"#! /no/such -x\n", "/no/such, named in the first line of ./it, does not exist"),
        (b"#!/no/\xff", "/no/\udcff, named in the first line of ./it, does not exist"),
    ],
)
def test_a_command_whose_interpreter_is_missing_says_so(folder: Path, content: bytes, text: str) -> None:
    (folder / "it").write_bytes(content)
    (folder / "it").chmod(0o755)
    assert said(program(ProgramKind.COMMAND, "./it")) == (127, f"error: {text}\n")


@pytest.mark.parametrize("content", [b"", b"#!", b"#!\n", b"#!/bin/sh", b"\x7fELF" + bytes(300)])
def test_a_command_whose_first_line_names_no_missing_interpreter_passes(folder: Path, content: bytes) -> None:
    (folder / "it").write_bytes(content)
    (folder / "it").chmod(0o755)
    check(program(ProgramKind.COMMAND, "./it"), None)


def test_in_a_folder_that_was_removed_the_shell_has_to_enter_it_again(folder: Path) -> None:
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()
    text = 'error: x.py does not exist\n\nhint: the folder of this shell was removed: type `cd "$PWD"` first\n'
    assert said(program(ProgramKind.SCRIPT, "x.py")) == (2, text)


MODULES = [
    ("train.py", "-m train.py: this is a file\n\nhint: type `-m train`, or leave -m out to run a file"),
    (
        "scripts/main.py",
        "-m scripts/main.py: a module has a dotted name\n\nhint: type `-m scripts.main`, or leave -m out to run a file",
    ),
    ("a-b", "-m a-b: a module has a dotted name"),
]


@pytest.mark.parametrize(("target", "text"), MODULES)
def test_a_module_that_cannot_be_run(target: str, text: str) -> None:
    assert said(program(ProgramKind.MODULE, target)) == (2, f"error: {text}\n")


def test_a_module_that_nobody_finds(folder: Path) -> None:
    status, text = said(program(ProgramKind.MODULE, "nosuch.train"))
    assert status == 2
    assert text.startswith(f"error: -m nosuch.train: there is no module nosuch in {folder} or installed for ")


def test_a_module_for_another_interpreter_is_not_looked_for(folder: Path) -> None:
    check(program(ProgramKind.MODULE, "nosuch.train", python=str(folder / "bin" / "tool")), "")


def test_the_interpreter_is_looked_for() -> None:
    assert said(program(ProgramKind.SCRIPT, "train.py", python="python9")) == (
        127,
        "error: python9 was not found on PATH\n\nhint: --python takes a path, or a name on PATH\n",
    )
    assert said(program(ProgramKind.SCRIPT, "train.py", python="notes"))[0] == 126


OTHERS = [
    ("a.ipynb", b'{"cells": []}', "notebook", "jupyter nbconvert --to script a.ipynb"),
    ("c.yaml", b"lr: 1", "configuration file", "ddplaunch train.py c.yaml"),
    ("run.sh", b"python train.py", "shell script", "bash run.sh"),
    ("run", b"#!/usr/bin/env bash\necho", "shell script", "ddplaunch --no-python bash run"),
    ("job", b"#!/bin/bash\n#SBATCH --nodes=2\n", "batch script", "sbatch job"),
    ("a.out", b"\x7fELF\x02\x01", "binary file", "ddplaunch --no-python ./a.out"),
    ("model.bin", b"\1\0\0\0\0", "binary file", "ddplaunch --no-python ./model.bin"),
]


@pytest.mark.parametrize(("name", "content", "kind", "command"), OTHERS)
def test_a_file_that_is_no_python_is_named_for_what_it_is(folder, name, content, kind, command):
    (folder / name).write_bytes(content)
    status, text = said(program(ProgramKind.SCRIPT, name))
    assert status == 2
    assert text.startswith(f"error: {name} is a {kind}, not a Python script\n")
    assert f"`{command}`" in text


@pytest.mark.parametrize("python", [None, sys.executable])
def test_text_that_python_cannot_compile_is_no_script_but_for_another_python(folder: Path, python: str | None) -> None:
    (folder / "README").write_text("How to train\n")
    (folder / "script").write_text("#!/usr/bin/env python\nprint('a \\d')\n")
    check(program(ProgramKind.SCRIPT, "script", python), "bin")
    one = program(ProgramKind.SCRIPT, "README", python)
    if python:
        check(one, "bin")
    else:
        assert said(one)[1].startswith("error: README is not a Python script: line 1: invalid syntax\n")


def test_a_script_of_the_same_name_is_meant(folder: Path) -> None:
    assert said(program(ProgramKind.SCRIPT, "train.sh"))[1].endswith("hint: did you mean `train.py`?\n")
    assert said(program(ProgramKind.SCRIPT, "scripts/main"))[1].endswith("hint: did you mean `scripts/main.py`?\n")
