"""How a generation (one start of all workers) ended, whether another one may help, and what it costs of --max-restarts. Pure."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable
from itertools import chain
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import (
    all_failed_at_same_import,
    failed_itself,
    failure_text,
    first_failure,
    follows_another,
    import_failure,
    searchable,
)
from ddplaunch.launcher.decide.job.members import SELF_ID, FrozenMap, Member, Members, Policy
from ddplaunch.spec.outcome import StartFailure, Why, WorkerExit

SHORT_LIFE = 5.0  # seconds; a generation that fails sooner makes the next one wait
_LONGEST_PAUSE = 30.0  # seconds
NO_EXITS: FrozenMap[tuple[WorkerExit, ...]] = FrozenMap.of({})
_MAY_BE_THE_MACHINE = ("killed", "cuda")  # kinds of failures for which the machine may be the reason
_CUDA = ("CUDA error", "CUDA out of memory", "CUBLAS_STATUS_", "CUDNN_STATUS_", "AcceleratorError", "HIP error")
_NCCL = ("NCCL", "DistBackendError")
_TIMED_OUT = ("TimeoutError", "timed out", "Timed out")
# exceptions of networks that are no OSError of Python's own: httpx.ConnectError, huggingface_hub.errors.HfHubHTTPError
_NETWORK_EXCEPTIONS = re.compile(
    r"^(?:aiohttp|botocore|google|httpcore|httpx|huggingface_hub|requests|urllib3?)\.|HTTP|URLError|Connect|Timeout"
)


class Generation(Struct, frozen=True, kw_only=True):
    """One start of all workers, and how they ended on the nodes. Times are of the coordinator's clock."""

    number: int = -1  # -1: before the first one
    term: int = -1  # as in DDPLAUNCH_TERM; before the first one, one less than the first one's
    began_at: float = 0.0
    node_exits: FrozenMap[tuple[WorkerExit, ...]] = NO_EXITS  # how the workers ended, by the id of their node
    early_exits_line_at: float | None = None  # when to print which nodes finished while workers of others run on
    lost: tuple[str, ...] = ()  # nodes that were lost, and how: "node 2 (c): silent for 10 s"
    notice: int = 0  # the first of policy.notices that came to any node
    start_failure: StartFailure | None = None
    leftovers: tuple[str, ...] = ()  # processes that could not be ended, each as in a sentence
    nodes_with_unread_stacks: int = 0  # on which the workers' stacks are yet to be read before the stop of all

    def next(self, at: float, *, after: int = -1, after_term: int = -1) -> Generation:
        """Return the generation that begins at this time; some node may have begun the one of number and term `after` already."""
        return Generation(number=max(self.number, after) + 1, term=max(self.term, after_term) + 1, began_at=at)

    @property
    def is_before_first(self) -> bool:
        """Whether no generation has begun yet."""
        return self.number < 0

    def with_lost(self, node: str) -> Generation:
        """Return the generation after another node was lost."""
        return replace(self, lost=(*self.lost, node))

    @property
    def exits(self) -> tuple[WorkerExit, ...]:
        """The ends of the workers, on all nodes; gathered here, so that each node's end costs little."""
        return tuple(chain.from_iterable(self.node_exits.values()))

    @property
    def failure(self) -> WorkerExit | None:
        """The first failure on any node."""
        return first_failure(self.exits)


