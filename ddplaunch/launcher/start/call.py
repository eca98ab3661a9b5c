"""The command that `launch()` starts in a process of its own, with the caller's socket as stdin. Not for users to type.

So the caller, which may be a notebook with many threads, neither forks nor has a signal handler of ours. The order comes over
that socket; reports on the job go back there, a line of JSON each.
"""

from __future__ import annotations

import ddplaunch.system.interrupt  # noqa: F401 - before all else

# isort: split
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

from ddplaunch.spec import order
from ddplaunch.spec.call import stop_signal
from ddplaunch.spec.order import Order
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import BUG
from ddplaunch.system.process.linux import signal_at_end_of


def main() -> NoReturn:
    """Read the order, run the job, and exit with its status."""
    # signals that the caller ignores or blocks, as a notebook does SIGINT between two cells, are not ignored here
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    control = os.dup(0)  # the caller's socket, which no child inherits from here; workers get an empty stdin
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    status = BUG
    try:
        status = _run(_order(control), control)
    except LaunchError as error:
        _send(control, {"type": "failure_text", "text": error.render()})
        status = error.status
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # at once: a normal exit of the interpreter takes longer


def _order(control: int) -> Order:
    with socket.socket(fileno=os.dup(control)) as connection, connection.makefile("rb") as file:
        line = file.readline()
    if not line:  # the caller has ended already
        os._exit(BUG)
    return order.decode(line)


def _run(job: Order, control: int) -> int:
    spec = job.spec()
    signal_at_end_of(int(sys.argv[1]), stop_signal(spec))  # of the caller
    from ddplaunch.launcher.start import dispatch

    return dispatch.run(spec, dict(os.environ), control=control)


def _send(control: int, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the caller has ended
        os.write(control, json.dumps(message).encode() + b"\n")
