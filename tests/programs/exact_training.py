"""A training over gloo whose result does not depend on how many workers do it, to the last bit.

`exact_training.py STEPS [ddp] [slow]` saves a checkpoint in each step, and goes on from it if there is one. It puts up with
how many workers as world-GENERATION, and what the weights have become as weights-RANK. Before the last step rank 0 waits for
the sign `go`, and in it all others for rank 0. Every number is a multiple of 2^-16 and small: sums of them are exact, in
whatever order they are made. With `ddp` it is DistributedDataParallel that sums, which costs a second to import. With `slow`
each step takes 50 ms more.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from signs import FOLDER, RANK, WORLD_SIZE, put, wait

STEPS = int(sys.argv[1])
GENERATION = os.environ["TORCHELASTIC_RESTART_COUNT"]
CHECKPOINT = os.path.join(FOLDER, "checkpoint")
FINE = 2.0**16


def distributed(network):
    """Have gradients added up by DistributedDataParallel, which would take their mean, a number that may be rounded."""
    model = torch.nn.parallel.DistributedDataParallel(network)
    model.register_comm_hook(None, lambda _, bucket: summed(bucket.buffer()))
    return model


def summed(numbers):
    return dist.all_reduce(numbers, async_op=True).get_future().then(lambda done: done.value()[0])


def save(step, network):
    torch.save({"step": step, "weights": network.state_dict()}, CHECKPOINT + ".new")
    os.rename(CHECKPOINT + ".new", CHECKPOINT)


dist.init_process_group("gloo")
dice = torch.Generator().manual_seed(7)
inputs = torch.randint(-4, 5, (48, 6), generator=dice).double()
targets = inputs @ torch.randint(-4, 5, (6, 1), generator=dice).double()

network = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(network.weight)
begin = 0
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT)
    network.load_state_dict(saved["weights"])
    begin = saved["step"]
put(f"from-{GENERATION}-{RANK}", begin)
dist.barrier()  # nobody saves before all have read
if RANK == 0:
    put(f"world-{GENERATION}", WORLD_SIZE)

model = distributed(network) if "ddp" in sys.argv else network
for step in range(begin, STEPS):
    if step == STEPS - 1:
        put(f"waiting-{GENERATION}-{RANK}")
        if RANK == 0:
            wait("go")
    if "slow" in sys.argv:
        time.sleep(0.05)
    model.zero_grad()
    mine = slice(RANK, None, WORLD_SIZE)
    (0.5 * (model(inputs[mine]) - targets[mine]) ** 2).sum().backward()
    gradient = network.weight.grad
    if model is network:
        summed(gradient).wait()
    with torch.no_grad():
        network.weight -= torch.round(gradient * 2.0**-9 * FINE) / FINE
    if RANK == 0:
        save(step + 1, network)

loss = (0.5 * (network(inputs) - targets) ** 2).sum().item()
put(f"weights-{RANK}", f"{network.weight.detach().numpy().tobytes().hex()} loss {loss:g}")
dist.destroy_process_group()