class Restarts(Struct, frozen=True, kw_only=True):
    """What restarts have cost and achieved so far, and the facts of the last failure with which the next one is compared."""

    number: int = 0  # restarts after failures, all in all
    spent: tuple[float, ...] = ()  # times of the restarts that count for --max-restarts, on the coordinator's clock
    best_step: int = -1  # that any worker has reached in any generation, as far as scripts report steps
    has_progressed: bool = False  # the last generation that failed had reached a new step
    without_new_step: int = 0  # generations in a row that failed without a new step
    gave_up: bool = False  # `without_new_step` is too many: the job ends, and is not queued again
    short_lives: int = 0  # generations in a row that ended within SHORT_LIFE
    import_failure: str = ""  # the import in the first lines by which the last generation failed, with its host
    failed_machine: str = ""  # the host on which the last generation failed first, if the reason may be the machine's
    same_exception: str = ""  # that all ranks of the last generation raised at the same line

    def after_generation(self, why: Why | None, generation: Generation, at: float) -> Restarts:
        """Return the restarts with the failure of this generation, with which that of the next one is compared."""
        failed, failure = why is Why.FAILED, generation.failure
        return replace(
            self,
            short_lives=self.short_lives + 1 if at - generation.began_at < SHORT_LIFE else 0,
            import_failure=import_failure_on_host(failure) if failed else "",
            same_exception=same_exception(generation.exits) if failed else "",
            failed_machine=failed_machine(why, failure),
        )

    def after_steps(self, generation: Generation, max_no_progress: int | None) -> Restarts:
        """Return the restarts with the step that this generation reached; after a new step its restart is not counted.

        `max_no_progress`: after so many generations without a new step the job gives up; None: never.
        Only steps that the script or a Trainer says count: many bars begin again with each epoch, collectives with each start.
        """
        reports = [end.progress for end in generation.exits if end.progress is not None]
        steps = [progress.step for progress in reports if progress.source in ("script", "trainer")]
        if generation.lost and not steps:
            return self  # the worker that reports steps may have been on the lost node
        reached = max(steps, default=-1)
        if reached > self.best_step:
            given_back = self.spent[:-1]  # without the restart that began this generation
            return replace(self, best_step=reached, has_progressed=True, without_new_step=0, spent=given_back)
        without_new_step = self.without_new_step + 1
        gave_up = max_no_progress is not None and without_new_step >= max_no_progress
        return replace(self, has_progressed=False, without_new_step=without_new_step, gave_up=gave_up)

    def with_restart(self, at: float, max_restarts: int) -> Restarts:
        """Return the restarts with one more, of those that count for --max-restarts."""
        return replace(self, number=self.number + 1, spent=(*self.spent, at)[-max_restarts:])

    def are_used_up(self, policy: Policy, at: float) -> bool:
        """Whether the restarts of --max-restarts, within its time if it has one, are used."""
        window = policy.restart_window or inf
        return sum(at - spent < window for spent in self.spent) >= policy.max_restarts

    def after_earlier(self, best_step: int, without_new_step: int) -> Restarts:
        """Return the restarts with how far the job came before it was requeued, which a slow disk may tell late."""
        best_step, without_new_step = max(best_step, self.best_step), without_new_step + self.without_new_step
        return replace(self, best_step=best_step, without_new_step=without_new_step)

    def why_not_again(self, policy: Policy, why: Why | None, generation: Generation) -> str:
        """Return why no other generation should follow, in a sentence; "" if nothing says so."""
        if self.gave_up:
            return self._why_given_up()
        failure = generation.failure
        if policy.restart_on is not None and (found := kind_of_failure(why, failure)) not in policy.restart_on:
            return f'this failure is of the kind "{found}", and --restart-on has {",".join(sorted(policy.restart_on))}'
        if failure is None or why is not Why.FAILED:
            return ""
        exits = generation.exits
        ranks = {1: "the only rank", 2: "both ranks"}.get(len(exits), f"all {len(exits)} ranks")
        where = "the same import in the first lines of the program"
        failed_import = import_failure_on_host(failure)
        exception = "" if failed_import else same_exception(exits)
        # one rank alone may lack a file that another rank was about to write: it is there after a restart
        if failed_import and all_failed_at_same_import(exits):
            return f"{ranks} failed at {where}, as at any further start"
        if failed_import and failed_import == self.import_failure:
            return f"rank {failure.rank} failed at {where} as before the restart"
        if exception and exception == self.same_exception and not self.has_progressed:
            return f"{ranks} failed by the same {exception} as before the restart"
        return ""

    def _why_given_up(self) -> str:
        """Return how many generations made no new step, in a sentence."""
        generations = (
            "the last generation" if self.without_new_step == 1 else f"{self.without_new_step} generations in a row"
        )
        steps = f"no step beyond {self.best_step:,}" if self.best_step >= 0 else "no step that ddplaunch knows of"
        return f"{generations} made {steps} (--max-no-progress)"

    def sick_node(self, policy: Policy, members: Members, why: Why | None, generation: Generation) -> Member | None:
        """Return the node on which workers failed first, twice in a row and for reasons of the machine; None if there is none.

        No node of the coordinator can be left out, nor one without which the job has too few, nor one of several on its machine.
        """
        host = failed_machine(why, generation.failure)
        if not host or host != self.failed_machine or len(members) <= policy.min_nodes:
            return None
        there = [member for member in members.values() if member.host == host]
        return there[0] if len(there) == 1 and there[0].id != SELF_ID else None


