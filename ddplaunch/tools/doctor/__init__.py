"""`ddplaunch doctor`: what would make a job fail or crawl on this machine. Each check reads facts and judges them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from ddplaunch.system.fields import MAX_AGENTS, Duration, Line

Severity: TypeAlias = Literal["broken", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("broken", "slow", "note")  # in the order in which people read them
# of a report that has come from another node; `presentable` keeps to it
LONGEST = 2000  # characters of a text
MOST_LINES = 40  # of a text
MOST = 200  # checks, and findings
_Text = Annotated[str, Meta(max_length=LONGEST)]
VERSION = 1  # of the report as JSON; a field that is added does not change the version


class Finding(Struct, frozen=True, kw_only=True):
    """Something that would make a job fail ("broken") or crawl ("slow"), or that is worth to know ("note")."""

    check: Line = ""  # the id of the check, which `examine` fills in
    severity: Severity
    title: Line  # one sentence, without a period
    evidence: _Text = ""  # what was read or measured, and where
    hint: _Text = ""  # what to type or to change; "" if nothing can be done
    hosts: Annotated[tuple[Line, ...], Meta(max_length=MAX_AGENTS)] = ()  # of several nodes those that it is about


def broken(title: str, evidence: str = "", hint: str = "") -> Finding:
    """Return that something would make a job fail."""
    return Finding(severity="broken", title=title, evidence=evidence, hint=hint)


def slow(title: str, evidence: str = "", hint: str = "") -> Finding:
    """Return that something would make a job crawl, or some jobs fail."""
    return Finding(severity="slow", title=title, evidence=evidence, hint=hint)


def note(title: str, evidence: str = "", hint: str = "") -> Finding:
    """Return that something is worth to know."""
    return Finding(severity="note", title=title, evidence=evidence, hint=hint)


class Verdict(Struct, frozen=True):
    """What a check says: its facts in a line, which -v and bug reports show, and its findings."""

    facts: str  # "torch 2.13.0 for CUDA 13.0, NCCL 2.28.9"
    findings: tuple[Finding, ...] = ()


class Subject(Struct, frozen=True, kw_only=True):
    """What is examined: this machine as a job would find it."""

    env: Mapping[str, str]  # of the workers: the caller's variables, and those that files and options add
    python: str  # the interpreter of the workers
    runs: str | None = None  # the folder in which runs get their folders; None: the user has no home
    root: str = "/"  # the top of the file system whose /proc and /sys are read; another one in tests


class Check(Struct, frozen=True, kw_only=True):
    """One check: a child calls `examine`, which may hang or crash, and is killed after `within` seconds."""

    id: str  # "shm"; may be typed behind --only
    examine: Callable[[Subject], Verdict]
    within: float = 3.0  # seconds
    if_late: Severity = "slow"  # what it means that the check does not answer in time


class CheckResult(Struct, frozen=True, kw_only=True):
    """How a check ended."""

    id: Line
    # late: killed at its deadline; failed: it ended without an answer
    status: Literal["passed", "found", "late", "failed"]
    facts: _Text
    seconds: Duration


class Report(Struct, frozen=True, kw_only=True):
    """All that the doctor says of one machine: what --json prints, and another ddplaunch may read."""

    version: int = VERSION
    ddplaunch: Line
    host: Line
    python: _Text
    seconds: Duration
    checks: Annotated[tuple[CheckResult, ...], Meta(max_length=MOST)]
    findings: Annotated[tuple[Finding, ...], Meta(max_length=MOST)]  # the worst first

    @property
    def is_broken(self) -> bool:
        """Whether a job would fail here."""
        return any(finding.severity == "broken" for finding in self.findings)


class NodesReport(Report, frozen=True, kw_only=True):
    """What the doctor says of several nodes: its checks and findings are about all of them."""

    nodes: tuple[Report, ...]  # what the checks of each machine say
