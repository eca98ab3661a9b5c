"""What examines a node: `python -m ddplaunch.tools.doctor.nodes.host`, started there as an agent is. Not for people to type.

It gets an agent's order, then requests, each of which a child answers within its time: what hangs there hangs nothing here.
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

from ddplaunch.reach.messages import HostOrder
from ddplaunch.reach.messages import order as order_in
from ddplaunch.reach.pipes import CONTROL
from ddplaunch.reach.protocol import ORDER, REQUEST, InputPipe, reserve_stdio
from ddplaunch.spec.job import ProgramKind
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import BUG, NODE_LOST, OK
from ddplaunch.system.fields import Malformed, line
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.ask import FIRST
from ddplaunch.system.words import duration, why_failed
from ddplaunch.tools.doctor.nodes import measure, messages

_ORDER_TIMEOUT = 60.0  # seconds
_AT_ONCE = 8  # questions; the doctor has two
_MARGIN = 0.2  # seconds in which the kernel ends a late child, before its process is left behind


class Examinee:
    """This node, as the doctor sees it."""

    def __init__(
        self, loop: Loop, order: HostOrder, send: Callable[[bytes], None], *, may_listen: Collection[int] | None = None
    ) -> None:
        """Prepare; `send` sends an answer to the doctor. Of the ports that he asks for, those of `may_listen` are listened at."""
        self._loop = loop
        self._order = order
        self._send = send
        self._may_listen = may_listen
        self._is_listening = False
        self._unanswered = 0
        self._digits = os.urandom(8).hex()  # of the file that this node makes, if it is node 0

    def take(self, data: bytes) -> None:
        """Have a child answer a request.

        Raises:
            Malformed: it is none, or more than the doctor asks at once.
        """
        asked = messages.asked(data)
        assert isinstance(asked, messages.Asked)
        question: Callable[[], messages.Reply]
        if isinstance(asked.request, messages.TellTime):  # a child would be late
            return self._reply(asked.number, messages.Time(time.time()))
        if self._unanswered == _AT_ONCE:
            raise Malformed("asks too much at once")
        if isinstance(asked.request, messages.Introduce):
            if self._is_listening:
                raise Malformed("asks twice to listen")
            question = partial(facts_of, self._order, *self._listen(asked.request))
        elif isinstance(asked.request, messages.Make | messages.Remove):
            if self._order.node_rank != 0:
                raise Malformed("has a node that is not node 0 make a file")
            question = partial(share, self._order, self._digits, type(asked.request))
        else:
            question = partial(answer, asked.request, self._order)
        otherwise: messages.Reply = messages.Failed(f"no answer in {duration(asked.within)}")
        self._unanswered += 1
        reply = partial(self._on_answered, asked.number)
        pending = self._loop.ask(partial(_in_words, question), otherwise, reply, within=asked.within)
        # the kernel cannot end a process in uninterruptible sleep, as on a dead file server
        self._loop.timer(self._loop.now() + asked.within + _MARGIN, pending.give_up)
        return None

    def _on_answered(self, number: int, reply: messages.Reply) -> None:
        self._unanswered -= 1
        self._reply(number, reply)

    def _reply(self, number: int, reply: messages.Reply) -> None:
        self._send(messages.encode(messages.Answered(number, reply)))

    def _listen(self, request: messages.Introduce) -> tuple[int, tuple[int, ...]]:
        """Listen on a free port and on those of the request that are free, and have a child serve them; return the ports."""
        listening = [measure.listen()]
        for port in request.ports if self._may_listen is None else {*request.ports} & {*self._may_listen}:
            with suppress(OSError):  # taken; what matters is whether others get there
                listening.append(measure.listen(port))
        chosen, *ports = (stream.getsockname()[1] for stream in listening)
        serve = partial(_serve, len(listening), self._order.token, self._order.node_rank)
        self._loop.ask(serve, None, descriptors=tuple(stream.fileno() for stream in listening))
        for stream in listening:
            stream.close()
        self._is_listening = True
        return chosen, tuple(ports)


def _serve(streams: int, token: str, node_rank: int) -> None:
    measure.serve([socket.socket(fileno=FIRST + index) for index in range(streams)], token, node_rank)


def _in_words(question: Callable[[], messages.Reply]) -> messages.Reply:
    """Answer, in the child; an error is an answer too, and says what it is."""
    try:
        return question()
    except LaunchError as error:
        return messages.Failed(line(error.message))
    except Exception as error:  # noqa: BLE001 - the doctor names it, and goes on
        return messages.Failed(line(f"{type(error).__name__}: {error}"))


# --- answers, each in a child


def answer(request: messages.Request, order: HostOrder) -> messages.Reply:
    """Return the answer to a request that needs nothing but the order of this node."""
    match request:
        case messages.Measure():
            return measure.measure(request, order.token)
        case messages.Meet():
            return measure.meet(order.endpoint.address or order.hosts[0], request.port, order.token)
        case messages.Look():
            return share(order, request.digits, messages.Look)
        case messages.Examine():
            return examine(request, order)
    raise ValueError(f"{type(request).__name__} is no request of this kind")


def facts_of(order: HostOrder, port: int, ports: tuple[int, ...]) -> messages.Facts:
    """Return what this node is."""
    from ddplaunch.plan.devices.interpreter import find_torch

    spec = order.job.spec()
    build = find_torch(spec.program.python or sys.executable)
    script, no_script = "", ""
    folder = _enter(order)
    if not folder and spec.program.target != "-" and spec.program.kind is ProgramKind.SCRIPT:
        try:
            script = _digest(spec.program.target)
        except OSError as error:
            no_script = why_failed(error)
    return messages.Facts(
        host=host_name(os.uname().nodename),
        addresses=_addresses(order),
        port=port,
        ports=ports,
        python=line(sys.version.partition(" ")[0]),
        torch=line(build.version) if build is not None else "",
        nccl=build is not None and build.nccl,
        folder=line(folder),
        script=script,
        no_script=line(no_script),
    )


def _addresses(order: HostOrder) -> tuple[str, ...]:
    """Return the numeric addresses under which others may reach this node, the likeliest first."""
    if order.simulated:
        from ddplaunch.plan.cluster.endpoints import LOOPBACK

        return (LOOPBACK,)
    from ddplaunch.system.net.addresses import is_loopback, usable_addresses

    connection = os.environ.get("SSH_CONNECTION", "").split()  # client's address and port, server's address and port
    reached = [address for address in connection[2:3] if not is_loopback(address)]
    return tuple(dict.fromkeys((*reached, *usable_addresses())))[: messages.MAX_ADDRESSES]


def _enter(order: HostOrder) -> str:
    """Change into the folder where the command was typed; return why that fails, "" if it does not."""
    try:
        os.chdir(os.fsdecode(order.cwd))
    except OSError as error:
        return f"{os.fsdecode(order.cwd)}: {why_failed(error)}"
    return ""


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def share(order: HostOrder, digits: str, what: type[messages.Request]) -> messages.Shared:
    """Make the file with these digits, look for it, or remove it."""
    from ddplaunch.record.folders import runs_folder

    runs = order.job.spec().log_dir or runs_folder(_variables(order))
    in_runs, in_current = (
        _is_seen(folder, digits, what) if folder else None for folder in (runs, os.fsdecode(order.cwd))
    )
    return messages.Shared(runs=in_runs, current=in_current, digits=digits)


def _is_seen(folder: str, digits: str, what: type[messages.Request]) -> bool | None:
    """Make, look for, or remove the file in a folder; return whether it is there now, None if the folder fails."""
    path = os.path.join(folder, f".ddplaunch-doctor-{digits}")
    try:
        if what is messages.Make:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        elif what is messages.Remove:
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


def examine(request: messages.Examine, order: HostOrder) -> messages.Examined:
    """Run the checks of this machine.

    Raises:
        LaunchError: there is no such check, or no such interpreter here.
    """
    from ddplaunch.tools.doctor import examine as doctor

    _enter(order)
    chosen = doctor.chosen(doctor.ALL_CHECKS, request.only)
    report = doctor.examine(chosen, doctor.subject_of(order.job.spec(), _variables(order)))
    return messages.Examined(doctor.presentable(report, ""))  # no longer than the doctor takes


# --- the process


def main() -> int:
    """Get the order and answer requests until the doctor closes our stdin; return the exit status."""
    requests, replies = reserve_stdio()
    frame = requests.wait(_ORDER_TIMEOUT)
    if frame is None or frame[0] != ORDER:
        return NODE_LOST
    loop = Loop()
    replies.attach(loop)
    try:
        examinee = Examinee(loop, order_in(frame[1]), partial(replies.put, CONTROL))
        return _serve_doctor(loop, requests, examinee)
    except (Malformed, FrameError):
        return NODE_LOST
    finally:
        loop.close()


def _serve_doctor(loop: Loop, requests: InputPipe, examinee: Examinee) -> int:
    """Pass the requests in the pipe to the examinee until the pipe ends; return the exit status."""
    ended: list[bool] = []

    def on_input() -> None:
        if not requests.read():
            ended.append(True)
        while (frame := requests.take()) is not None:
            tag, data = frame
            if tag == REQUEST:
                examinee.take(data)

    loop.watch(requests, on_input)
    on_input()  # what came with the order
    while not ended:
        loop.run_once()
    return OK


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours, and the doctor shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(BUG)
