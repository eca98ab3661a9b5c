"""The agent of a host, started there by ssh or the like: `python -m ddplaunch.launcher.start.host`. Not for people to type.

Its order comes over stdin, its reports go over stdout; neither its arguments nor its environment hold a secret.
"""

from __future__ import annotations

import ddplaunch.system.interrupt  # noqa: F401 - before all else

# isort: split

import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.reach import messages
from ddplaunch.reach.pipes import CONTROL
from ddplaunch.reach.protocol import COORDINATOR, ORDER, PLAIN_SIGNAL, SIGNAL, InputPipe, reserve_stdio
from ddplaunch.system.errors import LaunchError, own_imports
from ddplaunch.system.exitcodes import BUG, NODE_LOST, of_signal
from ddplaunch.system.fields import Malformed
from ddplaunch.system.words import why_failed

if TYPE_CHECKING:  # for the others see main
    from ddplaunch.launcher.elsewhere.host_front import HostFront

_ORDER_TIMEOUT = 60.0  # seconds


class _JobEnded(Exception):
    """The job has ended before it began here."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def main() -> int:
    """Wait for the order of the ddplaunch that has started this host, carry the order out, and return the exit status."""
    input_pipe, output_pipe = reserve_stdio()  # sends the greeting before anything heavy is imported
    frame = input_pipe.wait(_ORDER_TIMEOUT)
    if frame is None or frame[0] != ORDER:
        return NODE_LOST
    try:
        order = messages.order(frame[1])
    except Malformed:
        return NODE_LOST
    try:
        with own_imports():
            from ddplaunch.launcher.elsewhere.host_front import HostFront
    except LaunchError as error:  # there is no front to send it; the pipe has room
        output_pipe.put(CONTROL, messages.encode(messages.refusal(error)))
        return error.status
    host, is_first = order.hosts[order.node_rank], order.node_rank == 0
    front = HostFront(input_pipe, output_pipe, order.heartbeat_timeout, host, reports_job=is_first)
    try:
        status = _run(order, front, input_pipe)
    except LaunchError as error:
        front.finish(messages.refusal(error))
        return error.status
    except _JobEnded as ended:
        status = ended.status
    front.finish(messages.AgentEnded(status, front.spared))
    return status


def _run(order: messages.Order, front: HostFront, input_pipe: InputPipe) -> int:
    """Run the part of the job on a host that another ddplaunch has started; return the exit status."""
    with own_imports():
        from ddplaunch.launcher.start.node import run
        from ddplaunch.plan.assign import simulated
        from ddplaunch.plan.devices.node import inspect
        from ddplaunch.reach import order as orders
        from ddplaunch.spec import program
        from ddplaunch.spec.options.token import VARIABLE as TOKEN

    env = orders.variables_on_host(orders.variables(order), os.environ, os.path.isdir)
    try:
        os.chdir(order.cwd)
    except OSError as error:
        hint = "ddplaunch runs on each host in the folder where it was typed"
        raise LaunchError(f"{os.fsdecode(order.cwd)}: {why_failed(error)}", hint=hint) from None
    spec = orders.spec(order)
    program.check(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    nodes = len(order.hosts)
    here = inspect(spec, env, divided_by=nodes if order.simulated else 1)
    node = simulated(here, order.node_rank, nodes, order.simulated)
    if order.node_rank == 0 and nodes > 1:
        front.report(messages.Addresses(_addresses(order)))
    if order.node_rank > 0:
        front.report(messages.Ready())
    coordinator = _wait_for_coordinator(order, spec.stop_signals, input_pipe) if order.node_rank else None
    allocation = orders.allocation(order, coordinator)
    front.ends_job = not allocation.is_elastic
    return run(
        replace(spec, chaos=orders.faults(order), simulate=order.simulated),  # of which a failure report has to know
        {**env, TOKEN: order.token},
        allocation,
        node,
        screen=order.screen,
        reports_job=order.node_rank == 0,
        notifies_starter=True,
        reports_to_caller=order.reports_to_caller,
        serve=front.serve,
    )


def _addresses(order: messages.Order) -> tuple[str, ...]:
    """Where other hosts may reach this one: its name, the address that ssh connected to, those of its interfaces."""
    if order.simulated:
        return (LOOPBACK,)
    from ddplaunch.system.net.addresses import usable_addresses

    connection = os.environ.get("SSH_CONNECTION", "").split()  # client's address and port, server's address and port
    found = dict.fromkeys((order.hosts[0], *connection[2:3], *usable_addresses()))
    return tuple(found)[: messages.MAX_ADDRESSES]


def _wait_for_coordinator(
    order: messages.Order, stops: Collection[int], pipe: InputPipe
) -> messages.CoordinatorAddress:
    """Wait for the coordinator's address. Raises _JobEnded: the job was stopped, or the dispatcher was lost."""
    while (frame := pipe.wait(order.heartbeat_timeout)) is not None:
        tag, data = frame
        if tag == COORDINATOR:
            try:
                return messages.coordinator(data)
            except Malformed:
                break
        if tag in (SIGNAL, PLAIN_SIGNAL) and data and data[0] in stops:
            raise _JobEnded(of_signal(data[0]))
    raise _JobEnded(NODE_LOST)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours, and the dispatcher shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(BUG)
