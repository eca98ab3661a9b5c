"""What VS Code needs to connect to workers that wait for it, in the form of its launch.json. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ddplaunch.system.words import compress

HOST = "127.0.0.1"


def announcement(ports: Mapping[int, int]) -> str:
    """Say who waits, and give the file for it; `ports` are those of debugpy, by rank."""
    who = f"rank {compress(list(ports))} waits" if len(ports) == 1 else f"ranks {compress(list(ports))} wait"
    return (
        f"ddplaunch: {who} for a client of debugpy; for VS Code, this is .vscode/launch.json:\n{launch_json(ports)}\n"
    )


def launch_json(ports: Mapping[int, int]) -> str:
    """Write VS Code's launch.json: a configuration for each rank, and, for several ranks, one that attaches to all."""
    configurations = [
        {"name": f"rank {rank}", "type": "debugpy", "request": "attach", "connect": {"host": HOST, "port": port}}
        for rank, port in ports.items()
    ]
    data: dict[str, object] = {"version": "0.2.0", "configurations": configurations}
    if len(configurations) > 1:
        names = [configuration["name"] for configuration in configurations]
        data["compounds"] = [{"name": "all ranks", "configurations": names, "stopAll": False}]
    return json.dumps(data, indent=2)
