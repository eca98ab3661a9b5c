"""The example with a model on two devices, on real GPUs."""

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


@pytest.mark.claim(
    "with --gpus-per-worker 2 each worker trains a model on its own two GPUs",
    page="examples/memory_and_accumulation.md",
)
def test_each_worker_trains_on_its_own_two_gpus(tmp_path: Path, uuids: list[str]) -> None:
    workers = len(uuids) // 2
    if workers == 0:
        pytest.skip("needs two GPUs")
    workers = 2 if workers > 1 else 1  # 64 images are shared equally
    path = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path)}
    flags = ["--gpus-per-worker", "2", "--nproc-per-node", str(workers)]
    argv = [sys.executable, "-m", "ddplaunch", *flags, str(REPOSITORY / "examples" / "model_parallel.py")]
    ended = run(argv, env=env, text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall("lower half on cuda:0, upper half on cuda:1", ended.stdout)) == workers
    assert "epoch 10: loss 0." in ended.stdout
