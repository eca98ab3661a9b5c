"""What the pages say of GPUs, and what was seen of it: a test names its claim, and a run of the tests writes a table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

OPTION = "--gpu-table"
_ASK_TORCH = """
import json, torch
nccl = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps({"torch": torch.__version__, "nccl": nccl, "card": torch.cuda.get_device_name(0)}))
"""
_WORST = ("failed", "skipped", "seen")


class Table:
    """Collects what becomes of each claim, from the reports of the tests, those of other processes too."""

    def __init__(self, path: Path) -> None:
        """Write to this file at the end."""
        self.path = path
        self.found: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the report of one phase of a test."""
        properties = dict(report.user_properties)
        if "claim" not in properties or (report.when != "call" and report.passed):
            return
        outcome = "seen" if report.passed else report.outcome
        self.found.setdefault((str(properties["page"]), str(properties["claim"])), []).append(
            (outcome, str(properties.get("told", "")) if report.passed else _reason(report))
        )

    def pytest_sessionfinish(self) -> None:
        """Write the table; a claim of which an earlier one knew, and that no test came to now, was not run."""
        earlier = json.loads(self.path.read_text(encoding="utf-8"))["claims"] if self.path.exists() else []
        for row in earlier:
            self.found.setdefault((row["page"], row["claim"]), [("skipped", "not run")])
        facts = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0], **_machine()}
        self.path.write_text(json.dumps({**facts, "claims": rows(self.found)}, indent=1) + "\n", encoding="utf-8")


def rows(found: Mapping[tuple[str, str], Iterable[tuple[str, str]]]) -> list[dict[str, str]]:
    """Return a row for each claim, in the order of pages: the worst that its tests came to, and what they told."""
    made = []
    for (page, claim), ends in sorted(found.items()):
        ran = [end for end in ends if end[0] != "skipped"] or [*ends]
        outcome = min((end[0] for end in ran), key=_WORST.index)
        told = dict.fromkeys(text for kind, text in ran if kind == outcome and text)
        made.append({"page": page, "claim": claim, "outcome": outcome, "told": "; ".join(told)})
    return made


def _reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped, or the line of its error."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).splitlines()
    return next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")[:300]


def _machine() -> dict[str, Any]:
    """Return card, driver and versions, as torch and NVML say them; without a GPU nothing."""
    facts: dict[str, Any] = {}
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], text=True, capture_output=True, timeout=120, check=False)
    if asked.returncode == 0:
        facts |= json.loads(asked.stdout)
        import pynvml  # type: ignore[import-untyped]  # it ships no annotations

        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    return facts
