"""A node that cannot take part tells node 0 why, so that the others do not wait for it in silence. Never fails itself."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ddplaunch.cluster import Allocation
from ddplaunch.control.handshake import key
from ddplaunch.coordinator.join import job_name
from ddplaunch.coordinator.messages import Withdrawal
from ddplaunch.coordinator.remote_link import RemoteLink
from ddplaunch.errors import LaunchError
from ddplaunch.fields import host, piece
from ddplaunch.loop.loop import Loop
from ddplaunch.options import token
from ddplaunch.plan.ranks import host_of
from ddplaunch.spec import JobSpec

_WITHIN = 5.0  # seconds in which node 0 has to be reached: it may have started a moment later
_SILENT = 5.0  # seconds without a word from node 0 after which it is lost


def withdraw(spec: JobSpec, allocation: Allocation, env: Mapping[str, str], why: LaunchError) -> None:
    """Tell node 0, if it is on another host and is reached, that this node does not take part."""
    rendezvous, task = allocation.rendezvous, allocation.task
    if rendezvous is None or rendezvous.coordinator:
        return
    message = Withdrawal(
        place=allocation.node_rank if task is None else task.rank,
        host=host(host_of(allocation, socket.gethostname())),
        reason=piece(why.message.partition("\n")[0]),
        hint=piece((why.hint or "").partition("\n")[0]),
    )
    loop = Loop()
    link = RemoteLink(
        loop,
        key=key(env.get(token.VARIABLE, "").strip() or None, job_name(spec, allocation)),
        hello=lambda _: message,
        source=rendezvous.source,
        heartbeat_timeout=_SILENT,
        rdzv_timeout=_WITHIN,
    )
    link.aim(rendezvous.addresses, rendezvous.ports)
    while link.end is None:  # node 0 closes the connection, or is not reached
        loop.run_once()
    link.close()
    loop.close()
