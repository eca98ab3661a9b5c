"""Runs `scontrol`, which may be missing in a container, and reads what it shows of jobs and nodes. Interprets nothing of them."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial

from msgspec import Struct

_MARGIN = 1.0  # seconds for the process that runs scontrol to report a timeout, beyond the time of scontrol
# as Slurm 22.05 writes it; the second one of `scontrol requeue`
_NO_REPLY = re.compile(
    r"Unable to contact slurm controller|Unexpected message received|[Tt]imed out|Zero Bytes|[Cc]ontroller (is )?in standby"
)
_FIELD = re.compile(r"(?:^| )([A-Z][\w/:&]*)=(.*?)(?= [A-Z][\w/:&]*=|\s*$)")
_GRANT = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_UNSET = ("None", "Unknown", "N/A", "(null)")  # of times and lists of nodes


class ScontrolError(Exception):
    """slurmctld does not reply, or scontrol cannot be run; the text says why, as in a sentence."""


class ScontrolMissing(ScontrolError):
    """scontrol is not installed."""


class Unreachable(ScontrolError):
    """slurmctld does not reply: it is restarted, or very busy."""


class UnknownJob(ScontrolError):
    """slurmctld knows no such job: there never was one, or it ended some minutes ago (MinJobAge)."""


def is_unconfigured(error: ScontrolError) -> bool:
    """Whether scontrol found no slurm.conf, and no host that has one."""
    return "configuration source" in str(error)


def scontrol(env: Mapping[str, str], arguments: Sequence[str], timeout: float) -> str:
    """Run scontrol and give its output; `timeout` in seconds.

    Raises:
        ScontrolError: it fails, or does not reply in time.
    """
    from ddplaunch.system.process.ask import AskedEnded, ask  # few jobs need it

    try:
        # the program scontrol may be read from a file server that does not answer: then even SIGKILL does not end it. So another
        # process runs it, which is left behind then
        return ask(partial(_run, env, arguments, timeout), timeout + _MARGIN)
    except TimeoutError:
        raise ScontrolError(f"scontrol timed out after {timeout:g} s") from None
    except AskedEnded as error:  # that process has ended without a result
        raise ScontrolError(f"scontrol cannot be run ({error})") from None
    except OSError as error:
        raise ScontrolError(f"scontrol cannot be run ({error.strerror})") from None


def _run(env: Mapping[str, str], arguments: Sequence[str], timeout: float) -> str:
    """Run scontrol and return its stdout; raise ScontrolMissing, Unreachable, or ScontrolError with its last line."""
    import subprocess  # takes 10 ms, and few jobs need it

    def prepare() -> None:
        """Ignore SIGTERM, since Slurm may send it to all processes of the job just now; unblock all other signals."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            env={**env, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            start_new_session=True,  # Ctrl-C must not end it
            preexec_fn=prepare,  # which is safe, since this process has no threads
        )
    except FileNotFoundError:
        raise ScontrolMissing("scontrol is not on PATH") from None
    except OSError as error:
        raise ScontrolMissing(f"scontrol cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"scontrol timed out after {timeout:g} s{_said(error.stderr)}") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = f"scontrol: {lines[-1]}" if lines else f"scontrol ended with status {done.returncode}"
        raise Unreachable(reason) if _NO_REPLY.search(reason) else ScontrolError(reason)
    return done.stdout.decode(errors="surrogateescape")


def _said(stderr: bytes | None) -> str:
    """Return what scontrol has written until it timed out, to follow a statement; "" for nothing.

    Where the authentication service does not answer, scontrol tries for minutes: of its lines the one about munge tells most.
    """
    lines = [one.removeprefix("scontrol: error: ") for one in (stderr or b"").decode(errors="replace").splitlines()]
    of_munge = (one for one in lines if one.startswith("Munge "))
    said = next(of_munge, lines[-1] if lines else "").strip()
    return f": {said}" if said else ""


# --- what it shows


class JobRecord(Struct, frozen=True, kw_only=True):
    """A job, or one element of an array, as slurmctld describes it."""

    id: str
    user: str = ""
    uid: int | None = None
    state: str  # "RUNNING"; newer versions may join several: "CANCELLED,COMPLETING"
    reason: str = "None"
    restarts: int = 0
    is_batch: bool = True
    may_requeue: bool = True
    preempted_at: str = ""  # "2026-11-21T19:40:51", "" for not at all
    submitted_at: str = ""
    started_at: str = ""
    ends_at: str = ""
    name: str = ""
    array_id: str = ""  # "" for a job that is no array
    array_index: str = ""  # of a pending array, the elements that have not begun: "2-3%1"
    nodes: str = ""  # a host list
    batch_host: str = ""
    exit_code: str = "0:0"  # the exit status of the script, and the signal that ended it
    run_time: str = "00:00:00"
    stdout: str = ""  # a path, in which some patterns are not expanded
    stderr: str = ""
    # with `details`: (host list, GRES on each of these nodes: "gpu:a100:2(IDX:0-1)")
    grants: tuple[tuple[str, str], ...] = ()

    @property
    def states(self) -> frozenset[str]:
        """The state and its flags."""
        return frozenset(re.split(r"[,+]", self.state))

    @property
    def queued(self) -> float | None:
        """The seconds from its submission, or from when it was requeued, to its start; None if Slurm does not say them."""
        try:
            submitted, started = map(datetime.fromisoformat, (self.submitted_at, self.started_at))
        except ValueError:
            return None
        return max(0.0, (started - submitted).total_seconds())

    @property
    def element(self) -> str:
        """The id of an element of an array: "84_3"; "" for a job that is none."""
        return f"{self.array_id}_{self.array_index or self.id}" if self.array_id else ""


def show_jobs(
    env: Mapping[str, str], job_id: str, timeout: float, *, cluster: str | None = None, details: bool = False
) -> tuple[JobRecord, ...]:
    """Return the records of a job; an array has one for each element, a heterogeneous job one for each component.

    Raises:
        UnknownJob: there is no such job.
        ScontrolError: there is no reply for now.
    """
    where = () if cluster is None else (f"--clusters={cluster}",)
    more = ("-d",) if details else ()  # shows which devices were granted on each node
    try:
        return parse_jobs(scontrol(env, (*where, "show", "job", *more, "-o", job_id), timeout))
    except ScontrolError as error:
        if "Invalid job id" in str(error):
            raise UnknownJob(str(error)) from None
        raise


def parse_jobs(output: str) -> tuple[JobRecord, ...]:
    """Return the jobs in the output of `scontrol show job -o`; lines that describe none are left out."""
    lines = output.splitlines()
    return tuple(_parse_job(line) for line in lines if line.startswith("JobId=") and " JobState=" in line)


def _parse_job(line: str) -> JobRecord:
    """Return the record in a line of `scontrol show job -o`."""
    fields = dict(_FIELD.findall(line))

    def known(name: str) -> str:
        return "" if (value := fields.get(name, "")) in _UNSET else value

    restarts = fields.get("Restarts", "")
    user, _, uid = fields.get("UserId", "").rstrip(")").partition("(")
    return JobRecord(
        id=fields["JobId"],
        user=user,
        uid=int(uid) if uid.isdecimal() else None,
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        is_batch=fields.get("BatchFlag") != "0",
        may_requeue=fields.get("Requeue") != "0",
        preempted_at=known("PreemptTime"),
        submitted_at=known("SubmitTime"),
        started_at=known("StartTime"),
        ends_at=known("EndTime"),
        name=fields.get("JobName", ""),
        array_id=fields.get("ArrayJobId", ""),
        array_index=fields.get("ArrayTaskId", ""),
        nodes=known("NodeList"),
        batch_host=fields.get("BatchHost", ""),
        exit_code=fields.get("ExitCode", "0:0"),
        run_time=fields.get("RunTime", "00:00:00"),
        stdout=fields.get("StdOut", ""),
        stderr=fields.get("StdErr", ""),
        grants=tuple(_GRANT.findall(line)),
    )


def parse_nodes(output: str) -> dict[str, frozenset[str]]:
    """Return the states of each node, without their suffixes such as `*`, from the output of `scontrol show nodes -o`."""
    lines = (dict(_FIELD.findall(line)) for line in output.splitlines() if line.startswith("NodeName="))
    return {node["NodeName"]: frozenset(re.split(r"[^A-Z_]+", node.get("State", ""))) for node in lines}


def node_host_name(env: Mapping[str, str], node: str, timeout: float) -> str:
    """Return the name that a node of Slurm has as a host; "" if Slurm says none. Raises ScontrolError."""
    fields: dict[str, str] = dict(_FIELD.findall(scontrol(env, ("show", "node", "-o", node), timeout)))
    return fields.get("NodeHostName", "")


def parse_config(output: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show config`, "KillWait" as "30 sec"."""
    pairs = (line.partition("=") for line in output.splitlines() if re.match(r"[A-Za-z]\w*\s*=", line))
    return {name.strip(): value.strip() for name, _, value in pairs}
