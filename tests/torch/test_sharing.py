"""--sharing-strategy is what torch.multiprocessing uses in every worker."""

from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

SHARES = """
import torch
from torch import multiprocessing

def double(tensor):
    tensor *= 2

if __name__ == "__main__":
    tensor = torch.ones(3).share_memory_()
    child = multiprocessing.get_context("fork").Process(target=double, args=(tensor,))
    child.start()
    child.join()
    print(multiprocessing.get_sharing_strategy(), tensor.tolist())
"""


@pytest.mark.parametrize("strategy", [pytest.param("file_descriptor", marks=pytest.mark.slow), "file_system"])
def test_workers_share_tensors_in_the_way_that_was_asked_for(job, tmp_path, strategy):
    (tmp_path / "shares.py").write_text(SHARES)
    result = job.run("--nproc-per-node", 1, "--sharing-strategy", strategy, tmp_path / "shares.py").expect(0)
    assert result.out == f"{strategy} [2.0, 2.0, 2.0]\n"
