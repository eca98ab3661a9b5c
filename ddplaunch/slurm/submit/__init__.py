"""`ddplaunch submit`: makes a batch script of a job, hands it to sbatch, and waits for the job if that is asked.

The decisions are pure: `words` reads the command line, `script` writes the script, `state` judges what Slurm says of the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, nullcontext

from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import OK
from ddplaunch.record import record
from ddplaunch.slurm.submit import args, output_paths, script, tail
from ddplaunch.slurm.submit.args import Request, SbatchOption, split
from ddplaunch.slurm.submit.check import check, check_output
from ddplaunch.slurm.submit.sbatch_options import KNOWN, SHORT
from ddplaunch.spec import JobSpec

__all__ = ["Draft", "Understand", "draft", "exported", "send", "split"]

# where the words behind -- are understood: gives the number of those that are SCRIPT and its arguments, and the job
Understand = Callable[[Sequence[str], Mapping[str, str]], tuple[int, JobSpec]]


@record(kw_only=True)
class Draft:
    """A job that could be submitted."""

    script: str
    folder: str  # in which it will run
    output: tuple[str, ...]  # patterns of the files of its stdout and, if that is another one, of its stderr
    name: str
    append: bool  # to those files


def draft(
    request: Request, env: Mapping[str, str], command: Sequence[str], understand: Understand, verbs: Sequence[str]
) -> Draft:
    """Check what is asked for and write the script, in which `command` starts ddplaunch, which has these verbs.

    Raises:
        LaunchError: the job cannot be what is meant.
    """
    with _folder(request):
        job_env = exported(env, request.value("export") or env.get("SBATCH_EXPORT"))
        job = request.job[1:] if request.job[:1] == ("run",) and not os.path.lexists("run") else request.job
        try:
            program, spec = understand(job, job_env)
        except LaunchError as error:
            raise _misplaced(error) from None
        asked = script.options(request, spec)
        made = Draft(
            # a script that is called like a verb would be taken for one
            script=script.text(asked, command, ("run", *job) if job[0] in verbs else job, program),
            folder=os.getcwd(),
            output=tuple(filter(None, (_given(name, asked, request, env) for name in ("output", "error")))),
            name=_given("job-name", asked, request, env),
            append=_given("open-mode", asked, request, env)[:1] in ("a", "A"),  # sbatch looks at no more
        )
        check(request, spec, {**job_env, "PATH": env.get("PATH", os.defpath)})
        for pattern in made.output:
            check_output(output_paths.expand(pattern, {"x": made.name}), pattern)
    return made


def send(made: Draft, request: Request, env: Mapping[str, str], show: Callable[[str], int]) -> int:
    """Submit the job, tell its number, wait if that is asked, and give the status; `show` prints to stdout.

    Raises:
        LaunchError: it is not submitted.
    """
    from ddplaunch.slurm.submit import follow, sbatch  # to print a script takes neither

    noted = [tail.before(path, append=made.append) for path in _fixed(made)] if request.follow else []
    # once more on the command line: there they win over SBATCH_ variables, as what is typed does
    job = sbatch.submit(made.script, [option.word for option in request.options], env)
    if job is None:
        return OK
    said = f"ddplaunch: job {job.id} is submitted; its output goes to {_output(made, job.id)}"
    if request.follow:
        follow.say(said)
    else:
        show(job.parsable if request.parsable else said)
    return follow.wait(job, tails=noted, follow=request.follow) if request.wait or request.follow else OK


def exported(env: Mapping[str, str], export: str | None) -> Mapping[str, str]:
    """Give the variables that reach a job with this --export of sbatch: ALL, NONE, NIL or names, some with values."""
    parts = (export or "ALL").split(",")
    kept = dict(env) if "ALL" in parts else {}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            kept[name] = value
        elif name in env:
            kept[name] = env[name]
    return kept


def _folder(request: Request) -> chdir[str] | nullcontext[None]:
    """The folder in which the job will run, as a context."""
    folder = request.value("chdir")
    if folder is None:
        return nullcontext()
    if not os.path.isdir(folder):
        raise LaunchError(f"--chdir {folder}: there is no such folder", hint="paths are taken from where you submit")
    return chdir(folder)


def _given(name: str, asked: Sequence[SbatchOption], request: Request, env: Mapping[str, str]) -> str:
    """What Slurm will take for this option: what is typed, else the variable of sbatch, else what the script says."""
    default = next((option.value for option in asked if option.name == name), None)
    return request.value(name) or env.get(f"SBATCH_{name.upper().replace('-', '_')}") or default or ""


def _misplaced(error: LaunchError) -> LaunchError:
    """The same error, but with a better hint for an option of sbatch that stands behind --."""
    name = error.message.removesuffix(" is not an option").lstrip("-")
    if name == error.message or (name not in KNOWN and name not in SHORT):
        return error
    return LaunchError(f"{error.message} of ddplaunch, but one of sbatch", hint=f"type it before --: {args.USAGE}")


def _fixed(made: Draft) -> list[str]:
    """The output files whose paths do not depend on the number of the job, so that they may be there already."""
    found = (output_paths.expand(pattern, {"x": made.name, "%": "%"}) for pattern in made.output)
    return [os.path.join(made.folder, path) for path in found if output_paths.is_whole(path)]


def _output(made: Draft, job_id: str) -> str:
    known = {"A": job_id, "a": "*", "j": job_id, "x": made.name, "%": "%"}
    return output_paths.shown(os.path.join(made.folder, output_paths.expand(made.output[0], known)), os.getcwd())
