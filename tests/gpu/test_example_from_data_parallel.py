"""The example that leads from DataParallel to DDP, on real GPUs, where DataParallel does something."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from subprocess import run

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"),
]

REPOSITORY = Path(__file__).parents[2]


def output(tmp_path: Path, *flags: str) -> str:
    """What the example prints in a job with these flags."""
    path = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path)}
    example = REPOSITORY / "examples" / "from_data_parallel.py"
    argv = [sys.executable, "-m", "ddplaunch", *flags, str(example)]
    ended = run(argv, env=env, text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.claim("DataParallel and two DDP workers come to the same loss", page="examples/train_ddp.md")
@pytest.mark.parametrize("gpus", [1, 2])
def test_two_workers_give_what_data_parallel_gives(tmp_path: Path, uuids: list[str], gpus: int) -> None:
    if len(uuids) < gpus:
        pytest.skip("needs two GPUs")
    devices = ["--devices", uuids[0]] if gpus == 1 else ["--pin", "device"]
    text = output(tmp_path, "--nproc-per-node", "2", *devices)
    [loss] = re.findall(r"DataParallel +loss (.*)", text)
    assert re.search(rf"DDP, weighted +loss {re.escape(loss)}, gradient off by 0.0%", text)
