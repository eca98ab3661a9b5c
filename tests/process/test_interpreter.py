"""The interpreter of the workers where ddplaunch is installed as a tool, with real environments."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import Job

PACKAGE = Path(__file__).resolve().parents[2]


def environment(folder: Path) -> Path:
    """A real virtual environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """An environment as `uv tool install ddplaunch` makes it, with the packages of this one."""
    folder = environment(tmp_path / "tool")
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "ddplaunch.pth").write_text(f"{PACKAGE}\n{sysconfig.get_path('purelib')}\n")
    (folder / "uv-receipt.toml").touch()
    return folder


def test_a_tool_runs_the_script_in_the_activated_environment_and_plan_says_why(job: Job, tool: Path, tmp_path: Path):
    theirs = environment(tmp_path / "project")
    (tmp_path / "where.py").write_text("import sys; print(sys.prefix)")
    job.command = [str(tool / "bin" / "python"), "-P", "-m", "ddplaunch"]
    activated = {"VIRTUAL_ENV": str(theirs)}
    result = job.run("--nproc-per-node", 2, tmp_path / "where.py", env=activated)
    assert (result.status, sorted(result.out.split())) == (0, sorted(["[0]", "[1]", str(theirs), str(theirs)]))
    row = f"python {theirs}/bin/python VIRTUAL_ENV, since ddplaunch is a tool of uv"
    plan = job.run("plan", tmp_path / "where.py", env=activated).out  # sentences are broken at 80 columns
    assert row in " ".join(plan.split())
