"""The plan as plain data: what plan.json holds and `ddplaunch plan --json` prints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddplaunch.plan import Plan


def plan_data(plan: Plan, origins: Mapping[str, str]) -> dict[str, Any]:
    """Give the plan as plain data; docs/reference/run-folder.md has its schema."""
    return {
        "v": 1,
        "run_id": plan.run_id,
        "cluster": plan.cluster,
        "nnodes": plan.nnodes,
        "world_size": plan.world_size,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "init_method": plan.init_method,
        "backend": plan.backend,
        "pin": plan.pin,
        "reasons": dict(plan.reasons),
        "origins": dict(origins),
        "notes": list(plan.notes),
        "workers": [
            {
                "rank": worker.rank,
                "local_rank": worker.local_rank,
                "node_rank": worker.node_rank,
                "host": worker.host,
                "device": worker.device,
                "devices": list(worker.devices),
                "cpus": list(worker.cpus),
                "argv": list(worker.argv),
                "variables": plan.shown(worker.variables),
            }
            for worker in plan.workers
        ],
    }
