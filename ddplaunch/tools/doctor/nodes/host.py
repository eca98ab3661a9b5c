"""The program that examines a node for the doctor: `python -m ddplaunch.tools.doctor.nodes.host`, with the order of an agent.

It gets the order (the job), then requests, each of which a child answers within its time: what hangs there hangs nothing here.
"""

from __future__ import annotations

import ddplaunch.system.interrupt  # noqa: F401 - before all else

# isort: split

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol, TypeAlias

from msgspec import Raw

from ddplaunch.reach.pipes import CONTROL
from ddplaunch.reach.protocol import ORDER, REQUEST, HostOrder, InputPipe, OutputPipe, reserve_stdio
from ddplaunch.reach.protocol import order as order_in
from ddplaunch.spec.job import ProgramKind
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import BUG, NODE_LOST, OK
from ddplaunch.system.fields import Malformed, line
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.ask import FIRST
from ddplaunch.system.words import duration, why_failed
from ddplaunch.tools.doctor import Report
from ddplaunch.tools.doctor.nodes import measure, messages

_ORDER_TIMEOUT = 60.0  # seconds
_MOST_UNANSWERED = 8  # requests; the doctor has two at a time
_KILL_MARGIN = 0.2  # seconds in which the kernel ends a late child, before its process is left behind


class Asker(Protocol):
    """The connection to the doctor, who asks."""

    def send(self, payload: bytes) -> None:
        """Send an answer."""


class Examinee:
    """This node while the doctor, on node 0, examines it: answers each request in a child, which may hang."""

    def __init__(
        self, loop: Loop, order: HostOrder, asker: Asker, *, may_listen: Collection[int] | None = None
    ) -> None:
        """Prepare.

        Of the ports at which the doctor asks this node to listen, it listens at those in `may_listen` alone; None: at all.
        """
        self._loop = loop
        self._order = order
        self._asker = asker
        self._may_listen = may_listen
        self._is_listening = False
        self._unanswered = 0
        self._own_name_digits = os.urandom(8).hex()  # of the file that this node makes, if it is node 0

    def on_request(self, data: bytes) -> None:
        """Have a child answer a request; say that there is no answer if the child does not end in time.

        Raises:
            Malformed: the data are no request, or not one that the doctor sends to this node now.
        """
        asked = messages.asked(data)
        assert isinstance(asked, messages.Asked)
        number, request = asked.number, asked.request
        if isinstance(request, messages.TellTime):  # at once: a child would be late
            self._asker.send(_answer(number, lambda: messages.Time(time.time())))
            return
        if self._unanswered == _MOST_UNANSWERED:
            raise Malformed("asks too much at once")
        answer = partial(_answer, number, self._what_finds_reply_to(request))
        if_late = _failure(number, f"no answer in {duration(asked.within)}")
        self._unanswered += 1
        pending = self._loop.ask(answer, otherwise=if_late, answered=self._on_answer, within=asked.within)
        # the kernel cannot kill a child in uninterruptible sleep, as on a dead file server: it is left behind
        self._loop.timer(self._loop.now() + asked.within + _KILL_MARGIN, pending.give_up)

    def _what_finds_reply_to(self, request: messages.Request) -> Callable[[], messages.Reply]:
        """Return what finds the reply in a child; listen for other nodes if that is requested.

        Raises:
            Malformed: the doctor does not request this here, or not again.
        """
        match request:
            case messages.Introduce():
                if self._is_listening:
                    raise Malformed("asks twice to listen")
                return partial(facts_of, self._order, *self._listen(request))
            case messages.HandleFile("look", name_digits) if name_digits is not None:
                return partial(handle_file, self._order, "look", name_digits)
            case messages.HandleFile("make" | "remove" as step):
                if self._order.node_rank != 0:
                    raise Malformed("has a node that is not node 0 make a file")
                return partial(handle_file, self._order, step, self._own_name_digits)
            case messages.Measure():
                return partial(measure.measure, request, self._order.token)
            case messages.Meet(port):
                name = self._order.endpoint.address or self._order.hosts[0]  # of node 0: as typed, else as it is listed
                return partial(measure.meet, name, port, self._order.token)
            case messages.Examine():
                return partial(examine, request, self._order)
        raise Malformed("looks for a file without a name")

    def _on_answer(self, answer: bytes) -> None:
        """Send what the child has found, or that it was too late. Called by the loop."""
        self._unanswered -= 1
        self._asker.send(answer)

    def _listen(self, request: messages.Introduce) -> tuple[int, tuple[int, ...]]:
        """Listen on a port that the kernel chooses, and on the request's ports, as far as allowed and free; return both.

        A child of its own serves them from then on, until the loop is closed.
        """
        listeners = [measure.listen()]
        for port in request.ports:
            is_allowed = self._may_listen is None or port in self._may_listen
            if is_allowed:
                with suppress(OSError):  # taken by a program, at which others will find out whether the port is open
                    listeners.append(measure.listen(port))
        chosen_by_kernel, *ports = (listener.getsockname()[1] for listener in listeners)
        serve = partial(_serve, len(listeners), self._order.token, self._order.node_rank)
        self._loop.ask(serve, otherwise=None, descriptors=tuple(listener.fileno() for listener in listeners))
        for listener in listeners:
            listener.close()  # in this process
        self._is_listening = True
        return chosen_by_kernel, tuple(ports)


