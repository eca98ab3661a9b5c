"""The example with a network on two devices, on real GPUs."""

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


def test_a_network_on_two_gpus_has_the_weights_of_the_uncut_one(tmp_path: Path, uuids: list[str]) -> None:
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
    assert len(re.findall("nccl, lower half on cuda:0, upper half on cuda:1", ended.stdout)) == workers
    assert "from those of one process with the uncut network" in ended.stdout
