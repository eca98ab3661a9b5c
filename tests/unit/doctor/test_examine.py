"""How checks are run: at once, each with a deadline of its own; one that hangs, crashes or raises is a finding."""

import os
import time

import msgspec
import pytest

from ddplaunch.system.console.tables import Look, written
from ddplaunch.tools.doctor import Check, Finding, Report, Subject, Verdict, show
from ddplaunch.tools.doctor.examine import ALL_CHECKS, chosen, examine, presentable
from tests.unit.builders import refusal

HERE = Subject(env={"HOME": "/home/ada"}, python="/home/ada/env/bin/python")
BAD = Finding(check="disk", severity="broken", title="the disk is full", evidence="/home/ada/runs: 0 B", hint="`rm it`")
NOTE = Finding(check="clock", severity="note", title="nobody sets the clock")


def fine(_subject: Subject) -> Verdict:
    return Verdict("all is well")


def hangs(_subject: Subject) -> Verdict:
    while True:
        time.sleep(60)


def crashes(_subject: Subject) -> Verdict:
    os._exit(3)


def raises(_subject: Subject) -> Verdict:
    raise ValueError("no \x1b[2J number")


def finds(_subject: Subject) -> Verdict:
    return Verdict("0 B", (NOTE, BAD))


def report_of(*those: Check) -> Report:
    return examine(those, HERE)


def test_findings_are_ordered_by_severity_and_checks_as_they_were_named():
    report = report_of(Check(id="a", examine=finds), Check(id="b", examine=fine))
    assert [(one.id, one.status, one.facts) for one in report.checks] == [
        ("a", "found", "0 B"),
        ("b", "passed", "all is well"),
    ]
    assert [one.title for one in report.findings] == ["the disk is full", "nobody sets the clock"]
    assert report.is_broken
    assert not report_of(Check(id="b", examine=fine)).is_broken


def test_a_check_that_hangs_is_killed_and_named_while_the_others_answer():
    late = Check(id="disk", examine=hangs, within=0.2, if_late="broken")
    report = report_of(late, Check(id="b", examine=fine))
    assert [one.status for one in report.checks] == ["late", "passed"]
    (finding,) = report.findings
    assert (finding.severity, finding.title) == ("broken", "the check disk did not end in time")
    assert "`ddplaunch doctor --only disk`" in finding.hint


def test_a_check_that_crashes_or_raises_is_a_finding_and_breaks_nothing():
    report = report_of(Check(id="gpu", examine=crashes), Check(id="clock", examine=raises))
    assert [one.status for one in report.checks] == ["failed", "failed"]
    assert [(one.severity, one.title) for one in report.findings] == [
        ("slow", "the check gpu crashed"),
        ("note", "the check clock failed"),
    ]
    assert report.findings[1].evidence == r"ValueError: no \x1b[2J number"


def test_the_home_of_the_user_is_shortened_and_no_text_is_endless():
    long = Finding(check="x", severity="note", title="/home/ada/a and /home/adam", evidence="\0\udcff" * 5000)
    report = presentable(msgspec.structs.replace(report_of(), findings=(long,)), "/home/ada")
    (shown,) = report.findings
    assert shown.title == "~/a and /home/adam"
    assert len(shown.evidence) < 10_000
    assert report.python == "~/env/bin/python"
    assert msgspec.json.decode(show.as_json(report), type=Report) == report


def test_the_text_has_the_worst_first_and_is_quiet_about_what_is_fine():
    report = report_of(Check(id="a", examine=finds), Check(id="b", examine=fine))
    text = written(show.blocks(report, verbose=False), Look())
    assert text.startswith("broken: the disk is full\n  ~/runs: 0 B\n  `rm it`\n\nnote: nobody sets the clock\n\n")
    assert "2 findings (1 broken, 1 note); 1 of 2 checks passed in " in text
    assert "all is well" not in text
    assert "b  passed  all is well" in written(show.blocks(report, verbose=True), Look())


def test_of_several_nodes_the_findings_are_counted_and_not_the_nodes():
    report = msgspec.structs.replace(report_of(Check(id="a", examine=fine)), host="2 nodes", findings=(BAD,))
    assert "\n2 nodes: 1 finding (1 broken); " in written(show.blocks(report, verbose=False), Look())


@pytest.mark.parametrize(
    ("only", "message", "hint"),
    [
        ("limit", "--only limit: there is no check limit", "did you mean `--only limits`?"),
        (" , ", "--only names no check", "the checks are "),
    ],
)
def test_a_check_that_does_not_exist_is_refused(only, message, hint):
    said, to_type = refusal(lambda: chosen(ALL_CHECKS, only))
    assert said == message
    assert to_type is not None
    assert to_type.startswith(hint)


def test_each_check_has_a_name_of_its_own():
    names = [check.id for check in ALL_CHECKS]
    assert len(set(names)) == len(names)
