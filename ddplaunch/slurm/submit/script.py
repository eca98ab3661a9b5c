"""The batch script: plain, so that a user who does not know ddplaunch can read, change and submit it. Pure."""

from __future__ import annotations

import os
import shlex
import string
from collections.abc import Sequence

from ddplaunch.slurm.submit.request import SbatchOption, SubmitRequest
from ddplaunch.spec import JobSpec, ProgramKind

WIDTH = 100  # columns; a command that is longer is broken where an option begins

_INDENT = "    "
_BREAK = " \\\n" + _INDENT
# about the output of sbatch itself, not about the job
_NOT_IN_SCRIPT = ("quiet", "verbose", "test-only")
_ABOUT_TASKS = ("ntasks-per-node", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket")
_PLAIN = frozenset(string.ascii_letters + string.digits + "@%+=:,./_-[]*")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def options(request: SubmitRequest, spec: JobSpec) -> tuple[SbatchOption, ...]:
    """Return the options in the script: those that were typed, and defaults."""
    defaults = [
        SbatchOption("nodes", _nodes(spec)) if "nnodes" in spec.origins and not request.has("nodes") else None,
        SbatchOption("ntasks-per-node", "1") if not request.has(*_ABOUT_TASKS) else None,
        SbatchOption("output", "%x-%A_%a.out" if request.has("array") else "%x-%j.out"),
        # a requeued job continues in the same file
        SbatchOption("open-mode", "append"),
        SbatchOption("requeue") if spec.requeue_on else None,
    ]
    typed = [option for option in request.options if option.name not in _NOT_IN_SCRIPT]
    named = [SbatchOption("job-name", job_name(spec))]
    return (*_not_in(request, named), *typed, *_not_in(request, [option for option in defaults if option is not None]))


def text(asked: Sequence[SbatchOption], command: Sequence[str], job: Sequence[str], program: int) -> str:
    """Write the script: `command` starts ddplaunch with the arguments `job`, of which the last `program` are the script's."""
    lines = [
        "#!/bin/bash",
        *(_directive(option) for option in asked),
        "",
        "# ddplaunch starts the workers on all nodes of the job, stops them together, and ends with their status.",
        "# exec: it takes the place of this script, so that it gets the signals that Slurm sends.",
        _command(["exec", *command], job, program),
    ]
    return "\n".join(lines) + "\n"


def job_name(spec: JobSpec) -> str:
    """Name the job after its program."""
    target = spec.program.target
    name = os.path.basename(os.path.normpath(target))
    if spec.program.kind is ProgramKind.SCRIPT:
        name = name.removesuffix(".py")
    readable = "".join(character if character.isprintable() else "_" for character in name)
    return readable.strip("./ ") or "ddplaunch"


def _nodes(spec: JobSpec) -> str:
    min_nodes, max_nodes = spec.nnodes
    return f"{min_nodes}" if min_nodes == max_nodes else f"{min_nodes}-{max_nodes}"


def _not_in(request: SubmitRequest, options: Sequence[SbatchOption]) -> list[SbatchOption]:
    return [option for option in options if not request.has(option.name)]


def _directive(option: SbatchOption) -> str:
    """A line for sbatch, which takes quotes and backslashes as a shell does, but knows no $ and no `."""
    dashes, between = ("-", " ") if len(option.name) == 1 else ("--", "=")
    line = f"#SBATCH {dashes}{option.name}"
    return line if option.value is None else f"{line}{between}{_in_directive(option.value)}"


def _in_directive(value: str) -> str:
    if value and all(character in _PLAIN for character in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _command(command: Sequence[str], job: Sequence[str], program: int) -> str:
    """The command line; a long one is broken between arguments, but not between an option and its value."""
    whole = " ".join(map(quote, (*command, *job)))
    if len(whole) <= WIDTH:
        return whole
    lines = [" ".join(map(quote, command))]
    of_script = len(job) - program
    for part in (job[:of_script], job[of_script:]):
        lines += _filled(_groups(part))
    return _BREAK.join(lines)


def _groups(argv: Sequence[str]) -> list[str]:
    """The quoted arguments, an option and its value in one."""
    groups: list[str] = []
    for at, argument in enumerate(argv):
        if at and argv[at - 1].startswith("-") and not argument.startswith("-"):
            groups[-1] += f" {quote(argument)}"
        else:
            groups.append(quote(argument))
    return groups


def _filled(groups: Sequence[str]) -> list[str]:
    """The same, filled into lines."""
    lines: list[str] = []
    for group in groups:
        if lines and len(_INDENT + lines[-1] + group) < WIDTH - 2:
            lines[-1] += f" {group}"
        else:
            lines.append(group)
    return lines


def quote(argument: str) -> str:
    """Quote an argument for bash, control characters such that it stays on one line.

    sbatch rejects a script with DOS line ends anywhere.
    """
    if all(character.isprintable() or "\udc80" <= character <= "\udcff" for character in argument):
        return shlex.quote(argument)
    return "$'" + "".join(_ESCAPES.get(character) or _escaped(character) for character in argument) + "'"


def _escaped(character: str) -> str:
    return f"\\x{ord(character):02x}" if ord(character) < 0x20 or ord(character) == 0x7F else character
