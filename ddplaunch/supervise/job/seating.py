"""Which agent has which place, whether one may take part, and what they should have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.supervise.job.state import OWN, Member, State


def why_refused(state: State, member: Member) -> str | None:
    """Say why an agent cannot take part; None if it can."""
    max_nodes, wanted = state.policy.max_nodes, member.wanted
    if wanted is not None and wanted >= max_nodes:
        return f"node rank {wanted}: the job has {_nodes(max_nodes)}, node ranks 0 to {max_nodes - 1}"
    if wanted is not None and (other := state.members.at(wanted)) is not None:
        return f"node rank {wanted} is taken by {other.host}"
    if len(state.members) == max_nodes:
        hosts = ", ".join(other.host for other in list(state.members.values())[:8])
        return f"the job has its {_nodes(max_nodes)} already: {hosts}"
    return None


def hint_to_refused(state: State, member: Member) -> str:
    """Return what to type on a node that cannot take part."""
    if len(state.members) == state.policy.max_nodes:
        hint = "for more nodes type a greater `--nnodes` on each; for another job, another port on each of its nodes"
    else:
        free = next(place for place in range(1, state.policy.max_nodes) if state.members.at(place) is None)
        hint = f"give each node a rank of its own: `--node-rank {free}` is free"
    other = None if member.wanted is None else state.members.at(member.wanted)
    if other is not None and other.host == member.host:
        hint += "; or, if the agent with that rank has just ended, try again once the job has noticed"
    return hint


def order(members: Mapping[int, Member]) -> tuple[Member, ...]:
    """Return the agents by place: the coordinator's own first, each at its wanted place, the others in between.

    Agents that had a place before come before new ones, so that ranks change as little as they can.
    """
    number = len(members)
    places: dict[int, Member] = {0: members[OWN]}
    rest = []
    for member in members.values():
        if member.id != OWN:
            if member.wanted is not None and member.wanted < number:
                places[member.wanted] = member
            else:
                rest.append(member)
    rest.sort(key=lambda member: (_or_last(member.wanted), _or_last(member.place), member.id))
    free = (place for place in range(number) if place not in places)
    places.update(zip(free, rest, strict=True))
    return tuple(places[place] for place in range(number))


def waiting(state: State) -> str:
    """Describe how many nodes have joined, and which the rendezvous waits for."""
    here, policy = len(state.members), state.policy
    if here >= policy.min_nodes:
        enough = f"{here} of {policy.min_nodes} to {policy.max_nodes} nodes joined"
        return f"{enough}; starting unless another joins within {policy.last_call:g} s"
    if policy.command:
        return f"{joined(state)}; on {_command_of_a_missing_node(state)}"
    return f"{joined(state)}; waiting for {missing(state)}"


def _command_of_a_missing_node(state: State) -> str:
    """Where to type what, for the first node that has not joined, and which others there are."""
    command = state.policy.command
    if "--node-rank=" not in command:
        absent = state.policy.min_nodes - len(state.members)
        return f"{_nodes(absent).replace(' ', ' more ')} run: {' '.join(command)}"
    taken = {0, *(member.wanted for member in state.members.values())}
    first, *others = (place for place in range(state.policy.max_nodes) if place not in taken)
    text = " ".join(f"{word}{first}" if word == "--node-rank=" else word for word in command)
    more = ", ".join(str(place) for place in others[:8]) + (", ..." if others[8:] else "")
    return f"node {first} run: {text}" + (f"; likewise on node {more}" if others else "")


def joined(state: State) -> str:
    """Describe how many nodes have joined: "2 of 3 nodes joined (a, b)"."""
    hosts = [member.host for member in state.members.values()]
    return f"{len(hosts)} of {_nodes(state.policy.min_nodes)} joined ({', '.join(hosts[:8])}{', ...' if hosts[8:] else ''})"


def missing(state: State) -> str:
    """Name the nodes that have not joined yet, as far as they are known: "node 1 (b), node 2 (c)", "2 more"."""
    here, policy = state.members.values(), state.policy
    taken = {0, *(member.wanted for member in here)}
    by_rank = policy.min_nodes == policy.max_nodes and all(
        member.wanted is not None or member.id == OWN for member in here
    )
    if not by_rank or (len(here) == 1 and not policy.names and "--node-rank=" not in policy.command):
        return f"{policy.min_nodes - len(here)} more"
    absent = [place for place in range(policy.max_nodes) if place not in taken]
    names = dict(enumerate(policy.names))
    shown = ", ".join(f"node {place} ({names[place]})" if place in names else f"node {place}" for place in absent[:8])
    return f"{shown}{', ...' if len(absent) > 8 else ''}"


def disagreements(members: Sequence[Member]) -> list[str]:
    """Say what differs between the nodes and should not, one sentence each."""
    sentences = []
    for what in dict.fromkeys(name for member in members for name, _ in member.agreed):
        holders: dict[str, str] = {}
        for member in members:
            if value := dict(member.agreed).get(what):
                holders.setdefault(value, member.host)
        if len(holders) > 1:
            found = ", ".join(f"{value} on {host}" for value, host in list(holders.items())[:4])
            sentences.append(f"warning: {what} is not the same on all nodes: {found}")
    return sentences


def _or_last(place: int | None) -> float:
    return float("inf") if place is None else place


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
