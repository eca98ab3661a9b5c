"""Trains for as many steps as the second argument says, and with a third waits for a sign before the last ones. The first:

"plain" trains; "hook" spends its steps in a hook below `backward`; "profiles" runs torch's profiler itself. With "profiled" for
the third, step 8 comes once torch's profiler runs.
"""

import sys
import time
import zlib

import torch
from signs import RANK, put, wait
from torch.nn.parallel import DistributedDataParallel

how, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def late(gradient):
    """Take a while, as rank 1 does in all ways."""
    time.sleep(0.05 if RANK else 0.02)
    return gradient


if how == "hook":
    model.module.weight.register_hook(late)
own = torch.autograd.profiler.profile(use_kineto=True)
if how == "profiles":
    own.__enter__()
losses = []
for step in range(steps):
    if step == 4:
        put(f"ready-{RANK}")
    if step == 8 and sys.argv[3:4] == ["profiled"]:
        while not torch.autograd._profiler_enabled():  # on a busy machine the command comes late
            time.sleep(0.01)
    if step == steps - 4 and sys.argv[3:]:
        wait("enough")
    if how != "hook" and step > 4:
        late(None)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if how == "profiles":
    own.__exit__(None, None, None)
print("digest", zlib.crc32(repr(losses).encode()))
