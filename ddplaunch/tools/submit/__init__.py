"""`ddplaunch submit`: makes a batch script of a job, hands it to sbatch, and waits for the job if --wait or --follow asks for it.

Checks the job before, for what would make it fail hours later. Decides nothing about workers.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import chdir
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.cluster.checks import has_nnodes_given, nnodes_as_typed
from ddplaunch.plan.variables import without_other_places, without_worker_place
from ddplaunch.record.folders import BAD_NODES, bad_nodes_file
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.program import check as check_program
from ddplaunch.system.errors import LaunchError, say, tell
from ddplaunch.system.exitcodes import NOT_FOUND, OK
from ddplaunch.system.process.apart import disk_watch_paused
from ddplaunch.system.process.files import exists_on_disk
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import why_failed
from ddplaunch.tools.submit import output, script
from ddplaunch.tools.submit.output import is_complete
from ddplaunch.tools.submit.script import KNOWN, SHORT, USAGE, SbatchOption, SubmitRequest

if TYPE_CHECKING:
    from ddplaunch.tools.submit.follow import Submitted


# parses the arguments behind --, with the variables of the job: gives how many of them are SCRIPT and its arguments, and the job
ParseJob = Callable[[Sequence[str], Mapping[str, str]], tuple[int, JobSpec]]


# variables of a job, which must not come from another job in which it is submitted: a batch script with SLURM_STEP_ID looks like
# a step, and what an outer job asked for (SLURM_CPUS_PER_TASK, SLURM_TRES_PER_TASK, ...) srun takes for options of the inner one
_PREFIXES_OF_JOB = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "_SLURM_",
    "SBATCH_CPU_BIND",
    "SBATCH_MEM_BIND",
    "SBATCH_THREADS_PER_CORE",
)
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SLURM_DEBUG_FLAGS")
# what Slurm granted to the outer job on that host
_DEVICES_OF_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
_HINT_ELSEWHERE = "submit from a host of a Slurm cluster; --print shows the script anywhere"
_SCONTROL_TIMEOUT = 5.0  # seconds
_SUBMITTED_JOB = re.compile(r"^(\d+)(?:;(\S+))?$", re.MULTILINE)  # sbatch(1), --parsable


class Draft(Struct, frozen=True, kw_only=True):
    """A job that is ready to be submitted."""

    script: str
    folder: str  # its working directory
    output: tuple[str, ...]  # patterns of the paths of its stdout and, if that is another one, of its stderr
    name: str
    append: bool  # to those files
    options: tuple[SbatchOption, ...]  # those that were typed, and the nodes that are left out


def draft(
    request: SubmitRequest, env: Mapping[str, str], command: Sequence[str], parse_job: ParseJob, verbs: Sequence[str]
) -> Draft:
    """Check the request and write the script, in which `command` starts ddplaunch; `verbs` are all verbs of ddplaunch.

    Raises:
        LaunchError: the job would fail, or an option is wrong.
    """
    folder = request.value("chdir")
    if folder is not None and not os.path.isdir(folder):
        hint = None if os.path.isabs(folder) else f"looked in {os.getcwd()}"
        raise LaunchError(f"--chdir {folder}: there is no such folder", hint=hint)
    with chdir(folder or os.curdir):
        job_env = exported(without_outer_job(env), request.value("export") or env.get("SBATCH_EXPORT"))
        # if there is a file run, the file is the script
        has_verb = request.job[:1] == ("run",) and not os.path.lexists("run")
        job = request.job[1:] if has_verb else request.job
        try:
            program_words, spec = parse_job(job, job_env)
        except LaunchError as error:
            raise _with_hint_for_sbatch(error) from None
        request = _avoid_bad_nodes(request, spec, env)
        script_options = script.options_in_script(request, spec)
        open_mode = _value_for_sbatch("open-mode", script_options, request, env)
        made = Draft(
            # a script with the name of a verb would be taken for the verb
            script=script.text(script_options, command, ("run", *job) if job[0] in verbs else job, program_words),
            folder=os.getcwd(),
            output=tuple(
                filter(None, (_value_for_sbatch(name, script_options, request, env) for name in ("output", "error")))
            ),
            name=_value_for_sbatch("job-name", script_options, request, env),
            append=open_mode[:1] in ("a", "A"),  # sbatch reads only this letter
            options=request.options,
        )
        check(request, spec, {**job_env, "PATH": env.get("PATH", os.defpath)})
        for pattern in made.output:
            check_output(output.expand(pattern, {"x": made.name}), pattern)
    if spec.verbosity >= 0:
        _warn_of_secrets(request.job)
    return made


def _warn_of_secrets(job: Sequence[str]) -> None:
    """Say that a secret among the arguments stands in the script, which could not run without it."""
    redactor = Redactor()
    redactor.argv(job)
    if redactor.hidden:
        what = "a likely secret" if redactor.hidden == 1 else f"{redactor.hidden} values that look like secrets"
        tell(
            f"ddplaunch: warning: the script holds {what}, and Slurm keeps a copy of it: "
            "`--env-file FILE` keeps secrets out of it, else let its file have mode 0700\n"
        )


def _avoid_bad_nodes(request: SubmitRequest, spec: JobSpec, env: Mapping[str, str]) -> SubmitRequest:
    """Return the request without the nodes that have failed lately in jobs of Slurm, if that is asked for; else warn of them."""
    path = bad_nodes_file(env)
    now = time.time()
    try:
        if not path or not exists_on_disk([path], BAD_NODES):  # nothing is remembered
            return request
        from ddplaunch.record import bad_nodes

        failures = [one for one in bad_nodes.read(path, now) if one.in_slurm]
    except LaunchError as error:
        if spec.verbosity >= 0:
            say(f"warning: {error.message}")
        return request
    failed_hosts = dict.fromkeys(one.host for one in failures)
    if not failed_hosts:
        return request
    if not spec.avoid_bad_nodes:
        if spec.verbosity >= 0:
            failures_by_host = bad_nodes.among(failures, failed_hosts)
            say(f"warning: {bad_nodes.warning(failures_by_host, now)}")
        return request
    # sbatch refuses a name that it does not know; if Slurm does not tell the names, all are taken for known
    names_known = _known_nodes(request, env) or failed_hosts
    bad = bad_nodes.among(failures, names_known)
    if not bad:
        return request
    others = [option for option in request.options if option.name != "exclude"]
    excluded = ",".join(filter(None, (request.value("exclude"), *bad)))
    return replace(request, options=(*others, SbatchOption("exclude", excluded)))


def _known_nodes(request: SubmitRequest, env: Mapping[str, str]) -> Collection[str]:
    """Return the nodes of the cluster to which the job is submitted; none if Slurm does not tell them."""
    from ddplaunch.reach.slurm.scontrol import ScontrolError, parse_nodes, scontrol

    no_defaults: tuple[SbatchOption, ...] = ()
    clusters = _value_for_sbatch("clusters", no_defaults, request, env)
    where = (f"--clusters={clusters}",) if clusters else ()
    try:
        shown = scontrol(without_outer_job(env), (*where, "--all", "show", "nodes", "-o"), _SCONTROL_TIMEOUT)
        return parse_nodes(shown)
    except ScontrolError:
        return ()


def send(made: Draft, request: SubmitRequest, env: Mapping[str, str], show: Callable[[str], int]) -> int:
    """Submit the job, print its id, wait if that is asked, and give the exit status; `show` prints to stdout."""
    from ddplaunch.tools.submit import follow  # --print needs none of it

    tails = []  # of output files whose paths do not depend on the id of the job, and that may exist already
    if request.follow:
        paths = [output.expand(pattern, {"x": made.name, "%": "%"}) for pattern in made.output]
        fixed = [os.path.join(made.folder, path) for path in paths if output.is_complete(path)]
        tails = [output.tail_of_existing(path, append=made.append) for path in fixed]
    # the options of the script once more on the command line, where they override SBATCH_ variables
    job = _sbatch(made.script, [option.argument for option in made.options], env)
    if job is None:  # --test-only
        return OK
    # %a: each element of an array has its number
    known = {"A": job.id, "a": "*", "j": job.id, "x": made.name, "%": "%"}
    stdout = output.expand(made.output[0], known)
    path = output.shown(os.path.join(made.folder, stdout), os.getcwd())
    message = f"ddplaunch: job {job.id} is submitted; its output goes to {path}"
    if request.follow:
        follow.notify(message)  # on stderr: stdout is for the output of the job
    else:
        show(job.parsable if request.parsable else message)
    if not (request.wait or request.follow):
        return OK
    return follow.wait(job, tails=tails, follow=request.follow)


def exported(env: Mapping[str, str], export: str | None) -> Mapping[str, str]:
    """Return the variables that a job gets with this --export of sbatch: ALL (None too), NONE, NIL or names, some with values."""
    parts = (export or "ALL").split(",")
    kept = dict(env) if "ALL" in parts else {}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            kept[name] = value
        elif name in env:
            kept[name] = env[name]
    return kept


def _value_for_sbatch(name: str, asked: Sequence[SbatchOption], request: SubmitRequest, env: Mapping[str, str]) -> str:
    """Return the value that sbatch will use: the command line's, else its variable's, else the script's."""
    default = next((option.value for option in asked if option.name == name), None)
    return request.value(name) or env.get(f"SBATCH_{name.upper().replace('-', '_')}") or default or ""


