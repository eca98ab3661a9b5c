"""Writes down which GPU this worker ended up on: PLACES/RANK.json."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_place() -> None:
    """Use the GPU that `cuda` means here, then tell which it is and where this process has contexts."""
    import torch

    tensor = torch.ones(1, device="cuda") + 1
    torch.cuda.synchronize()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    place = {
        "current": torch.cuda.current_device(),
        "uuid": f"GPU-{properties[tensor.device.index].uuid}",
        "contexts": [
            f"GPU-{found.uuid}" for index, found in enumerate(properties) if torch._C._cuda_hasPrimaryContext(index)
        ],
        "device": os.environ["DDPLAUNCH_DEVICE"],
    }
    Path(os.environ["PLACES"], f"{os.environ['RANK']}.json").write_text(json.dumps(place))
