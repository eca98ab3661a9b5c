"""Functions as jobs with tensors on a GPU: shared by the workers, refused as results."""

import pytest

from tests.process.calling import Program

SCRIPT = """
import torch, ddplaunch

def adds_one(tensor):
    tensor += 1
    torch.cuda.synchronize()
    return tensor.device.type

def on_device():
    return torch.ones(1, device="cuda")

if __name__ == "__main__":
    ours = torch.zeros(3, device="cuda:0")
    print(ddplaunch.launch(adds_one, (ours,), nproc_per_node=1), ours.tolist())
    try:
        ddplaunch.launch(on_device, nproc_per_node=1)
    except TypeError as error:
        print(error)
"""


@pytest.mark.claim(
    "tensors on the GPU of the caller of launch() are shared with the workers, and refused as results",
    page="guides/functions.md",
)
@pytest.mark.gpu
@pytest.mark.usefixtures("hardware")
def test_a_tensor_on_a_gpu_is_shared_and_no_result(job):
    caller = Program(job.home, mark=job.mark)
    result = caller.run(caller.write(SCRIPT))
    first, second = result.out.splitlines()
    assert first == "['cuda'] [1.0, 1.0, 1.0]", result.err
    assert second == "the result holds a tensor on cuda:0: return tensor.cpu()"
    caller.nothing_left()
