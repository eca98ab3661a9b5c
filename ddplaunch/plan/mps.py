"""What NVIDIA's MPS means for a plan: which workers share a GPU, and how much of it each may use. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ddplaunch.errors import LaunchError
from ddplaunch.plan.assign import Owned
from ddplaunch.spec import JobSpec

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def check(spec: JobSpec, owned: Owned, control: str | None, *, started_per_rank: bool) -> None:
    """Refuse what cannot work; `control` is the path of NVIDIA's command.

    Raises:
        LaunchError: there is no NVIDIA GPU, no such command, or no agent that serves all workers of the node.
    """
    asked = spec.origin("mps")
    if not all(own and own[0].kind == "cuda" for own in owned):
        raise LaunchError(f"{asked}: the workers have no NVIDIA GPU to share", hint="leave --mps out")
    if started_per_rank:
        raise LaunchError(
            f"{asked}: a command was started for each rank, but MPS needs one for the whole node",
            hint="start one command on each node, as `srun --ntasks-per-node=1 ddplaunch --workers-per-gpu 2 ...`",
        )
    if control is None:
        raise LaunchError(
            f"{asked}: nvidia-cuda-mps-control was not found on PATH",
            hint="it comes with NVIDIA's driver; in a container mount it, or leave --mps out",
        )


def shares(owned: Owned, caller: Mapping[str, str]) -> list[dict[str, str]]:
    """Return each worker the variable that limits its part of the GPU, unless the caller has set it.

    What the number limits: "Active Thread Percentage" in NVIDIA's documentation of MPS.
    """
    if SHARE in caller:
        return [{} for _ in owned]
    users = Counter(device for own in owned for device in own)
    return [{SHARE: str(max(1, 100 // max(users[device] for device in own)))} for own in owned]
