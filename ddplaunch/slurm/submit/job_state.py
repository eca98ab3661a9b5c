"""What becomes of a job that was submitted: what Slurm says of it, in words, and the status that it ends with. Pure.

Time comes in with what was seen, as monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.exitcodes import NODE_LOST, OK, TIMEOUT, of_signal
from ddplaunch.record import NOTHING, record

RETURN_TIME = 10.0  # seconds after which a job that lost its nodes and may be requeued is over all the same

FAILED = 1  # of a job that Slurm could not start, or whose end nobody knows
_SIGTERM, _SIGKILL = 15, 9
# what a job is in when it is over (squeue(1), JOB STATE CODES), and its status if the script has none to show
_ENDS = {
    "BOOT_FAIL": NODE_LOST,
    "CANCELLED": of_signal(_SIGTERM),
    "COMPLETED": OK,
    "DEADLINE": TIMEOUT,
    "FAILED": FAILED,
    "NODE_FAIL": NODE_LOST,
    "OUT_OF_MEMORY": of_signal(_SIGKILL),
    "PREEMPTED": of_signal(_SIGTERM),
    "REVOKED": FAILED,
    "TIMEOUT": TIMEOUT,
}
_MAY_RETURN = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")
_WORDS = {
    "BOOT_FAIL": "ended since a node did not boot",
    "CANCELLED": "was cancelled",
    "COMPLETED": "completed",
    "DEADLINE": "ended at its deadline",
    "NODE_FAIL": "ended since a node failed",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
    "TIMEOUT": "reached its time limit",
}
_WITH_A_STATUS = (
    "CANCELLED",
    "COMPLETED",
    "FAILED",
)  # in others it is the signal by which Slurm ended it, or a number of its own
_LAST_SIGNAL = 64
_LAUNCH_FAILURE = "JobLaunchFailure"
_FORGOTTEN = "is no longer known to Slurm, so nobody can say how it ended"


@record(kw_only=True)
class End:
    """The end of a job, or of an element of an array."""

    status: int
    words: str  # behind "job 84 "


@record(kw_only=True)
class Seen:
    """What has been seen of a job so far."""

    line: str = ""  # the state that was told last
    ended: Mapping[str, End] = NOTHING  # by element
    doubtful: Mapping[str, float] = NOTHING  # since when an element is in a state that it may leave
    over: bool = False

    @property
    def status(self) -> int:
        """The status of the job; of an array, the worst."""
        return max((end.status for end in self.ended.values()), default=FAILED)


def look(seen: Seen, jobs: Sequence[Mapping[str, str]], at: float) -> tuple[Seen, tuple[str, ...]]:
    """Take what the controller says now; give what is to be told, without the name of the job."""
    ended, doubtful, lines = dict(seen.ended), {}, []
    alive = []
    for job in jobs:
        name = _element(job)
        if _is_over(job, at - seen.doubtful.get(name, at)):
            if name not in ended:
                ended[name] = end_of(job)
                if name and ended[name].status:
                    lines.append(f"{name} {ended[name].words}")
            continue
        if job["JobState"] in _MAY_RETURN:
            doubtful[name] = seen.doubtful.get(name, at)
        else:
            ended.pop(name, None)  # somebody has put it back into the queue
        alive.append(job)
    line = _state(alive) if alive else ""
    if line and line != seen.line:
        lines.append(line)
    if ended and not alive:
        lines.append(_summary(ended))
    return Seen(line=line or seen.line, ended=ended, doubtful=doubtful, over=bool(ended) and not alive), tuple(lines)


def forgotten(seen: Seen) -> Seen:
    """Take that the controller knows the job no more, though it was not seen to end: it forgets jobs after some minutes."""
    return Seen(line=seen.line, ended={**seen.ended, "": End(status=FAILED, words=_FORGOTTEN)}, over=True)


def has_run(job: Mapping[str, str]) -> bool:
    """Whether the job has been started, so that it has output."""
    return job.get("NodeList", "") not in ("", "(null)") and job.get("Reason") != _LAUNCH_FAILURE


def end_of(job: Mapping[str, str]) -> End:
    """Say how a job ended: with the status of its script as a shell has it, or one that tells why it has none."""
    state = job["JobState"]
    if job.get("Reason") == _LAUNCH_FAILURE:
        return End(status=FAILED, words="could not be started: the folder or the file of its output cannot be written, or the "
                                        "node is broken")  # fmt: skip
    status = (_exit_code(job) if state in _WITH_A_STATUS else 0) or _ENDS.get(state, FAILED)
    words = _WORDS.get(state, f"failed with status {status}")
    took = job.get("RunTime", "00:00:00")
    return End(status=status, words=words if took == "00:00:00" else f"{words} after {took}")


def _exit_code(job: Mapping[str, str]) -> int:
    """The status of the script as a shell has it."""
    code, _, number = job.get("ExitCode", "0:0").partition(":")
    return of_signal(int(number)) if 0 < int(number or 0) <= _LAST_SIGNAL else int(code)


def _element(job: Mapping[str, str]) -> str:
    """The name of an element of an array, empty if the job is none."""
    return f"{job['ArrayJobId']}_{job.get('ArrayTaskId', job['JobId'])}" if "ArrayJobId" in job else ""


def _is_over(job: Mapping[str, str], since: float) -> bool:
    state = job["JobState"]
    if state in _MAY_RETURN and job.get("Requeue") == "1":
        return since >= RETURN_TIME
    return state in _ENDS


def _state(jobs: Sequence[Mapping[str, str]]) -> str:
    """What a job does, as a sentence that its name begins; empty if that is not worth a word."""
    running = [job for job in jobs if job["JobState"] == "RUNNING"]
    job = running[0] if running else jobs[0]
    if "ArrayJobId" in job and running:
        return "is running"
    state, reason = job["JobState"], job.get("Reason", "None")
    again = "" if job.get("Restarts", "0") == "0" else f", restart {job['Restarts']}"
    if state == "RUNNING":
        return f"is running on {job.get('NodeList', '')}{again}"
    if state == "PENDING":  # without a reason, nobody has looked at it yet
        return "" if reason == "None" else f"is pending ({reason}){again}"
    return (
        "" if state in ("COMPLETING", "CONFIGURING", *_MAY_RETURN) else f"is {state.lower().replace('_', ' ')}{again}"
    )


def _summary(ended: Mapping[str, End]) -> str:
    if "" in ended:
        return ended[""].words
    worst = max(end.status for end in ended.values())
    return f"ended, with {worst} as the worst status of its elements" if worst else "completed with all of its elements"