def pause_after(short_lives: int) -> float:
    """Return the seconds to wait after so many generations in a row that failed at once."""
    return min(2.0 ** (short_lives - 2), _LONGEST_PAUSE) if short_lives > 1 else 0.0


def kind_of_failure(why: Why | None, failure: WorkerExit | None) -> str:
    """Return what kind of failure ended a generation: a name that --restart-on takes. `failure` is the first one, if any."""
    if why is Why.NODE_LOST:
        return "node-lost"
    if why is Why.HUNG or failure is None:
        return "hang"
    if failure.signal is not None and failure.error is None:
        return "killed"
    if import_failure(failure.error):
        return "import"
    text = searchable(failure_text(failure))
    for name, words in (("nccl", _NCCL), ("cuda", _CUDA), ("timeout", _TIMED_OUT)):
        if any(word in text for word in words):
            return name
    if follows_another(failure):
        return "nccl"  # the connection to a worker that had ended
    return "exit" if failure.error is None else "exception"


def import_failure_on_host(failure: WorkerExit | None) -> str:
    """Return the host of a worker and the import at which it failed in its first lines; "" if it failed elsewhere."""
    found = import_failure(failure.error) if failure is not None else ""
    return f"{failure.host}: {found}" if failure is not None and found else ""


def same_exception(exits: Iterable[WorkerExit]) -> str:
    """Return the exception that all ranks raised at the same line, as "ValueError in train.py:88"; "" if there is none.

    Exceptions that may go away, such as those of files, networks and devices, do not count.
    """
    found: set[str] = set()
    for end in exits:
        found.add(_lasting_exception(end))
        if "" in found or len(found) > 1:
            return ""  # without a look at all others, which may be thousands
    return found.pop() if found else ""


def _lasting_exception(end: WorkerExit) -> str:
    """Return the exception that ended one worker, and its line; "" if it ended otherwise, or by one that may go away."""
    error = end.error
    if error is None or not error.frames or not failed_itself(end):
        return ""
    builtin = getattr(builtins, error.type, None)
    is_of_the_system = isinstance(builtin, type) and issubclass(builtin, (OSError, MemoryError, KeyboardInterrupt))
    is_of_a_network = _NETWORK_EXCEPTIONS.search(error.type) is not None
    if is_of_the_system or is_of_a_network or kind_of_failure(Why.FAILED, end) != "exception":
        return ""
    innermost = error.frames[-1]
    return f"{error.type} in {innermost.file.rpartition('/')[2]}:{innermost.line}"


def failed_machine(why: Why | None, failure: WorkerExit | None) -> str:
    """Return the host on which a worker failed first, if the reason may be the machine's; "" if it is the program's."""
    if why is not Why.FAILED or failure is None or kind_of_failure(why, failure) not in _MAY_BE_THE_MACHINE:
        return ""
    return "" if follows_another(failure) else failure.host
