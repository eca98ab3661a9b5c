"""Which interpreter runs the workers where nobody named one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.plan.devices.interpreter import with_chosen_interpreter
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.spec.options.resolve import received


def environment(folder: Path, name: str, *, torch: bool, receipt: str = "") -> str:
    """A virtual environment as far as it is read; return the path of its interpreter."""
    site = folder / name / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (folder / name / "pyvenv.cfg").write_text("version = 3.12.1\n")
    if torch:
        (site / "torch").mkdir()
        (site / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    if receipt:
        (folder / name / receipt).touch()
    python = folder / name / "bin" / "python"
    python.parent.mkdir()
    python.touch(mode=0o755)
    return str(python)


def spec(python: str | None = None, kind: ProgramKind = ProgramKind.SCRIPT) -> JobSpec:
    return JobSpec(program=Program(kind=kind, target="train.py", python=python))


def choose(folder: Path, own: str, env: dict[str, str], given: JobSpec | None = None) -> tuple[str | None, str]:
    found = with_chosen_interpreter(given or spec(), env, own=own, prefix=str(Path(own).parents[1]))
    # the agents on other hosts run the same, whatever is activated there
    assert received(found.given, [found.program.target], ()).program.python == found.program.python
    return found.program.python, found.origin("python")


@pytest.mark.parametrize(("receipt", "tool"), [("uv-receipt.toml", "uv"), ("pipx_metadata.json", "pipx")])
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_a_tool_of_uv_or_pipx_runs_workers_in_the_activated_environment(tmp_path, receipt, tool, variable):
    own = environment(tmp_path, "tool", torch=True, receipt=receipt)
    theirs = environment(tmp_path, "project", torch=False)
    env = {variable: str(tmp_path / "project"), "PATH": "/usr/bin"}
    assert choose(tmp_path, own, env) == (theirs, f"{variable}, since ddplaunch is a tool of {tool}")


def test_a_tool_takes_a_python_on_path_only_if_that_has_torch(tmp_path):
    own = environment(tmp_path, "tool", torch=True, receipt="uv-receipt.toml")
    without, with_torch = (environment(tmp_path, name, torch=name == "with") for name in ("without", "with"))
    assert choose(tmp_path, own, {"PATH": str(Path(without).parent)})[0] is None
    assert choose(tmp_path, own, {"PATH": str(Path(with_torch).parent)})[0] == with_torch


def test_where_ddplaunch_has_torch_its_own_interpreter_runs_the_workers_as_with_torchrun(tmp_path):
    own = environment(tmp_path, "own", torch=True)
    environment(tmp_path, "project", torch=True)
    assert choose(tmp_path, own, {"VIRTUAL_ENV": str(tmp_path / "project")})[0] is None


def test_where_only_the_activated_environment_has_torch_that_runs_them(tmp_path):
    own = environment(tmp_path, "own", torch=False)
    theirs = environment(tmp_path, "project", torch=True)
    found = choose(tmp_path, own, {"VIRTUAL_ENV": str(tmp_path / "project")})
    assert found == (theirs, f"VIRTUAL_ENV, since {own} has no torch")


def test_where_neither_has_torch_both_are_named(tmp_path):
    own = environment(tmp_path, "own", torch=False)
    theirs = environment(tmp_path, "project", torch=False)
    python, why = choose(tmp_path, own, {"VIRTUAL_ENV": str(tmp_path / "project")})
    assert python is None
    assert why == f"ddplaunch's own; neither it nor {theirs} (VIRTUAL_ENV) has torch"


@pytest.mark.parametrize(
    "given", [spec(python="/opt/python"), spec(kind=ProgramKind.COMMAND)], ids=["--python", "a command"]
)
def test_an_interpreter_that_was_named_and_a_command_stay_as_they_are(tmp_path, given):
    own = environment(tmp_path, "tool", torch=False, receipt="uv-receipt.toml")
    environment(tmp_path, "project", torch=True)
    env = {"VIRTUAL_ENV": str(tmp_path / "project")}
    assert with_chosen_interpreter(given, env, own=own, prefix=str(tmp_path / "tool")) == given


def test_an_activated_environment_that_is_gone_counts_for_nothing(tmp_path):
    own = environment(tmp_path, "tool", torch=True, receipt="uv-receipt.toml")
    assert choose(tmp_path, own, {"VIRTUAL_ENV": str(tmp_path / "removed"), "PATH": ""})[0] is None
