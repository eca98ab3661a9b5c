"""What follows from the agents' hellos together: who is a member, which backend all have, how node 0 is reached. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddplaunch.coordinator.messages import Hello
from ddplaunch.supervise.job import Member


def member_of(id: int, hello: Hello) -> Member:
    """Return the member that has sent this, with what all have to agree on."""
    facts = hello.facts
    return Member(
        id=id,
        host=hello.seat.host,
        workers=hello.seat.workers,
        wanted=hello.place,
        agreed=(
            ("ddplaunch", facts.ddplaunch),
            ("Python", facts.python),
            ("torch", facts.torch),
            ("the program", facts.script),
            ("--nnodes", facts.nnodes),
        ),
    )


def reached_as(hellos: Sequence[Hello]) -> str:
    """Return the address under which most have reached the coordinator."""
    return Counter(hello.reached for hello in hellos).most_common(1)[0][0]


def common_backend(hellos: Sequence[Hello]) -> tuple[str, str]:
    """Return the backend that all nodes can use, and why."""
    found: dict[str, str] = {}
    for hello in hellos:
        found.setdefault(hello.backend, hello.seat.host)
    if len(found) == 1:
        return hellos[0].backend, hellos[0].backend_reason
    differing = ", ".join(f"{backend} on {host}" for backend, host in found.items())
    return "gloo", f"the nodes differ: {differing}"
