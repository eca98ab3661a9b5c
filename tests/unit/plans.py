"""Plans of one node to test with: a test names what it is about."""

from typing import Any

from ddplaunch.plan import Plan, Seat, WorkerPlan


def plan_of(*workers: WorkerPlan, **fields: Any) -> Plan:
    """The plan of a job with these workers."""
    values: dict[str, Any] = {
        "run_id": "run-1",
        "cluster": "local",
        "nnodes": 1,
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": None,
        "init_method": "env",
        "backend": "gloo",
        "pin": "device",
        "interpreter": "python",
        "workers": workers,
        "seats": (Seat(workers[0].host, len(workers)),),
        **fields,
    }
    return Plan(**values)
