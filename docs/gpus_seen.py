"""The table of what was seen on a GPU, from what a run of tests/gpu has written."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGINS, ENDS = "<!-- what was seen on GPUs: written by docs/generate.py -->", "<!-- end of what was seen -->"
_NOT_YET = "not yet"


def as_text(seen: Path) -> str:
    """Return the machine on which the tests ran, and a row for each claim."""
    run = json.loads(seen.read_text(encoding="utf-8"))
    rows = [
        f"| {_with_code(claim['claim'])} | {_link(claim['page'])} | {_outcome(claim, run)} |" for claim in run["claims"]
    ]
    return "\n".join([_machine(run), "", "| claim | page | seen |", "| --- | --- | --- |", *rows])


def _machine(run: Mapping[str, Any]) -> str:
    if "card" not in run:
        return "None of this has been seen on a GPU yet."
    versions = f"driver {run['driver']}, torch {run['torch']}, NCCL {run['nccl']}, Python {run['python']}"
    return f"Run on {run['date']} with one {run['card']} ({versions})."


def _with_code(claim: str) -> str:
    """Return a claim with its options and names as code; what stands in quotation marks is one command."""
    return re.sub(
        r"'[^']*--[^']*'|--[a-z][\w-]*|\b[A-Z]+(?:_[A-Z]+)+\b|\b\w+\(\)",
        lambda found: f"`{found[0].strip(chr(39))}`",
        claim,
    )


def _link(page: str) -> str:
    """Return a link to a page from one of the reference."""
    return f"[{page.removesuffix('.md')}]({'../../README.md' if page == 'README.md' else f'../{page}'})"


def _outcome(claim: Mapping[str, str], run: Mapping[str, Any]) -> str:
    told = claim["told"].replace("|", "\\|")
    if claim["outcome"] == "seen":
        return f"`{told}`" if told else "yes"
    told = told.replace("<", "&lt;")
    if claim["outcome"] == "failed":
        return f"**no**: {told}"
    return f"{_NOT_YET}: {told}" if "card" in run and told else _NOT_YET
