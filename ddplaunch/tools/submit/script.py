"""What was asked of `ddplaunch submit`, the options of sbatch, and the batch script that is made of both. Pure.

The script is plain, so that a user who does not know ddplaunch can read, change and submit it.
"""

from __future__ import annotations

import os
import shlex
import string
from collections.abc import Sequence

from msgspec import Struct

from ddplaunch.spec.job import JobSpec, ProgramKind

# The options of sbatch, from sbatch(1) of Slurm 22.05, and what later versions added up to 25.05. One that is missing here can
# still be typed.
# fmt: off
VALUED = frozenset((
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters", "comment",
    "constraint", "container", "container-id", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task",
    "deadline", "delay-boot", "dependency", "distribution", "error", "exclude", "export", "export-file", "extra",
    "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres",
    "gres-flags", "hint", "input", "job-name", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label",
    "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "nodes", "ntasks",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output", "partition", "power",
    "prefer", "priority", "profile", "qos", "reservation", "segment", "signal", "sockets-per-node", "switches",
    "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "wait-all-nodes",
    "wckey", "wrap",
))
OPTIONAL = frozenset((  # a value only behind =
    "exclusive", "get-user-env", "nice", "no-kill", "oom-kill-step", "propagate", "resv-ports",
))
FLAGS = frozenset((
    "consolidate-segments", "contiguous", "help", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe",
    "parsable", "quiet", "reboot", "requeue", "spread-job", "spread-segments", "stepmgr", "test-only", "usage",
    "use-min-nodes", "verbose", "version", "wait",
))
SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec",
    "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error",
    "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}
# fmt: on
KNOWN = VALUED | OPTIONAL | FLAGS

USAGE = "ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]..."


class SbatchOption(Struct, frozen=True):
    """One option, with its full name if that is known."""

    name: str  # "partition"; "Z" for an unknown short one
    value: str | None = None

    @property
    def argument(self) -> str:
        """The option as one argument of sbatch."""
        dashes = "-" if len(self.name) == 1 else "--"
        between = "" if len(self.name) == 1 else "="
        return f"{dashes}{self.name}" if self.value is None else f"{dashes}{self.name}{between}{self.value}"


class SubmitRequest(Struct, frozen=True, kw_only=True):
    """The parsed command line."""

    options: tuple[SbatchOption, ...] = ()  # each name once
    print: bool = False
    wait: bool = False
    follow: bool = False
    parsable: bool = False
    job: tuple[str, ...] = ()  # options of ddplaunch, SCRIPT and its arguments

    def has(self, *names: str) -> bool:
        """Whether sbatch gets one of these."""
        return any(option.name in names for option in self.options)

    def value(self, name: str) -> str | None:
        """The value that sbatch gets for this."""
        return next((option.value for option in self.options if option.name == name), None)


# --- the script


WIDTH = 100  # columns; a command that is longer is broken where an option begins

_INDENT = "    "
_BREAK = " \\\n" + _INDENT
# about the output of sbatch itself, not about the job
_FOR_SBATCH_ALONE = ("quiet", "verbose", "test-only")
_OPTIONS_OF_TASKS = ("ntasks-per-node", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket")
_SLURM_COUNTS_NODES_BY = ("nodelist", "nodefile", "ntasks", "gpus")  # where --nodes is left out
_PLAIN = frozenset(string.ascii_letters + string.digits + "@%+=:,./_-[]*")
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F)} | str.maketrans({
    "\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'",
})  # fmt: skip


def options_in_script(request: SubmitRequest, spec: JobSpec) -> tuple[SbatchOption, ...]:
    """Return the options in the script: those that were typed, and defaults."""
    least, most = spec.nnodes
    least += spec.spares  # Slurm gives the spares (nodes in reserve), too
    nodes = f"{least}" if least >= most else f"{least}-{most}"
    would_lack_spares = spec.spares and not request.has(*_SLURM_COUNTS_NODES_BY)  # since Slurm would give one node
    defaults = [
        *([SbatchOption("nodes", nodes)] if "nnodes" in spec.origins or would_lack_spares else []),
        *([SbatchOption("ntasks-per-node", "1")] if not request.has(*_OPTIONS_OF_TASKS) else []),
        SbatchOption("output", "%x-%A_%a.out" if request.has("array") else "%x-%j.out"),
        # else Slurm ends the whole job with the first node that is lost
        *([SbatchOption("no-kill")] if spec.spares or least < most else []),
        # a requeued job continues in the same file
        SbatchOption("open-mode", "append"),
        *([SbatchOption("requeue")] if spec.requeue_on else []),
    ]
    name = [] if request.has("job-name") else [SbatchOption("job-name", job_name(spec))]
    typed = [option for option in request.options if option.name not in _FOR_SBATCH_ALONE]
    return (*name, *typed, *(option for option in defaults if not request.has(option.name)))


def text(asked: Sequence[SbatchOption], command: Sequence[str], job: Sequence[str], program_words: int) -> str:
    """Write the script: `command` starts ddplaunch with the arguments `job`.

    The last `program_words` of these are SCRIPT and its arguments, which begin on a line of their own.
    """
    lines = [
        "#!/bin/bash",
        *(_directive(option) for option in asked),
        "",
        "# ddplaunch starts the workers on all nodes of the job, stops them together, and ends with their status.",
        "# exec: it takes the place of this script, so that it gets the signals that Slurm sends.",
        _command(["exec", *command], job, program_words),
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


def _directive(option: SbatchOption) -> str:
    """Return a line for sbatch, which takes quotes and backslashes as a shell does, but knows no $ and no `."""
    dashes, between = ("-", " ") if len(option.name) == 1 else ("--", "=")
    line, value = f"#SBATCH {dashes}{option.name}", option.value
    if value is None:
        return line
    if not value or not _PLAIN.issuperset(value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{line}{between}{value}"


def _command(command: Sequence[str], job: Sequence[str], program_words: int) -> str:
    """Return the command line of the job; a long line is broken between arguments, never behind an option's flag.

    The program and its arguments, the last `program_words` of `job`, begin on a line of their own.
    """
    whole = " ".join(map(quote, (*command, *job)))
    if len(whole) <= WIDTH:
        return whole
    lines = [" ".join(map(quote, command))]
    program_at = len(job) - program_words
    for part in (job[:program_at], job[program_at:]):
        lines += _fill_lines(_with_values(part))
    return _BREAK.join(lines)


def _with_values(argv: Sequence[str]) -> list[str]:
    """Return the quoted arguments, an option and its value in one."""
    groups: list[str] = []
    for at, argument in enumerate(argv):
        if at and argv[at - 1].startswith("-") and not argument.startswith("-"):
            groups[-1] += f" {quote(argument)}"
        else:
            groups.append(quote(argument))
    return groups


def _fill_lines(groups: Sequence[str]) -> list[str]:
    """Return them filled into lines."""
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
    return "$'" + argument.translate(_ESCAPES) + "'"