def _serve(listeners: int, token: str, node_rank: int) -> None:
    """Serve at so many sockets, in the child, which gets their descriptors from FIRST on."""
    measure.serve([socket.socket(fileno=FIRST + index) for index in range(listeners)], token, node_rank)


def _answer(number: int, find_reply: Callable[[], messages.Reply]) -> bytes:
    """Answer the request of this number, in the child: with the reply, or with what was raised in its place."""
    try:
        return messages.encode(messages.Answered(number, Raw(messages.encode(find_reply()))))
    except LaunchError as error:
        return _failure(number, error.message)
    except Exception as error:  # noqa: BLE001 - the doctor names it, and goes on
        return _failure(number, f"{type(error).__name__}: {error}")


def _failure(number: int, why: str) -> bytes:
    return messages.encode(messages.Answered(number, why_none=line(why)))


# --- replies, each found in a child


def facts_of(order: HostOrder, kernel_port: int, ports: tuple[int, ...]) -> messages.Facts:
    """Return what this node is, and that it listens at `kernel_port`, which the kernel chose, and at `ports`."""
    from ddplaunch.plan.devices.interpreter import find_torch

    spec = order.job.spec()
    build = find_torch(spec.program.python or sys.executable)
    digest, script_problem = "", ""
    folder_problem = _enter_folder(order)  # "" once it is entered: the script's path leads from there
    has_script = spec.program.kind is ProgramKind.SCRIPT and spec.program.target != "-"
    if has_script and not folder_problem:
        try:
            digest = _digest(spec.program.target)
        except OSError as error:
            script_problem = why_failed(error)
    return messages.Facts(
        host=host_name(os.uname().nodename),
        addresses=_addresses(order),
        kernel_port=kernel_port,
        ports=ports,
        python=line(sys.version.partition(" ")[0]),
        torch=line(build.version) if build is not None else "",
        nccl=build is not None and build.nccl,
        folder_problem=line(folder_problem),
        script_digest=digest,
        script_problem=line(script_problem),
    )


def _addresses(order: HostOrder) -> tuple[str, ...]:
    """Return the numeric addresses under which other nodes may reach this one, the likeliest first."""
    if order.simulated:
        from ddplaunch.plan.cluster.endpoints import LOOPBACK

        return (LOOPBACK,)
    from ddplaunch.system.net.addresses import is_loopback, usable_addresses

    connection = os.environ.get("SSH_CONNECTION", "").split()  # client's address and port, server's address and port
    reached = [address for address in connection[2:3] if not is_loopback(address)]  # where ssh got here
    return tuple(dict.fromkeys((*reached, *usable_addresses())))[: messages.MAX_ADDRESSES]


