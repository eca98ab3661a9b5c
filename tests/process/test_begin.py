"""Between the fork of the agent and its loop: what it imports comes slowly, as from a file server, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import ddplaunch

# an environment in which a module of ours is not read before the test opens the pipe for writing
SLOW = """
import os, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "ddplaunch.agent.loop":
            open(os.path.join(os.environ["DDP_TEST_DIR"], "imports"), "w").close()
            open(os.environ["SLOW_FILES"]).close()
        return None

sys.meta_path.insert(0, Slow())
"""


@pytest.fixture
def slow_files(tmp_path: Path) -> dict[str, str]:
    """The environment of a command whose agent waits in its imports, and which is installed in a folder of its own."""
    installed = tmp_path / "installed"
    shutil.copytree(Path(ddplaunch.__file__).parent, installed / "ddplaunch")
    (installed / "sitecustomize.py").write_text(SLOW)
    os.mkfifo(tmp_path / "slow")
    return {"PYTHONPATH": str(installed), "SLOW_FILES": str(tmp_path / "slow")}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_agent_imports_ends_the_command_at_once(job, slow_files, signum):
    process = job.start("--no-python", "true", env=slow_files)
    job.sign("imports")
    process.send_signal(signum)
    ended = job.wait()
    keys = " (Ctrl-C)" if signum == signal.SIGINT else ""
    printed = f"ddplaunch: stopped by {signum.name}{keys} before the workers were started\n"
    assert (ended.status, ended.out, ended.err) == (128 + signum, "", printed)
    job.nothing_left()
    assert not list((job.home / "state").rglob("*-*"))
    assert not os.listdir(job.home / "tmp")


def test_an_agent_whose_modules_were_removed_meanwhile_says_so(job, slow_files):
    job.start("--no-python", "true", env=slow_files)
    job.sign("imports")
    shutil.rmtree(slow_files["PYTHONPATH"])
    Path(slow_files["SLOW_FILES"]).open("w").close()
    ended = job.wait()
    assert ended.status == 126
    assert ended.err == (
        "error: ddplaunch cannot start: ImportError: cannot import name 'loop' from 'ddplaunch.agent' "
        f"({slow_files['PYTHONPATH']}/ddplaunch/agent/__init__.py)\n\n"
        "hint: its files are gone, or were changed after the command began, as by an upgrade: run it again\n"
    )
    job.nothing_left()
    assert not os.listdir(job.home / "tmp")
