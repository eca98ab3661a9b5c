"""Checks a job before it is queued, for what would make it fail hours later when it runs. Reads files; changes nothing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping

from ddplaunch.errors import LaunchError
from ddplaunch.options.parsers import write_nnodes
from ddplaunch.process.program import check as check_program
from ddplaunch.slurm.submit.output import is_complete
from ddplaunch.slurm.submit.request import SubmitRequest
from ddplaunch.spec import JobSpec
from ddplaunch.words import why_failed

_NODES = re.compile(r"(\d+)(?:-(\d+))?")


def check(request: SubmitRequest, spec: JobSpec, env: Mapping[str, str]) -> None:
    """Check the job and the options of sbatch, in the working directory of the job.

    Raises:
        LaunchError: the job would fail, or the options contradict each other.
    """
    _together(request)
    check_program(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    for name in ("hostfile", "token_file"):
        path = getattr(spec, name)
        if path is not None:
            _readable(path, spec.asked(name, path))
    _nodes(request, spec)
    if spec.requeue_on and request.has("no-requeue"):
        raise LaunchError(
            f"--no-requeue of sbatch and {spec.origin('requeue_on')} do not go together",
            hint="leave one out: --requeue-on needs a job that may be requeued",
        )
    if asked := spec.wants_terminal:
        raise LaunchError(
            f"{asked}: a batch job has no terminal",
            hint="debug it in an allocation of `salloc`, or of `srun --pty bash`",
        )


def check_output(path: str, pattern: str) -> None:
    """Check the folder of an output file, which Slurm does not create: the job would fail without a message.

    Raises:
        LaunchError: it does not exist, or cannot be written.
    """
    folder = os.path.dirname(path) or os.curdir
    if not is_complete(folder):
        return  # it depends on the job's id
    if not os.path.isdir(folder):
        raise LaunchError(
            f"output {pattern}: the folder {folder} does not exist, and Slurm does not create it",
            hint=f"type `mkdir -p {shlex.quote(folder)}`",
        )
    if not os.access(path if os.path.lexists(path) else folder, os.W_OK):
        raise LaunchError(
            f"output {pattern}: {path if os.path.lexists(path) else os.path.abspath(folder)} cannot be written",
            hint="name a file elsewhere: --output FOLDER/%x-%j.out",
        )


def _together(request: SubmitRequest) -> None:
    for first, second, hint in (
        ("follow", "parsable", "both write to stdout: leave one out"),
        ("follow", "print", "--print runs no job whose output could be shown: leave one out"),
        ("wait", "print", "--print runs no job to wait for: leave one out"),
    ):
        if getattr(request, first) and getattr(request, second):
            raise LaunchError(f"--{first} and --{second} do not go together", hint=hint)
    if (request.follow or request.wait) and request.has("test-only"):
        raise LaunchError("--test-only submits nothing to wait for", hint="leave one out")
    if request.follow and request.has("array"):
        raise LaunchError(
            "--follow shows the output of one job, not of an array",
            hint="type --wait, and read the files of its elements with tail -F",
        )


def _nodes(request: SubmitRequest, spec: JobSpec) -> None:
    found = _NODES.fullmatch(request.value("nodes") or "")
    if found is None:
        return
    given = int(found[1])  # the minimum
    if spec.standalone and given > 1:
        raise LaunchError(
            f"--nodes {found[0]} of sbatch and {spec.origin('standalone')} do not go together",
            hint="--standalone means one node: leave one out",
        )
    min_nodes, max_nodes = spec.nnodes
    if "nnodes" in spec.origins and not min_nodes <= given <= max_nodes:
        raise LaunchError(
            f"--nodes {found[0]} of sbatch and {spec.asked('nnodes', write_nnodes(spec.nnodes))} do not go together",
            hint="leave --nnodes out: the job has all nodes that Slurm gives it",
        )


def _readable(path: str, asked: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise LaunchError(f"{asked}: {why_failed(error)}") from None
