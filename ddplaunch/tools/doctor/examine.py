"""All checks of one machine, run at once, each in a child with a deadline of its own: one that hangs or crashes is a finding."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.record.folders import runs_folder
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token
from ddplaunch.system.errors import LaunchError, visible
from ddplaunch.system.fields import line, piece
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.words import did_you_mean, duration
from ddplaunch.tools.doctor import (
    LONGEST,
    MOST,
    MOST_LINES,
    SEVERITIES,
    Check,
    CheckResult,
    Finding,
    Report,
    Severity,
    Subject,
    Verdict,
    all_reduce,
    files,
    gpus,
    interpreter,
    limits,
    network,
    shared_memory,
    slurm,
    variables,
)

_MODULES = (interpreter, gpus, all_reduce, limits, shared_memory, files, network, variables, slurm)
# in the order in which -v shows them
ALL_CHECKS: tuple[Check, ...] = tuple(chain.from_iterable(module.CHECKS for module in _MODULES))

_KILL_MARGIN = 0.2  # seconds in which the kernel ends a late check, before its process is left behind

R = TypeVar("R", bound=Report)


def subject_of(spec: JobSpec, env: Mapping[str, str]) -> Subject:
    """Return this machine as the workers of a job would find it: their variables and interpreter, without the job's token.

    Raises:
        LaunchError: there is no such interpreter.
    """
    import shutil  # 5 ms, which a job does not pay for

    python = spec.program.python or sys.executable
    found = shutil.which(python, path=env.get("PATH"))
    if found is None:
        written = next((str(one) for one in spec.given if one.name == "python"), python)
        raise LaunchError(
            f"{written}: there is no such program",
            hint="name the interpreter of an environment: `ddplaunch doctor --python ENV/bin/python`",
        )
    variables = {**token.visible_to_workers(env), **dict(spec.env)}
    return Subject(env=variables, python=found, runs=spec.log_dir or runs_folder(env))


def chosen(checks: Sequence[Check], only: str | None) -> tuple[Check, ...]:
    """Return the checks that a list names: "shm,limits"; None names all.

    Raises:
        LaunchError: there is no such check.
    """
    if only is None:
        return tuple(checks)
    known = {check.id: check for check in checks}
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            raise LaunchError(
                f"--only {only}: there is no check {name}",
                hint=f"did you mean `--only {meant}`?" if meant else f"the checks are {', '.join(known)}",
            )
    if not names:
        raise LaunchError("--only names no check", hint=f"the checks are {', '.join(known)}")
    return tuple(check for check in checks if check.id in names)


def examine(checks: Sequence[Check], subject: Subject) -> Report:
    """Run all checks, and return what they say: the checks in their order, the findings by severity."""
    loop = Loop()
    began = loop.now()
    ended: dict[str, tuple[CheckResult, tuple[Finding, ...]]] = {}

    def on_answer(check: Check, answer: Verdict | str | None) -> None:
        """Keep a verdict, an exception's text, or that the child gave none (None). Called by the loop."""
        ended[check.id] = conclude(check, answer, loop.now() - began)

    for check in checks:
        asked = loop.ask(
            partial(_answer, check, subject), otherwise=None, answered=partial(on_answer, check), within=check.within
        )
        # the kernel cannot kill a child in uninterruptible sleep, as on a dead file server: it is left behind
        loop.timer(began + check.within + _KILL_MARGIN, asked.give_up)
    while len(ended) < len(checks):
        loop.run_once()
    seconds = loop.now() - began
    loop.close()
    results = [ended[check.id] for check in checks]
    found = [finding for _, findings in results for finding in findings]
    report = Report(
        ddplaunch=__version__,
        host=os.uname().nodename,
        python=subject.python,
        seconds=round(seconds, 3),
        checks=tuple(result for result, _ in results),
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
    )
    return presentable(report, subject.env.get("HOME", ""))


def _answer(check: Check, subject: Subject) -> Verdict | str:
    """Examine, in the child; return what was raised as a text, since a flaw in one check is to end no other."""
    try:
        return check.examine(subject)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def conclude(check: Check, answer: Verdict | str | None, seconds: float) -> tuple[CheckResult, tuple[Finding, ...]]:
    """Return the result of a check, and its findings.

    `answer` is its verdict, the text of an exception, or None if its child has ended without one: before the check's time was
    up by itself, after that because it was killed.
    """
    seconds = round(seconds, 3)
    if isinstance(answer, Verdict):
        status: Literal["passed", "found"] = "found" if answer.findings else "passed"
        result = CheckResult(id=check.id, status=status, facts=answer.facts, seconds=seconds)
        return result, tuple(replace(finding, check=check.id) for finding in answer.findings)
    has_raised = answer is not None
    if has_raised or seconds < check.within:
        why = answer or "its process has ended without an answer"
        result = CheckResult(id=check.id, status="failed", facts=why, seconds=seconds)
        title = f"the check {check.id} {'failed' if has_raised else 'crashed'}"
        # a driver may end the process that asks it, and then it would end a worker too
        severity: Severity = "note" if has_raised else "slow"
        return result, (Finding(check=check.id, severity=severity, title=title, evidence=why),)
    why = f"no answer in {duration(check.within)}"
    finding = Finding(
        check=check.id,
        severity=check.if_late,
        title=f"the check {check.id} did not end in time",
        evidence=f"{why}: something that a job needs too hangs or is very slow",
        hint=f"`ddplaunch doctor --only {check.id}` runs this check alone",
    )
    return CheckResult(id=check.id, status="late", facts=why, seconds=seconds), (finding,)


def presentable(report: R, home: str) -> R:
    """Return the report as it may be shown to others: home as ~, nothing that a terminal obeys, no text without end."""

    def shown(text: str) -> str:
        text = visible(piece(text, LONGEST))  # `piece` cuts, and replaces what no JSON can carry
        text = "\n".join(text.splitlines()[:MOST_LINES])
        text = text.replace(f"{home.rstrip('/')}/", "~/") if home.rstrip("/") else text
        return text[:LONGEST]

    return replace(
        report,
        python=shown(report.python),
        checks=tuple(replace(one, facts=shown(one.facts)) for one in report.checks),
        findings=tuple(
            replace(
                one, title=line(shown(one.title).replace("\n", " ")), evidence=shown(one.evidence), hint=shown(one.hint)
            )
            for one in report.findings[:MOST]
        ),
    )
