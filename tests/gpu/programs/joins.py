"""A script that joins the job with what ddplaunch offers, and stops by agreement; writes down what it found: PLACES/RANK.json."""

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import ddplaunch

with ddplaunch.init_process_group():
    rank = dist.get_rank()
    total = torch.tensor([10.0**rank], device=ddplaunch.device())
    dist.all_reduce(total)
    beside = dist.new_group(backend="gloo")  # as should_stop() makes it, which needs none if there is but one worker
    flag = torch.tensor([rank])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=beside)
    calls = 1
    while not ddplaunch.should_stop():
        calls += 1
        if rank == 0 and calls == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
    facts = {
        "backend": dist.get_backend(),
        "device": str(ddplaunch.device()),
        "current": torch.cuda.current_device(),
        "total": total.item(),
        "highest": flag.item(),
        "calls": calls,
    }
Path(os.environ["PLACES"], f"{rank}.json").write_text(json.dumps(facts))