def _enter_folder(order: HostOrder) -> str:
    """Change into the folder where the command was typed; return why that fails, "" if it does not."""
    try:
        os.chdir(os.fsdecode(order.cwd))
    except OSError as error:
        return f"{os.fsdecode(order.cwd)}: {why_failed(error)}"
    return ""


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


Step: TypeAlias = Literal["make", "look", "remove"]


def handle_file(order: HostOrder, step: Step, name_digits: str) -> messages.Shared:
    """Make the file with these digits in its name, in the run folder and the current one; or look for it, or remove it."""
    from ddplaunch.record.folders import runs_folder

    runs = order.job.spec().log_dir or runs_folder(_variables(order))
    return messages.Shared(
        runs=_handle_in(runs, step, name_digits) if runs else None,
        current=_handle_in(os.fsdecode(order.cwd), step, name_digits),
        name_digits=name_digits,
    )


def _handle_in(folder: str, step: Step, name_digits: str) -> bool | None:
    """Make, look for, or remove the file in a folder; return whether it is there now, None if the folder fails."""
    path = os.path.join(folder, f".ddplaunch-doctor-{name_digits}")
    try:
        if step == "make":
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        elif step == "remove":
            os.unlink(path)
        elif os.path.isdir(folder):
            os.listdir(folder)  # a client of NFS asks its server again
        return os.path.lexists(path)
    except OSError:
        return None


def _variables(order: HostOrder) -> Mapping[str, str]:
    """Return the variables that workers here would have."""
    from ddplaunch.reach import order as orders

    return orders.variables_on_host(orders.variables(order), os.environ, os.path.isdir)


def examine(request: messages.Examine, order: HostOrder) -> Report:
    """Run the checks of this machine.

    Raises:
        LaunchError: there is no such check, or no such interpreter here.
    """
    from ddplaunch.tools.doctor import examine as doctor

    _enter_folder(order)
    chosen = doctor.chosen(doctor.ALL_CHECKS, request.only)
    report = doctor.examine(chosen, doctor.subject_of(order.job.spec(), _variables(order)))
    return doctor.presentable(report, "")  # no longer than the doctor takes


# --- the process


def main() -> int:
    """Get the order and answer requests until the doctor closes our stdin; return the exit status."""
    requests, replies = reserve_stdio()
    frame = requests.wait(_ORDER_TIMEOUT)
    if frame is None:  # the doctor has gone, or is late
        return NODE_LOST
    tag, order = frame
    if tag != ORDER:
        return NODE_LOST
    loop = Loop()
    replies.attach(loop)
    try:
        pipes = _DoctorPipes(loop, requests, replies, order_in(order))
        while not pipes.have_ended:
            loop.run_once()
        return OK
    except (Malformed, FrameError):
        return NODE_LOST
    finally:
        loop.close()


class _DoctorPipes:
    """The pipes to the doctor: hands each request that comes by stdin to the examinee, and sends answers to stdout."""

    def __init__(self, loop: Loop, requests: InputPipe, answers: OutputPipe, order: HostOrder) -> None:
        """Begin; the first requests may have been read with the order."""
        self._requests = requests
        self._answers = answers
        self._examinee = Examinee(loop, order, self)
        self.have_ended = False
        loop.watch(requests, self._on_input)
        self._on_input()

    def send(self, payload: bytes) -> None:
        """Send an answer."""
        self._answers.put(CONTROL, payload)

    def _on_input(self) -> None:
        self.have_ended = not self._requests.read()
        while (frame := self._requests.take()) is not None:
            tag, data = frame
            if tag == REQUEST:
                self._examinee.on_request(data)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours, and the doctor shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(BUG)
