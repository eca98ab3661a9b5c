"""The worker of `ddplaunch doctor`: joins a group of two, uses its GPU if there is one, and times all_reduce over each backend.

Prints one JSON object a line for each step that is done, from rank 0; the last line says how far it came.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

_SMALL, _LARGE = 1 << 20, 1 << 24  # bytes
_QUICK = 0.05  # seconds: where the small tensor takes longer, the large one would take too long
_TIMEOUT = timedelta(seconds=6)


def main() -> None:
    """Import torch, use the GPU, join the group and time each backend; print a line after each of these steps."""
    began = time.monotonic()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _say(at="no torch")
        return
    import torch.distributed as dist

    _say(at="imported", seconds=time.monotonic() - began)
    has_gpus = torch.cuda.is_available()
    device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}" if has_gpus else "cpu"
    if has_gpus:
        torch.cuda.set_device(device)
        torch.ones(8, device=device).sum().item()  # fails where torch has no code for this GPU
        _say(at="gpu")
    with_nccl = has_gpus and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_nccl else "gloo", timeout=_TIMEOUT)
    _say(at="joined", seconds=time.monotonic() - began)
    _say(at="gloo", **_measure(torch, dist, "cpu"))
    if with_nccl:
        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        _say(at="nccl", version=".".join(map(str, version)), **_measure(torch, dist, device))
    dist.destroy_process_group()
    _say(at="end")


def _measure(torch: Any, dist: Any, device: str) -> dict[str, float]:
    """Return the latency of the smallest all_reduce in seconds (median), and the bandwidth of a large one in bytes per second."""
    one = torch.ones(1, device=device)
    for _ in range(5):  # the first ones make connections
        _timed(torch, dist, one)
    latency = sorted(_timed(torch, dist, one) for _ in range(20))[10]
    small = torch.ones(_SMALL // 4, device=device)  # float32
    _timed(torch, dist, small)
    # the slowest rank's time, so that all ranks decide for the same tensor
    slowest = torch.tensor([_timed(torch, dist, small)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    tensor = torch.ones(_LARGE // 4, device=device) if slowest.item() < _QUICK else small
    seconds = min(_timed(torch, dist, tensor) for _ in range(3))
    return {"latency": latency, "bandwidth": tensor.numel() * 4 / seconds}


def _timed(torch: Any, dist: Any, tensor: Any) -> float:
    began = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _say(**facts: Any) -> None:
    if os.environ.get("RANK") == "0":
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
