"""What is said of the workers' interpreter and of the packages around torch."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.system.process.command import Ended
from ddplaunch.tools.doctor import Subject, Verdict
from ddplaunch.tools.doctor.interpreter import Inspection, Interpreter, Package, judge, parse, read, release, satisfies
from tests import verdicts

TORCH = Package(version="2.13.0+cpu", path="/env/lib/python3.11/site-packages")
PYTHON = Interpreter(version="3.11.7", prefix="/env", packages={"torch": TORCH})


def found(python: Interpreter) -> list[tuple[str, str]]:
    return verdicts.found(judge(Inspection(path="/env/bin/python", found=python)))


def test_an_interpreter_with_torch_has_no_finding():
    assert found(PYTHON) == []


def test_one_without_torch_or_that_does_not_run_breaks_a_job():
    assert found(replace(PYTHON, packages={})) == [("broken", "the interpreter of the workers has no torch")]
    (finding,) = judge(Inspection(path="/env/bin/python", problem="exit status 127")).findings
    assert (finding.severity, finding.evidence) == ("broken", "/env/bin/python: exit status 127")
    (late,) = judge(parse("python", Ended(status=None))).findings
    assert (late.severity, late.title) == ("slow", "the interpreter of the workers is slow to start")


def test_a_torch_that_is_old_or_from_elsewhere_is_noted():
    old = replace(PYTHON, packages={"torch": replace(TORCH, version="2.3.1")})
    assert found(old) == [("note", "torch 2.3.1 is older than any that ddplaunch is tested with")]
    elsewhere = replace(PYTHON, packages={"torch": replace(TORCH, path="/env2/lib")})
    assert found(elsewhere) == [("note", "torch comes from outside of the interpreter's environment")]


@pytest.mark.parametrize(
    ("needs", "fits"),
    [
        ("torch<4.0,>=2.1.0", True),
        ("torch (==2.3.1)", False),
        ("torch==2.3.1; extra == 'dev'", True),  # nobody may have asked for that extra
        ("torchmetrics<0.1", True),
        ("torch", True),
    ],
)
def test_a_package_for_another_torch_is_noted(needs, fits):
    package = Package(version="1.0", path=TORCH.path, needs=(needs,))
    titles = [title for _, title in found(replace(PYTHON, packages={"torch": TORCH, "lightning": package}))]
    assert titles == ([] if fits else ["lightning 1.0 is made for another torch than 2.13.0+cpu"])


@pytest.mark.parametrize(
    ("specifiers", "fits"),
    [
        (">=2.13", True), ("<=2.13", True), ("<2.13", False), (">2.13.0", False), ("==2.13.*", True), ("==2.1.*", False),
        ("!=2.13.0", False), ("~=2.4", True), ("~=2.4.0", False), ("~=2.14", False), ("===weird", True), ("", True),
    ],
)  # fmt: skip
def test_specifiers_are_read_as_pip_reads_them(specifiers, fits):
    assert satisfies("2.13.0+cpu", specifiers) is fits


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_version_and_no_requirement_is_an_error(version, specifiers):
    satisfies(version, specifiers)
    assert all(number >= 0 for number in release(version))


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        (Ended(status=127, err="a\ncannot open shared object\n"), "exit status 127: cannot open shared object"),
        (Ended(status=None), "no answer in 5 s"),
        (Ended(status=0, out="[" * 3000), "it prints something else than it was asked for"),
    ],
)
def test_an_interpreter_that_does_not_answer_says_why(ended, problem):
    assert parse("python", ended).problem == problem


def test_our_own_interpreter_answers():
    asked = read(Subject(env={**os.environ}, python=sys.executable))
    assert asked.found is not None
    assert asked.found.packages["torch"].version


def test_a_program_that_is_no_interpreter_is_named(tmp_path: Path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    script.chmod(0o755)
    asked = read(Subject(env={**os.environ}, python=str(script)))
    assert asked.problem == "exit status 3: broken"
    assert isinstance(judge(asked), Verdict)
