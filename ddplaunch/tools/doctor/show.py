"""What `ddplaunch doctor` prints, for people or as JSON: findings, the worst first, or the failures that are remembered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from ddplaunch.record import bad_nodes
from ddplaunch.record.folders import bad_nodes_file, short
from ddplaunch.system.console.tables import (
    BAD,
    GOOD,
    NAME,
    NOTE,
    ODD,
    Block,
    Look,
    Piece,
    line,
    section,
    sentence,
    table,
    written,
)
from ddplaunch.system.words import count, duration
from ddplaunch.tools.doctor import SEVERITIES, Finding, Report, Severity

_STYLES: dict[Severity, str] = {"broken": BAD, "slow": ODD, "note": NAME}


def as_json(report: Report) -> str:
    """Return the report as JSON; docs/guides/doctor.md has its schema."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def blocks(report: Report, *, verbose: bool) -> Iterator[Block]:
    """Yield the findings and one line about all; `verbose`: the facts of each check too."""
    for finding in report.findings:
        yield _finding(finding)
    if verbose:
        yield table([(one.id, one.status, one.facts) for one in report.checks], styles=(NAME, NOTE), wraps=True)
    yield line(*_summary(report))


def _finding(finding: Finding) -> Block:
    parts = [sentence((f"{finding.severity}: ", _STYLES[finding.severity]), finding.title)]
    if finding.evidence:
        parts += [sentence("  ", text, NOTE) for text in finding.evidence.splitlines()]
    if finding.hint:
        parts += [sentence("  ", text) for text in finding.hint.splitlines()]
    return section(*parts)


def _summary(report: Report) -> Iterator[Piece]:
    """Yield the last line: "gpu01: 2 findings (1 broken, 1 note); 9 of 11 checks passed in 4 s"."""
    passed = sum(one.status == "passed" for one in report.checks)
    found = Counter(one.severity for one in report.findings)
    yield f"{report.host}: ", NAME
    if not found:
        yield "nothing found", GOOD
    else:  # "findings" is said, since behind "2 nodes: " a mere "1 broken" would be read as a node
        yield f"{count(found.total(), 'finding')} ("
        for index, severity in enumerate(one for one in SEVERITIES if found[one]):
            text = count(found[severity], "note") if severity == "note" else f"{found[severity]} {severity}"
            yield f", {text}" if index else text, _STYLES[severity]
        yield ")"
    yield f"; {passed} of {count(len(report.checks), 'check')} passed in {duration(report.seconds)}"


# --- the nodes whose machine has failed lately: --nodes


def remembered(env: Mapping[str, str], *, as_json: bool) -> str:
    """Return the nodes whose machine has failed lately, for stdout.

    Raises:
        LaunchError: the file cannot be read.
    """
    now = time.time()
    failures = bad_nodes.read(bad_nodes_file(env), now)
    if as_json:
        return msgspec.json.format(msgspec.json.encode({"schema": 1, "failures": failures}), indent=1).decode()
    if not failures:
        return "no node is remembered on which the machine has failed in the last 7 days"
    rows = [
        (host, what, f"run {short(run)}" if run else "", why) for host, what, run, why in bad_nodes.table(failures, now)
    ]
    return written([table(rows, styles=(NAME, "", NOTE, NOTE))], Look.of_stdout(env))
