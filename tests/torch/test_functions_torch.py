"""Functions as jobs with torch: tensors are shared with the workers, results come back by value."""

import os
from importlib.util import find_spec

import pytest

from tests.conftest import PATIENCE
from tests.process.calling import Program

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]


@pytest.fixture
def caller(job):
    """A program that calls launch(), and what it starts."""
    return Program(job.home, mark=job.mark)


SHARED = """
import os, sys
import torch, ddplaunch
from tests.programs.functions import adds_one, inode_of

if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy(sys.argv[1])
    ours = torch.zeros(4).share_memory_()
    plain = torch.zeros(4)  # it is moved to shared memory on its way
    found = ddplaunch.launch(adds_one, (ours, plain[1:]), nproc_per_node=2)
    print("values", ours.tolist())
    print("same file", set(found) == {inode_of(ours)})
    print("plain", plain.tolist())
"""


@pytest.mark.slow  # the values of the other test are shared too
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_a_tensor_of_the_caller_is_the_same_memory_in_the_workers(strategy, caller):
    before = set(os.listdir("/dev/shm"))
    result = caller.run(caller.write(SHARED), strategy)
    assert result.out.splitlines() == ["values [1.0, 1.0, 0.0, 0.0]", "same file True", "plain [0.0, 1.0, 1.0, 0.0]"], (
        result.err
    )
    caller.nothing_left(10)  # torch's manager of shared memory ends when all have left it
    assert not {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} - before


EVERYTHING = """
import os
import torch, ddplaunch
import torch.distributed as dist

base = torch.zeros(1)

def shares(model, many):
    rank = int(os.environ["RANK"])
    with torch.no_grad():
        model.weight[rank] += 1
        many[rank].add_(1)
    dist.init_process_group("gloo")
    tensor = torch.ones(3).share_memory_() * (1 + rank)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return {"sum": tensor, "parameter": torch.nn.Parameter(tensor), "number": len(many)}

if __name__ == "__main__":
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    many = [torch.zeros(1) for _ in range(450)]
    forked = {"start_method": "forkserver", "preload": "torch.distributed"}
    found = ddplaunch.launch(shares, (model, many), nproc_per_node=2, **forked)
    print([(one["sum"].tolist(), one["sum"].is_shared(), type(one["parameter"]).__name__, one["number"]) for one in found])
    print(model.weight.tolist(), [one.item() for one in many[:3]])

    apart = torch.zeros(1)
    try:
        ddplaunch.launch(lambda: [base.add_(1), apart.add_(1), torch.empty(1, device="meta")], nproc_per_node=1)
    except TypeError as error:
        print(error)
    print(base.item(), apart.item())

    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for args in ((1, base.clone().requires_grad_() * 2), ([torch.ones(1) for _ in range(64)],)):
        try:
            ddplaunch.launch(print, args, nproc_per_node=2)
        except TypeError as error:
            print(error)
"""


def test_modules_and_results_and_what_cannot_be_sent(caller):
    pytest.importorskip("cloudpickle", reason="needs cloudpickle, of the extra `test`")
    result = caller.run(caller.write(EVERYTHING), timeout=2 * PATIENCE)  # torch is imported again and again
    found, shared, on_device, by_value, no_leaf, too_many = result.out.splitlines()
    assert found == str([([3.0, 3.0, 3.0], False, "Parameter", 450)] * 2)
    assert shared == "[[1.0, 1.0], [1.0, 1.0]] [1.0, 1.0, 0.0]"
    assert on_device == "the result holds a tensor on meta: return tensor.cpu()"
    assert by_value == "1.0 1.0"
    assert no_leaf.startswith("args[1] cannot be sent to workers: Cowardly refusing to serialize non-leaf tensor")
    assert "oo many open files" in too_many and "set_sharing_strategy('file_system')" in too_many
