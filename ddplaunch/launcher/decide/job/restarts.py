"""Whether another generation may help, and what it costs: the kind of a failure, and whether steps were made. Pure."""

from __future__ import annotations

import builtins
import re
from math import inf

from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import (
    all_failed_at_same_import,
    failed_itself,
    failure_text,
    follows,
    import_failure,
    searchable,
)
from ddplaunch.launcher.decide.job.state import SELF_ID, Member, State
from ddplaunch.spec.outcome import Why, WorkerExit

_CUDA = ("CUDA error", "CUDA out of memory", "CUBLAS_STATUS_", "CUDNN_STATUS_", "AcceleratorError", "HIP error")
_NCCL = ("NCCL", "DistBackendError")
_TIMED_OUT = ("TimeoutError", "timed out", "Timed out")
# exceptions of networks that are no OSError of Python's own: httpx.ConnectError, huggingface_hub.errors.HfHubHTTPError
_OF_NETWORKS = re.compile(
    r"^(?:aiohttp|botocore|google|httpcore|httpx|huggingface_hub|requests|urllib3?)\.|HTTP|URLError|Connect|Timeout"
)


def kind(state: State, failure: WorkerExit | None) -> str:
    """Return what kind of failure ended the generation: a name that --restart-on takes."""
    if state.why is Why.NODE_LOST:
        return "node-lost"
    if state.why is Why.HUNG or failure is None:
        return "hang"
    if failure.signal is not None and failure.error is None:
        return "killed"
    if import_failure(failure.error):
        return "import"
    text = searchable(failure_text(failure))
    for name, words in (("nccl", _NCCL), ("cuda", _CUDA), ("timeout", _TIMED_OUT)):
        if any(word in text for word in words):
            return name
    if follows(failure):
        return "nccl"
    return "exit" if failure.error is None else "exception"


def why_in_vain(state: State) -> str:
    """Return why no other generation should follow, in a sentence; "" if nothing says so."""
    failure, policy = state.failure, state.policy
    if state.gave_up:
        return _why_given_up(state)
    if policy.restart_on is not None and (found := kind(state, failure)) not in policy.restart_on:
        return f'this failure is of the kind "{found}", and --restart-on has {",".join(sorted(policy.restart_on))}'
    if failure is None or state.why is not Why.FAILED:
        return ""
    ranks = {1: "the only rank", 2: "both ranks"}.get(len(state.exits), f"all {len(state.exits)} ranks")
    if found := failed_import(failure):
        # other ranks may have been stopped before they came that far: the file that one rank lacks, and another one was about
        # to write, is there after a restart
        if all_failed_at_same_import(state.exits):
            return f"{ranks} failed at the same import in the first lines of the program, as at any further start"
        if found == state.import_failure:
            return (
                f"rank {failure.rank} failed at the same import in the first lines of the program as before the restart"
            )
    elif (found := same_exception(state)) and found == state.same_exception and not state.has_progressed:
        return f"{ranks} failed by the same {found} as before the restart"
    return ""


def failed_import(failure: WorkerExit | None) -> str:
    """Return the host of a worker and the import at which it failed in its first lines; "" if it failed elsewhere."""
    found = import_failure(failure.error) if failure is not None else ""
    return f"{failure.host}: {found}" if failure is not None and found else ""


def same_exception(state: State) -> str:
    """Return the exception that all ranks raised at the same line, as "ValueError in train.py:88"; "" if there is none.

    Exceptions that may go away, such as those of files, networks and devices, do not count.
    """
    found = set()
    for end in state.exits:
        error = end.error
        if error is None or not error.frames or not failed_itself(end) or kind(state, end) != "exception":
            return ""
        python = getattr(builtins, error.type, None)
        if isinstance(python, type) and issubclass(python, (OSError, MemoryError, KeyboardInterrupt)):
            return ""
        if _OF_NETWORKS.search(error.type):
            return ""
        innermost = error.frames[-1]
        found.add(f"{error.type} in {innermost.file.rpartition('/')[2]}:{innermost.line}")
    return found.pop() if len(found) == 1 else ""


_OF_THE_MACHINE = ("killed", "cuda")


def sick_node(state: State) -> Member | None:
    """Return the node on which workers failed first, twice in a row and for reasons of the machine; None if there is none.

    Node 0 cannot be left out, nor a node without which the job has too few, nor one of several nodes on that machine.
    """
    host = failed_machine(state)
    if not host or host != state.failed_machine or len(state.members) <= state.policy.min_nodes:
        return None
    there = [member for member in state.members.values() if member.host == host]
    return there[0] if len(there) == 1 and there[0].id != SELF_ID else None


def failed_machine(state: State) -> str:
    """Return the host on which a worker failed first, if the reason may be the machine's; "" if it is the program's."""
    failure = state.failure
    if state.why is not Why.FAILED or failure is None or kind(state, failure) not in _OF_THE_MACHINE:
        return ""
    return "" if follows(failure) else failure.host


# --- steps, as scripts say them by progress(), or Trainers of transformers


def with_progress(state: State) -> State:
    """Note at the end of a generation which step it reached; if it made progress, its restart is not counted.

    Only steps that the script or a Trainer says count: many bars begin again with each epoch, collectives with each start.
    """
    told = [end.progress for end in state.exits if end.progress is not None]
    known = [progress.step for progress in told if progress.source in ("script", "trainer")]
    if state.lost and not known:
        return state  # the worker that said them may have been on the lost node
    reached = max(known, default=-1)
    if reached > state.best_step:
        return replace(state, best_step=reached, has_progressed=True, in_vain=0, spent=state.spent[:-1])
    in_vain = state.in_vain + 1
    most = state.policy.max_no_progress
    return replace(state, has_progressed=False, in_vain=in_vain, gave_up=most is not None and in_vain >= most)


def is_budget_spent(state: State, at: float) -> bool:
    """Whether the restarts of --max-restarts, within its time if it has one, are used."""
    window = state.policy.restart_window or inf
    return sum(at - spent < window for spent in state.spent) >= state.policy.max_restarts


def _why_given_up(state: State) -> str:
    generations = "the last generation" if state.in_vain == 1 else f"{state.in_vain} generations in a row"
    steps = f"no step beyond {state.best_step:,}" if state.best_step >= 0 else "no step that ddplaunch knows of"
    return f"{generations} made {steps} (--max-no-progress)"