def _with_hint_for_sbatch(error: LaunchError) -> LaunchError:
    """Return the same error, with a better hint for an option of sbatch behind --."""
    name = error.message.removesuffix(" is not an option").lstrip("-")
    if name == error.message or (name not in KNOWN and name not in SHORT):
        return error
    return LaunchError(f"{error.message} of ddplaunch, but one of sbatch", hint=f"type it before --: {USAGE}")


# --- sbatch


def _sbatch(text: str, options: Sequence[str], env: Mapping[str, str]) -> Submitted | None:
    """Run sbatch with this script and these options and return the job; None after --test-only."""
    import subprocess  # --print runs nothing

    from ddplaunch.tools.submit.follow import Submitted, notify

    try:
        with disk_watch_paused():
            done = subprocess.run(
                ["sbatch", "--parsable", *options],
                check=False, input=text, capture_output=True, encoding="utf-8", errors="surrogateescape",
                env=without_outer_job(env),
            )  # fmt: skip
    except FileNotFoundError:
        raise LaunchError("sbatch is not on PATH", hint=_HINT_ELSEWHERE, status=NOT_FOUND) from None
    except OSError as error:
        raise LaunchError(f"sbatch: {why_failed(error)}") from None
    if done.returncode:
        status = 128 - done.returncode if done.returncode < 0 else done.returncode
        if "establish a configuration source" in done.stderr:  # there is no slurm.conf
            raise LaunchError("no Slurm configured here", hint=_HINT_ELSEWHERE, status=status)
        raise LaunchError(f"sbatch failed: {_reason(done.stderr)}", status=status)
    found = _SUBMITTED_JOB.findall(done.stdout)
    # a site may print messages at each submission
    if message := f"{done.stderr}{_SUBMITTED_JOB.sub('', done.stdout)}".strip():
        notify(message)
    if not found:
        return None
    job_id, cluster = found[-1]
    return Submitted(id=job_id, cluster=cluster or None)


