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
ALL_IMAGES = 1797  # the more there are, the further the first GPU is ahead


def output(tmp_path: Path, *flags: str) -> str:
    """What the example prints in a job with these flags."""
    path = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path)}
    example = REPOSITORY / "examples" / "from_data_parallel.py"
    argv = [sys.executable, "-m", "ddplaunch", *flags, str(example), "--batch-size", str(ALL_IMAGES)]
    ended = run(argv, env=env, text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def numbers(text: str, before: str, after: str) -> list[float]:
    """The numbers between two texts of one line."""
    found = re.search(f"{re.escape(before)}(.+){re.escape(after)}", text)
    assert found is not None, text
    return [float(number) for number in found[1].split()]


def test_the_first_gpu_of_data_parallel_holds_the_most_and_those_of_ddp_hold_the_same(tmp_path, uuids):
    if len(uuids) < 2:
        pytest.skip("needs two GPUs")
    text = output(tmp_path, "--nproc-per-node", "2", "--pin", "device")
    first, *others = numbers(text, f"DataParallel on {len(uuids)} GPUs: at most ", " MiB on each")
    assert first > max(others)
    one, other = numbers(text, "DDP: at most ", " MiB in each worker")
    assert abs(one - other) < 0.1 * one


def test_two_workers_on_one_gpu_give_what_data_parallel_gives(tmp_path: Path, uuids: list[str]) -> None:
    text = output(tmp_path, "--nproc-per-node", "2", "--devices", uuids[0])
    assert "DataParallel and DDP on 2 workers: same outputs, same gradient, same checkpoints" in text
