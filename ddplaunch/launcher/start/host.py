"""Main of what ssh or the like starts on a host, the front of an agent: `python -m ddplaunch.launcher.start.host`.

Not for people to type. Its order comes over stdin, its reports go over stdout; neither its arguments nor its environment hold a
secret.
"""

from __future__ import annotations

import ddplaunch.system.interrupt  # noqa: F401 - before all else

# isort: split

import os
import sys
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.reach import protocol
from ddplaunch.reach.pipes import CONTROL
from ddplaunch.reach.protocol import ORDER, reserve_stdio
from ddplaunch.system.errors import LaunchError, own_imports
from ddplaunch.system.exitcodes import BUG, NODE_LOST
from ddplaunch.system.fields import Malformed
from ddplaunch.system.words import why_failed

if TYPE_CHECKING:  # for the others see main
    from ddplaunch.launcher.elsewhere.host_front import HostFront

_ORDER_TIMEOUT = 60.0  # seconds from the greeting


def main() -> int:
    """Wait for the order of the ddplaunch that has started this host, carry the order out, and return the exit status.

    Without an order there is nobody to tell why: the status, NODE_LOST, says that the connection was lost.
    """
    input_pipe, output_pipe = reserve_stdio()  # sends the greeting before anything heavy is imported
    frame = input_pipe.wait(_ORDER_TIMEOUT)
    if frame is None:
        return NODE_LOST
    tag, data = frame
    try:
        order = protocol.order(data) if tag == ORDER else None
    except Malformed:
        order = None
    if order is None:
        return NODE_LOST
    try:
        with own_imports():
            from ddplaunch.launcher.elsewhere.host_front import HostFront
    except LaunchError as error:  # there is no front to send it; the pipe has room
        output_pipe.put(CONTROL, protocol.encode(protocol.refusal(error)))
        return error.status
    front = HostFront(input_pipe, output_pipe, order.heartbeat_timeout, order.hosts[order.node_rank])
    try:
        status = _run(order, front)
    except LaunchError as error:
        front.finish(protocol.refusal(error))
        return error.status
    front.finish(protocol.AgentEnded(status, front.spared))  # spared: processes that may outlive the agent
    return status


def _run(order: protocol.HostOrder, front: HostFront) -> int:
    """Run the part of the job that an order gives to this host, behind `front`; return the exit status.

    Raises LaunchError: the job cannot be run here.
    """
    with own_imports():
        from ddplaunch.launcher.start.node import run
        from ddplaunch.plan.assign import simulated
        from ddplaunch.plan.cluster import AllocatedJob
        from ddplaunch.plan.devices.node import inspect
        from ddplaunch.reach import order as orders
        from ddplaunch.spec import program
        from ddplaunch.spec.options.token import VARIABLE as TOKEN

    # those of the command, but for a TMPDIR that is no folder here, and those about this host
    env = orders.variables_on_host(orders.variables(order), os.environ, os.path.isdir)
    try:
        os.chdir(order.cwd)
    except OSError as error:
        hint = "ddplaunch runs on each host in the folder where it was typed"
        raise LaunchError(f"{os.fsdecode(order.cwd)}: {why_failed(error)}", hint=hint) from None
    spec = order.job.spec()
    program.check(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    nodes = len(order.hosts)
    here = inspect(spec, env, shared_by=nodes if order.simulated else 1)
    node = simulated(here, order.node_rank, nodes, order.simulated)  # with its share of the devices, if it is simulated
    front.report(protocol.Ready())
    allocated = AllocatedJob(
        # a report on a failure has to know of faults and simulation, for which the agent itself does nothing
        spec=replace(spec, chaos=orders.faults(order), simulate=order.simulated),
        env={**env, TOKEN: order.token},
        allocation=orders.allocation(order),
    )
    return run(
        allocated,
        node,
        screen=order.screen,
        reports_job=False,  # the command that was typed does
        serve=front.serve,
        carried=front.channel,  # to the coordinator, over the front's stdin and stdout
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours, and the dispatcher shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(BUG)