def without_outer_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for sbatch, which it exports to the job: none of a job, task or worker in which this is run."""
    kept = without_other_places(without_worker_place(env), rank=None, world_size=0)  # whatever place the variables name
    is_in_job = "SLURM_JOB_ID" in env or "SLURM_JOBID" in env
    if not is_in_job:
        return kept
    of_job = {name for name in kept if name.startswith(_PREFIXES_OF_JOB) or name in _DEVICES_OF_JOB}
    of_job -= {*_OF_THE_CLUSTER}
    return {name: value for name, value in kept.items() if name not in of_job}


def _reason(stderr: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").rstrip(".") for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try ")) or "no message"


# --- what would make the job fail hours later, when it runs


_NUMBER_OF_NODES = re.compile(r"(\d+)(?:-(\d+))?")


def check(request: SubmitRequest, spec: JobSpec, env: Mapping[str, str]) -> None:
    """Check the job and the options of sbatch, in the working directory of the job.

    Raises:
        LaunchError: the job would fail, hours later, when it runs.
    """
    _refuse_contradictions(request)
    check_program(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    for name in ("hostfile", "token_file"):
        if (path := getattr(spec, name)) is not None:
            try:
                with open(path, "rb"):  # it can be read
                    pass
            except OSError as error:
                raise LaunchError(f"{spec.typed(name, path)}: {why_failed(error)}") from None
    _check_nodes(request, spec)
    if spec.requeue_on and request.has("no-requeue"):
        raise LaunchError(
            f"--no-requeue of sbatch and {spec.origin('requeue_on')} do not go together",
            hint="leave one out: --requeue-on needs a job that may be requeued",
        )
    if option := spec.terminal_option:
        raise LaunchError(
            f"{option}: a batch job has no terminal",
            hint="debug it in an allocation of `salloc`, or of `srun --pty bash`",
        )


def check_output(path: str, pattern: str) -> None:
    """Check the folder of an output file, which Slurm does not create: the job would fail without a message."""
    folder = os.path.dirname(path) or os.curdir
    if not is_complete(folder):  # it has a % left, as for the job's id, which nobody knows yet
        return
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


def _refuse_contradictions(request: SubmitRequest) -> None:
    """Refuse options of `ddplaunch submit` that contradict each other."""
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


def _check_nodes(request: SubmitRequest, spec: JobSpec) -> None:
    """Refuse a --nodes of sbatch that contradicts the number of nodes of the job (--nnodes, and spares in reserve)."""
    found = _NUMBER_OF_NODES.fullmatch(request.value("nodes") or "")
    if found is None:
        return
    given = int(found[1])  # the minimum
    if spec.standalone and given > 1:
        raise LaunchError(
            f"--nodes {found[0]} of sbatch and {spec.origin('standalone')} do not go together",
            hint="--standalone means one node: leave one out",
        )
    least, most = spec.nnodes
    least += spec.spares  # `most` counts them already
    has_nnodes = has_nnodes_given(spec)  # typed, or from a file or variable
    if spec.spares and given < least:
        option = nnodes_as_typed(spec) if has_nnodes else spec.typed("spares", spec.spares)
        raise LaunchError(
            f"--nodes {found[0]} of sbatch is too few for {option}",
            hint=f"type `--nodes {least}`: it counts the spares, too",
        )
    if has_nnodes and not least <= given <= most:
        raise LaunchError(
            f"--nodes {found[0]} of sbatch and {nnodes_as_typed(spec)} do not go together",
            hint="leave --nnodes out: the job has all nodes that Slurm gives it",
        )
