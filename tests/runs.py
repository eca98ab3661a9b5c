"""Folders of runs as jobs leave them, made without a job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

DAY = 86400.0  # seconds


def run_of(
    runs: Path,
    name: str,
    *,
    days: float = 0.0,
    seconds: float = 1.0,
    why: str = "finished",
    size: int = 0,
    node: str = "",
) -> Path:
    """Make a run that took so many seconds and ended so many days ago, with a log of `size` bytes, and return its folder.

    With `why` "killed" it has no summary.
    """
    folder = runs / name / node
    folder.mkdir(parents=True)
    ended = time.time() - days * DAY
    started = {"v": 1, "event": "job_started", "at": ended - seconds, "mono": 1.5, "run_id": name.partition(".")[0]}
    ended_event = {"v": 1, "event": "job_ended", "at": ended, "mono": 1.5 + seconds, "status": 0}
    (folder / "events.jsonl").write_text(f"{json.dumps(started)}\n{json.dumps(ended_event)}\n")
    (folder / "rank-0.out").write_bytes(os.urandom(size))
    if why != "killed":
        (folder / "summary.json").write_text(json.dumps({"v": 1, "status": 0, "why": why}))
    aged(runs / name, days)
    return runs / name


def aged(folder: Path, days: float) -> None:
    """Let all files of a run be so many days old."""
    then = time.time() - days * DAY
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then))
