"""Which machines of a job are at fault, also where nodes have lost each other, and whose word their names are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.launcher.decide.job import SELF_ID, AgentLost, Member, Phase, State
from ddplaunch.spec.outcome import CLOSED

OUT_OF_CONTACT = ("silent for", "has heard nothing")  # which of both sides says so first is chance
# how the reason for a loss begins, by the kind of fault; other reasons, such as a bad message, are no fault of a machine
KINDS = {**dict.fromkeys(OUT_OF_CONTACT, "lost"), "connection": "lost", "its health check failed": "unfit"}


class Suspect(Struct, frozen=True):
    """A machine that may be at fault."""

    host: str
    # of the connection from a machine that calls itself so; None: it is this one, or who has started its agent calls it so
    address: str | None


class Fault(NamedTuple):
    """What may be wrong with a machine."""

    kind: str  # as in record/bad_nodes.py
    why: str


class Loss(Struct, frozen=True):
    """A node that this coordinator has lost."""

    suspect: Suspect
    reason: str  # "silent for 10 s"
    while_running: bool  # else it may have been lost because the job was ending
    others_silent: int  # how many other nodes had not answered lately either
    has_ended: bool  # as far as its kernel says so, over a network that works


def kind_of_fault(reason: str) -> str | None:
    """Return the kind of fault, as in record/bad_nodes.py, for which a node was lost; None: it is no fault of the machine."""
    return next((kind for begin, kind in KINDS.items() if reason.startswith(begin)), None)


def suspect_of(member: Member, names: Sequence[str]) -> Suspect:
    """Return the machine of a node: by the name that its starter gave it, as `names` has it by rank, else by its own word."""
    if member.fixed_rank is not None and member.fixed_rank < len(names):
        return Suspect(names[member.fixed_rank], None)
    return Suspect(member.host, None if member.id == SELF_ID else member.address)


def blamed(own: Suspect | None, others: int, losses: Sequence[Loss]) -> dict[Suspect, str]:
    """Return which machines are at fault for the losses of one generation, and why; {} if that cannot be told.

    `own` is this machine; None: the coordinator is no node of the job. `others` is the number of other nodes.
    The lost nodes are at fault if fewer nodes are out of contact than in contact. If all others are out of contact, this one
    is at fault: its cable may be out. Of two nodes each has lost the other, unless one is known to have ended.
    """
    first = losses[0]
    # after the first loss all workers are stopped: nodes that were silent then may not be reported as lost any more
    out_of_contact = max(len(losses), 1 + first.others_silent)
    in_contact = 1 + others - out_of_contact  # this one too
    other_of_two_has_ended = out_of_contact == in_contact == 1 and first.has_ended
    if out_of_contact < in_contact or other_of_two_has_ended:
        return {loss.suspect: loss.reason for loss in losses if loss.while_running}
    lost_all_others = in_contact == 1 and out_of_contact > 1
    all_have_ended = out_of_contact == len(losses) and all(loss.has_ended for loss in losses)
    if own is not None and lost_all_others and not all_have_ended:
        return {own: f"it lost all {out_of_contact} others: {first.reason}"}
    return {}


class _Losses(NamedTuple):
    """The nodes that were lost in one generation."""

    others: int  # how many nodes but this one the generation had
    lost: list[Loss]


class Faults:
    """The machines that seem to be at fault, as a coordinator learns of them; of each machine the first fault counts."""

    def __init__(self) -> None:
        self.found: dict[Suspect, Fault] = {}
        self._losses: dict[int, _Losses] = {}  # by the number of the generation

    def note_loss(self, member: Member, lost: AgentLost, before: State) -> None:
        """Note the loss of a node for which a machine may be at fault; `before` is the state in which it was lost.

        Once one node is lost all workers are stopped. A later loss of that generation counts too; one of a job that stops for
        another reason does not, for its agents may be ending.
        """
        was_running, suspect = before.phase is Phase.RUNNING, suspect_of(member, before.policy.host_names)
        number = before.generation.number
        match kind_of_fault(lost.reason):
            case "unfit":
                self.found.setdefault(suspect, Fault("unfit", lost.reason))
            case "lost" if was_running or number in self._losses:
                others = sum(id != SELF_ID for id in before.members)
                losses = self._losses.setdefault(number, _Losses(others, []))
                # the kernel of a node closes the connection once the agent has ended
                has_ended = lost.has_ended or lost.reason.startswith(CLOSED)
                loss = Loss(suspect, lost.reason, was_running, others_silent=lost.others_silent, has_ended=has_ended)
                losses.lost.append(loss)

    def at_end(self, state: State) -> Mapping[Suspect, Fault]:
        """Return the faults, now that the job has ended."""
        own = suspect_of(state.members[SELF_ID], state.policy.host_names) if SELF_ID in state.members else None
        for losses in self._losses.values():
            for suspect, why in blamed(own, losses.others, losses.lost).items():
                self.found.setdefault(suspect, Fault("lost", why))
        return self.found
