"""Folders of runs with the events that a test writes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddplaunch.record.trace import Entry, write

BEGAN = 1_795_000_000.0  # seconds since 1970


def event(mono: float, name: str, /, **fields: Any) -> dict[str, Any]:
    """Return an event at `mono` seconds after the start."""
    return {"v": 1, "event": name, "at": BEGAN + mono, "mono": 50.0 + mono, **fields}


def started(run_id: str = "20261124-120000-k7qx", host: str = "alpha", program: str = "train.py") -> dict[str, Any]:
    """Return the first event of a job."""
    return event(
        0, "job_started", run_id=run_id, program=program, world_size=2, host=host, backend="gloo", ddplaunch="0.1.0"
    )


def generation(mono: float, number: int) -> dict[str, Any]:
    """Return the start of a generation."""
    return event(mono, "generation_started", generation=number, master_addr="127.0.0.1", master_port=1)


def exited(mono: float, rank: int, status: int = 0, how: str = "finished", **fields: Any) -> dict[str, Any]:
    """Return the end of a worker."""
    return event(mono, "worker_exited", rank=rank, pid=rank + 100, status=status, how=how, seconds=1.0, **fields)


def worker(mono: float, rank: int) -> dict[str, Any]:
    """Return the start of a worker."""
    return event(mono, "worker_started", rank=rank, pid=rank + 100)


def ended(mono: float, status: int = 0, text: str = "2 workers finished in 9 s") -> dict[str, Any]:
    """Return the last event."""
    return event(mono, "job_ended", status=status, why="finished", seconds=mono, text=text)


def recorded(folder: Path, *events: dict[str, Any] | str, **files: dict[str, Any]) -> str:
    """Write the events, and plan.json or summary.json; return the folder. A text is a line as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [each if isinstance(each, str) else json.dumps(each) for each in events]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"v": 1, **content}))
    return str(folder)


def restarted(folder: Path, ranks: int = 2, generations: int = 2, **files: dict[str, Any]) -> str:
    """Write a job in which rank 1 fails in each generation but the last; a generation takes 10 s, with 2 s before the next."""
    events = [started()]
    for number in range(generations):
        at = number * 12.0
        events += [generation(at, number), *(worker(at + 0.1, rank) for rank in range(ranks))]
        if number < generations - 1:
            events += [
                exited(at + 9, 1, 3, "exit status 3"),
                event(at + 9, "stop_sent", signal=15, name="SIGTERM", ranks="0"),
            ]
            events += [
                exited(at + 10, rank, 143, "killed by SIGTERM", stopped_with=15) for rank in range(ranks) if rank != 1
            ]
            events += [event(at + 10, "generation_failed", generation=number, rank=1, wait=2.0)]
        else:
            events += [*(exited(at + 9, rank) for rank in range(ranks)), ended(at + 9)]
    return recorded(folder, *events, **files)


def sampled(folder: Path, ranks: int, times: range, generation: int = 0, **more: list[Any]) -> None:
    """Append a sample of all ranks for each of these seconds after the start: memory grows, and a step takes a second."""
    with open(folder / "samples.jsonl", "a") as file:
        for mono in times:
            cpu = [50 + rank % 50 + mono % 7 for rank in range(ranks)]
            row = {"v": 1, "mono": 50.0 + mono, "generation": generation, "ranks": f"0-{ranks - 1}", "cpu": cpu}
            row |= {"memory": [1000 + mono] * ranks, "step": [mono] * ranks, **more}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def called(folder: Path, ranks: int, collectives: list[tuple[int, dict[int, float]]]) -> None:
    """Append when ranks came to collectives: the number of each, and the seconds after the start by rank."""
    row = {
        "v": 1, "mono": 50.0, "group": "0", "members": f"0-{ranks - 1}", "ranks": f"0-{ranks - 1}",
        "numbers": [number for number, _ in collectives], "operations": ["all_reduce"] * len(collectives),
        "came": [[round(came[rank] * 1e6) if rank in came else None for rank in range(ranks)] for _, came in collectives],
    }  # fmt: skip
    with open(folder / "collectives.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def traced(entries: Iterable[Entry], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace of these entries, as its viewers read it."""
    file = io.BytesIO()
    write(file, entries, about, packed=False)
    found: dict[str, Any] = json.loads(file.getvalue())
    return found
