"""Forks workers from one warm interpreter, which has imported once what each of them would import.

The agent starts it with the command of a worker and one variable more. `serve` returns in each worker and never in the
server, so that a program runs and ends as in a fresh process: in the true `__main__`, with all that Python does at its end.

On the socket, whose number the variable holds:

    to the server    a length (8 bytes, with descriptors), and then as many bytes, for all workers that are to begin together:
                     how many descriptors each has (8 bytes), and for each a length (8 bytes) and so many bytes: CPUs, number
                     of arguments, arguments and variables, each ended by a zero byte. The descriptors of each are what are
                     to be 0, 1 and 2, the file for stacks if there is one, and a pipe from which the worker reads a byte
                     before it begins
    to the agent     lines: `note TEXT`, `ready`, `unsafe WHY` (the last); for each worker `pid N`, and then `forked`; or
                     `errno N` or `lost WHY` where one cannot be forked, after which none is

It refuses to fork while it has threads, children, connections or an open GPU, which the workers would share.
"""

import os
import sys

before = set(sys.modules)
import _socket  # noqa: E402 - what `socket` is made of, with fewer imports

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_EAGAIN = 11  # what a fork fails with where there is no room
_EMFILE = 24  # too many open files
_LENGTH = 8  # bytes of one
_LONGEST_ANCILLARY = 2048  # bytes: more than the kernel sends descriptors with (SCM_MAX_FD, unix(7))


def serve(
    load: "Callable[[str], dict[str, Any]]", fd: int, modules: "list[str]", arguments: "list[str]"
) -> "list[str]":
    """Import `modules`, then fork the workers of each request; return its arguments in each of them.

    `arguments` are those that every worker has: kind and target of the program come first. `load` is the bootstrap's.
    """
    agent = os.getppid()
    become = load("forked")["become"]
    control = _socket.socket(fileno=fd)
    names = load("imported")
    imported = names["Imported"](modules, *arguments[:2])
    greeting = imported.lines
    while True:
        if (why := imported.why_unsafe((fd,))) is not None:
            send(control, f"unsafe {why}\n")
            os._exit(0)
        if greeting:
            send(control, greeting)
            greeting = ""
        try:
            request = receive(control)
        except (EOFError, OSError):  # the agent wants no more
            os._exit(0)
        workers = parts(control, *request)
        if not workers:
            continue
        mine = _fork_all(control, len(workers), names["wait"])
        if mine is not None:
            control.close()
            content, (*stdio, release) = workers.pop(mine)
            close(workers)
            arguments = become(agent, content, stdio, release)
            imported.take_over()
            return arguments
        close(workers)


def send(control: "Any", text: str) -> None:
    """Send the agent these lines; end where it has ended."""
    try:
        control.sendall(text.encode(errors="replace"))
    except OSError:  # the agent has ended
        os._exit(0)


def receive(control: "Any") -> "tuple[bytes, list[int]]":
    """Wait for the next request; give its content and descriptors.

    Raises:
        EOFError, OSError: the agent has closed the connection.
    """
    header, ancillary = b"", b""
    while len(header) < _LENGTH:
        some, found, _, _ = control.recvmsg(_LENGTH - len(header), _LONGEST_ANCILLARY)
        if not some:
            raise EOFError
        header += some
        for _, _, data in found:
            ancillary += data
    left = int.from_bytes(header, "big")
    received = []
    while left:
        part = control.recv(min(left, 1 << 20))
        if not part:
            raise EOFError
        received.append(part)
        left -= len(part)
    return b"".join(received), [
        int.from_bytes(ancillary[at : at + 4], sys.byteorder) for at in range(0, len(ancillary), 4)
    ]


def parts(control: "Any", content: bytes, descriptors: "list[int]") -> "list[tuple[bytes, list[int]]]":
    """Return what a request to fork says of each worker, and the descriptors of each; tell the agent if those are not all."""
    each, content = int.from_bytes(content[:_LENGTH], "big"), content[_LENGTH:]
    contents = []
    while content:
        end = _LENGTH + int.from_bytes(content[:_LENGTH], "big")
        contents.append(content[_LENGTH:end])
        content = content[end:]
    if len(descriptors) != each * len(contents):  # the kernel gives none beyond our limit of open files
        close([(b"", descriptors)])
        send(control, f"errno {_EMFILE}\n")
        return []
    return [(one, descriptors[at * each : (at + 1) * each]) for at, one in enumerate(contents)]


def close(workers: "list[tuple[bytes, list[int]]]") -> None:
    """Close the descriptors of these workers, which others have."""
    for _, descriptors in workers:
        for fd in descriptors:
            os.close(fd)


def _fork_all(control: "Any", number: int, wait: "Callable[[int], int]") -> "int | None":
    """Fork so many workers whose parent is the agent, and tell it so; give in a worker which of them it is.

    A process in between forks them all, ends, and leaves them to the nearest subreaper.
    """
    try:
        between = os.fork()
    except OSError as error:
        send(control, f"errno {error.errno}\n")
        return None
    if between == 0:
        for mine in range(number):
            try:
                worker = os.fork()
            except OSError as error:
                os._exit(error.errno or _EAGAIN)
            if worker == 0:
                return mine
            send(control, f"pid {worker}\n")
        os._exit(0)
    status = wait(between)
    if signum := status & 0x7F:
        send(control, f"lost the process that was to fork them was killed by signal {signum}\n")
    else:
        send(control, "forked\n" if status == 0 else f"errno {status >> 8}\n")
    return None
