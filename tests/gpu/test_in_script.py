"""What `import ddplaunch` offers a script, on real GPUs: NCCL on the worker's own, and gloo beside it to agree on the end."""

import json
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "programs" / "joins.py"


@pytest.mark.claim(
    "init_process_group(), device() and should_stop() with NCCL, under ddplaunch and torchrun",
    page="guides/in-the-script.md",
)
@pytest.mark.parametrize("launcher", ["ddplaunch", "torch.distributed.run"])
def test_workers_join_by_nccl_on_their_own_gpus_and_stop_together(tmp_path, uuids, launcher):
    path = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "PLACES": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    argv = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(len(uuids)), str(SCRIPT)]
    ended = run(argv, env=env, text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(uuids))]
    for rank, facts in enumerate(told):
        assert (facts["backend"], facts["device"], facts["current"]) == ("nccl", f"cuda:{rank}", rank)
        assert facts["total"] == float("1" * len(uuids))
        assert facts["highest"] == len(uuids) - 1
        assert facts["calls"] == told[0]["calls"] >= 5
