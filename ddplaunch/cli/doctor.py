"""`ddplaunch doctor`: examines this machine before a job does."""

from __future__ import annotations

from collections.abc import Mapping

import click

from ddplaunch.cli.command import Command, Once, show
from ddplaunch.exitcodes import OK
from ddplaunch.options.table import BY_NAME

_BROKEN = 1  # the exit status if a job would fail here


@click.command(
    cls=Command,
    examples=(
        ("ddplaunch doctor", "this machine"),
        ("ddplaunch doctor --python ~/env/bin/python", "with the torch of another environment"),
        ("ddplaunch doctor --json > report.json", "for a program, or for a bug report"),
    ),
)
@click.option("--python", cls=Once, metavar="PROGRAM", help=BY_NAME["python"].help)
@click.option("--only", cls=Once, metavar="LIST", help="Run only these checks: shm,limits. -v shows the names of all.")
@click.option("-v", "--verbose", is_flag=True, help="Show the facts of each check, found or passed.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_obj
def doctor(env: Mapping[str, str], python: str | None, only: str | None, verbose: bool, as_json: bool) -> int:
    """Shows what would make a job fail or crawl on this machine, the worst first, and what to type. Takes 10 s at most and
    changes nothing. The exit status is 1 only if something is broken. The text may be shown to others: it holds no value that
    looks like a secret.
    """  # noqa: D205 - the help of a verb is one paragraph
    from ddplaunch.cli import job
    from ddplaunch.devices import interpreter
    from ddplaunch.doctor import checks
    from ddplaunch.doctor import show as shown
    from ddplaunch.doctor.examine import chosen, examine, subject_of
    from ddplaunch.process.program import working_directory
    from ddplaunch.report.console import Look, written
    from ddplaunch.spec import Given

    typed = (Given.typed("python", python),) if python is not None else ()
    # a job without a script: the options of files and variables hold for this command too
    line = job.CommandLine(typed, ("-",), ())
    spec = interpreter.chosen(job.resolve(line, env, working_directory()), env)
    report = examine(chosen(checks.ALL, only), subject_of(spec, env))
    text = shown.as_json(report) if as_json else written(shown.blocks(report, verbose=verbose), Look.of_stdout(env))
    return show(text) or (_BROKEN if report.is_broken else OK)
