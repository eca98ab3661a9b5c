"""The agent of a host, started there by ssh or the like: `python -m ddplaunch.launcher.host`. Not for people to type.

What it is to do comes over stdin, what it has to say goes over stdout; neither its words nor its environment hold a secret.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import BUG, NODE_LOST, of_signal
from ddplaunch.record import replace
from ddplaunch.remote import messages
from ddplaunch.remote.protocol import MEET, NUDGE, ORDER, SIGNAL
from ddplaunch.remote.stdio import InputPipe, own

if TYPE_CHECKING:  # for the others see main
    from ddplaunch.remote.host_front import HostFront

_PATIENCE = 60.0  # seconds to wait for the order


class _Unwanted(Exception):
    """The job has ended before it began here."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def main() -> int:
    """Carry out the order that comes, and give the status."""
    inlet, outlet = own()  # says that we are there, before anything heavy is imported
    frame = inlet.wait(_PATIENCE)
    if frame is None or frame[0] != ORDER:
        return NODE_LOST
    order = messages.order(frame[1])
    from ddplaunch.remote.host_front import HostFront

    relay = HostFront(inlet, outlet, order.silence, order.hosts[order.place])
    try:
        status = _carry_out(order, relay, inlet)
    except LaunchError as error:
        relay.finish(messages.Refused(message=error.message, hint=error.hint, status=error.status))
        return error.status
    except _Unwanted as ended:
        status = ended.status
    relay.finish(messages.Ended(status))
    return status


def _carry_out(order: messages.Order, relay: HostFront, inlet: InputPipe) -> int:
    from ddplaunch.devices.node import inspect
    from ddplaunch.launcher import node as here
    from ddplaunch.options.argv import from_argv
    from ddplaunch.options.resolve import job_spec
    from ddplaunch.options.token import VARIABLE as TOKEN
    from ddplaunch.process import program
    from ddplaunch.remote import environment
    from ddplaunch.remote import order as orders

    env = environment.received(orders.variables(order), os.environ, os.path.isdir)
    _go_to(os.fsdecode(order.cwd))
    spec = job_spec(*from_argv(orders.words(order)))
    program.check(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    nodes = len(order.hosts)
    node = inspect(spec, env, divided_by=nodes if order.simulated else 1)
    devices = orders.share(node.devices, order)
    shared = order.simulated is not None and nodes > 1 and devices == node.devices
    node = replace(node, devices=devices, shared=shared)
    if order.place == 0 and nodes > 1:
        relay.report(messages.Addresses(_addresses(order)))
    if order.place > 0:
        relay.report(messages.Ready())
    meet = _wait_to_meet(order, spec.stop_signals, inlet) if order.place else None
    return here.run(
        orders.without_terminal(spec, node, alone=nodes == 1),
        {**env, TOKEN: order.token},
        orders.allocation(order, meet),
        node,
        screen=orders.screen(order),
        reports_job=order.place == 0,
        notifies_starter=True,
        reports_to_caller=order.answers,
        serve=relay.serve,
    )


def _go_to(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"{folder}: {(error.strerror or str(error)).lower()}",
            hint="ddplaunch runs on each host in the folder where it is typed",
        ) from None


def _addresses(order: messages.Order) -> tuple[str, ...]:
    """Where other hosts may reach this one: by its name, as it was reached itself, by whatever its interfaces have."""
    from ddplaunch.remote import order as orders

    if order.simulated:
        return (orders.LOOPBACK,)
    from ddplaunch.net.addresses import usable_addresses

    connection = os.environ.get("SSH_CONNECTION", "").split()  # client's address and port, server's address and port
    return tuple(dict.fromkeys((order.hosts[0], *connection[2:3], *usable_addresses())))


def _wait_to_meet(order: messages.Order, stops: Collection[int], inlet: InputPipe) -> messages.Meet:
    """Wait for the word where the coordinator is.

    Raises:
        _Unwanted: the job was stopped, or whoever started it is gone.
    """
    while (frame := inlet.wait(order.silence)) is not None:
        tag, data = frame
        if tag == MEET:
            return messages.meet(data)
        if tag in (SIGNAL, NUDGE) and data[0] in stops:
            raise _Unwanted(of_signal(data[0]))
    raise _Unwanted(NODE_LOST)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours, and whoever started us shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(BUG)
