"""The batch script: plain, so that somebody who has never heard of ddplaunch can read, change and submit it. Pure."""

from __future__ import annotations

import os
import shlex
import string
from collections.abc import Sequence

from ddplaunch.slurm.submit.args import Request, SbatchOption
from ddplaunch.spec import JobSpec, ProgramKind

WIDTH = 100  # columns; a command that is longer is broken where an option begins

_INDENT = "    "
_BREAK = " \\\n" + _INDENT
# say how sbatch talks to whoever types it, and nothing about the job
_NOT_IN_SCRIPT = ("quiet", "verbose", "test-only")
_ABOUT_TASKS = ("ntasks-per-node", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket")
_PLAIN = frozenset(string.ascii_letters + string.digits + "@%+=:,./_-[]*")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def options(request: Request, spec: JobSpec) -> tuple[SbatchOption, ...]:
    """Give what the script asks of Slurm: what was typed, and what it lacks."""
    lacking = [
        SbatchOption("nodes", _nodes(spec)) if "nnodes" in spec.origins and not request.has("nodes") else None,
        SbatchOption("ntasks-per-node", "1") if not request.has(*_ABOUT_TASKS) else None,
        SbatchOption("output", "%x-%A_%a.out" if request.has("array") else "%x-%j.out"),
        # a job that is started again goes on in the same file
        SbatchOption("open-mode", "append"),
        SbatchOption("requeue") if spec.requeue_on else None,
    ]
    typed = [option for option in request.options if option.name not in _NOT_IN_SCRIPT]
    named = [SbatchOption("job-name", job_name(spec))]
    return (*_not_in(request, named), *typed, *_not_in(request, [option for option in lacking if option is not None]))


def text(asked: Sequence[SbatchOption], command: Sequence[str], job: Sequence[str], program: int) -> str:
    """Write the script: `command` starts ddplaunch with the words of `job`, of which the last `program` begin with SCRIPT."""
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
    """Give a name after what the job runs."""
    target = spec.program.target
    name = os.path.basename(os.path.normpath(target))
    if spec.program.kind is ProgramKind.SCRIPT:
        name = name.removesuffix(".py")
    readable = "".join(character if character.isprintable() else "_" for character in name)
    return readable.strip("./ ") or "ddplaunch"


def _nodes(spec: JobSpec) -> str:
    least, most = spec.nnodes
    return f"{least}" if least == most else f"{least}-{most}"


def _not_in(request: Request, options: Sequence[SbatchOption]) -> list[SbatchOption]:
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
    """The command line; a long one is broken between its words, but not between an option and its value."""
    whole = " ".join(map(quote, (*command, *job)))
    if len(whole) <= WIDTH:
        return whole
    lines = [" ".join(map(quote, command))]
    of_script = len(job) - program
    for part in (job[:of_script], job[of_script:]):
        lines += _filled(_groups(part))
    return _BREAK.join(lines)


def _groups(words: Sequence[str]) -> list[str]:
    """The quoted words, an option and the word behind it in one."""
    groups: list[str] = []
    for at, word in enumerate(words):
        if at and words[at - 1].startswith("-") and not word.startswith("-"):
            groups[-1] += f" {quote(word)}"
        else:
            groups.append(quote(word))
    return groups


def _filled(groups: Sequence[str]) -> list[str]:
    """The same in lines."""
    lines: list[str] = []
    for group in groups:
        if lines and len(_INDENT + lines[-1] + group) < WIDTH - 2:
            lines[-1] += f" {group}"
        else:
            lines.append(group)
    return lines


def quote(word: str) -> str:
    """Quote a word for bash; with control characters in a way that keeps it on one line.

    sbatch refuses a script with the line ends of DOS in it, wherever they stand.
    """
    if all(character.isprintable() or "\udc80" <= character <= "\udcff" for character in word):
        return shlex.quote(word)
    return "$'" + "".join(_ESCAPES.get(character) or _escaped(character) for character in word) + "'"


def _escaped(character: str) -> str:
    return f"\\x{ord(character):02x}" if ord(character) < 0x20 or ord(character) == 0x7F else character
