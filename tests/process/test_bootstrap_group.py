"""The process group that a program has left: destroyed when it ends well, and only then, and never waited for long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("DDP_TEST_PYTHON", sys.executable)  # the worker's interpreter; it may be older than ours

# 3.12.0 and 3.12.1 start no thread at the end, in which the destruction could be left behind (python/cpython#113964)
DESTROYED = [] if sys.version_info[:2] == (3, 12) and sys.version_info < (3, 12, 2) else ["destroyed"]

# as much of torch as the bootstrap knows of
TORCH = """
initialized = True
def is_initialized(): return initialized
def destroy_process_group():
    global initialized
    initialized = False
    print("destroyed", flush=True)
"""
BEFORE = "import torch.distributed, atexit, os, sys, threading\n"


def run(folder: Path, source: str) -> tuple[int, list[str]]:
    """The exit status of the program, and what it printed."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "distributed.py").write_text(TORCH)
    (folder / "program.py").write_text(BEFORE + source)
    command = [PYTHON, str(ROOT / "ddplaunch" / "worker" / "bootstrap.py"), "script", str(folder / "program.py")]
    env = {**os.environ, "MASTER_PORT": "29500"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PATIENCE, check=False
    )
    return done.returncode, done.stdout.decode().splitlines()


@pytest.mark.parametrize("end", ["pass", "sys.exit()", "sys.exit(0)", "1 if os.fork() else sys.exit()\nos.wait()"])
def test_after_a_good_end_it_is_destroyed_once(tmp_path: Path, end: str) -> None:
    assert run(tmp_path, end) == (0, DESTROYED)


@pytest.mark.parametrize(
    "end", ["sys.exit(1)", "raise ValueError", "torch.distributed.destroy_process_group(); sys.exit(1)"]
)
def test_after_a_failure_torch_is_left_alone(tmp_path: Path, end: str) -> None:
    status, printed = run(tmp_path, end)
    assert (status, len(printed)) == (1, end.count("destroy"))


def test_the_programs_own_functions_and_threads_come_first(tmp_path: Path) -> None:
    source = """
go = threading.Event()
def work():
    go.wait()
    print("thread", torch.distributed.is_initialized(), flush=True)
threading.Thread(target=work).start()
atexit.register(lambda: print("atexit", torch.distributed.is_initialized(), flush=True))
go.set()
"""
    assert run(tmp_path, source) == (0, ["thread True", "atexit True", *DESTROYED])


def test_a_thread_of_gloo_that_still_needs_the_gil_gets_it(tmp_path: Path) -> None:
    source = """
import ctypes, hashlib, time
time.monotonic = float  # on a busy machine it may compute for longer than is waited
torch.distributed.destroy_process_group()
computes = threading.Event()
def release():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
    computes.set()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 300_000)  # without the GIL
    print("released", flush=True)
threading.Thread(target=release, daemon=True).start()
computes.wait()
"""
    assert run(tmp_path, source)[1] == ["destroyed", "released"]


@pytest.mark.parametrize("broken", ["threading.Event().wait", "lambda: 1 / 0"])
def test_a_group_that_cannot_be_destroyed_spoils_no_good_end(tmp_path: Path, broken: str) -> None:
    assert run(tmp_path, f"torch.distributed.destroy_process_group = {broken}") == (0, [])
