"""The list of what was seen on a GPU, from what a run of tests/gpu has written."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGINS, ENDS = "<!-- what was seen on GPUs: written by docs/generate.py -->", "<!-- end of what was seen -->"


def as_text(seen: Path) -> str:
    """Return the machine on which the tests ran, and an item for each claim."""
    run = json.loads(seen.read_text(encoding="utf-8"))
    items = [f"- {_with_code(claim['claim'])}{_unless_seen(claim, run)}" for claim in run["claims"]]
    return "\n".join([_machine(run), "", *items])


def _machine(run: Mapping[str, Any]) -> str:
    if "card" not in run:
        return "None of this has been seen on a GPU yet."
    versions = f"driver {run['driver']}, torch {run['torch']}, NCCL {run['nccl']}, Python {run['python']}"
    return f"Seen on {run['date']} with one {run['card']} ({versions}):"


def _with_code(claim: str) -> str:
    """Return a claim with its options and names as code; what stands in quotation marks is one command."""
    return re.sub(
        r"'[^']*--[^']*'|--[a-z][\w-]*|\b[A-Z]+(?:_[A-Z]+)+\b|\b\w+\(\)",
        lambda found: f"`{found[0].strip(chr(39))}`",
        claim,
    )


def _unless_seen(claim: Mapping[str, str], run: Mapping[str, Any]) -> str:
    """Return how far a claim is from seen: nothing if it was."""
    if claim["outcome"] == "seen":
        return ""
    told = claim["told"].replace("<", "&lt;")
    if claim["outcome"] == "failed":
        return f". **Not so**: {told}"
    return f". **Not seen yet**{f': {told}' if 'card' in run and told else ''}"
