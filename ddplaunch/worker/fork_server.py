"""Forks workers from one interpreter, which has imported once what each of them would import.

The agent starts it with the command of a worker and one variable more. `serve` returns in each worker and never in the
server, so that a program runs and ends as in a fresh process: in the true `__main__`, with all that Python does at its end.

On the socket, whose number the variable holds:

    to the server    for all workers that are to begin together: a length (8 bytes, with all descriptors), and as many bytes:
                     the number of descriptors of each worker (8 bytes); then for each worker a length (8 bytes), and as many
                     bytes: CPUs, number of arguments, arguments and variables, each ended by a zero byte. The descriptors of
                     a worker are those that become 0, 1 and 2, the file for stacks if there is one, and a pipe from which it
                     reads a byte before it begins
    to the agent     lines: `note TEXT`, `ready`, `unsafe WHY` (the last); for each worker `pid N`, and then `forked`; or
                     `errno N` or `lost WHY` where one cannot be forked, after which none is

It refuses to fork while it has threads, children, connections or an open GPU, which the workers would share.
"""

import os
import sys

before = set(sys.modules)
import _socket  # noqa: E402 - the C part of `socket`, with fewer imports
import ctypes  # noqa: E402

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
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGKILL = 9
_NO_PARENT = 127  # exit status of a worker whose agent has ended, or has given it up: nothing waits for it


def serve(
    load: "Callable[[str], dict[str, Any]]", fd: int, modules: "list[str]", arguments: "list[str]"
) -> "list[str]":
    """Import `modules`, then fork the workers of each request. It returns in each worker, with the arguments of that worker.

    `arguments` begin with the kind and the target of the program, which are the same for all. `load` is the bootstrap's.
    """
    agent = os.getppid()
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
    """Send the agent these lines; exit if it has ended."""
    try:
        control.sendall(text.encode(errors="replace"))
    except OSError:  # the agent has ended
        os._exit(0)


def receive(control: "Any") -> "tuple[bytes, list[int]]":
    """Wait for the next request; return its content and descriptors.

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
    """Return content and descriptors for each worker of a request; [] where descriptors are missing, which the agent is told."""
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
    """Close the descriptors of these workers in a process that is none of them."""
    for _, descriptors in workers:
        for fd in descriptors:
            os.close(fd)


def _fork_all(control: "Any", number: int, wait: "Callable[[int], int]") -> "int | None":
    """Fork this many workers, and tell the agent their pids; return in each worker its index, and None in the server.

    Their parent becomes the agent, the nearest subreaper, since the process in between that forks them all exits at once.
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


def become(agent: int, content: bytes, stdio: "list[int]", release: int) -> "list[str]":
    """Make this forked process like a fresh one, and return its arguments once a byte comes from the pipe `release`.

    `content` holds CPUs, the number of arguments, arguments and variables, each ended by a zero byte. `agent` is the pid that
    must be this process's parent: the guard's, where the interpreter is kept warm.
    """
    os.setsid()
    for target, fd in enumerate(stdio[:3]):
        os.dup2(fd, target)
        os.close(fd)
    cpus, count, *fields = content.split(b"\0")[:-1]
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(b",")))
    arguments = [os.fsdecode(field) for field in fields[: int(count)]]
    os.environ.clear()
    for field in fields[int(count) :]:
        name, _, value = field.partition(b"=")
        os.environ[os.fsdecode(name)] = os.fsdecode(value)
    _open_stdin()
    _seed()
    if "threading" in sys.modules:  # its main thread keeps the number of the server's
        sys.modules["threading"].main_thread()._set_native_id()
    # our parent is the agent by now; before, its end would not be that of our parent
    if not os.read(release, 1):
        os._exit(_NO_PARENT)
    os.close(release)
    for fd in stdio[3:]:  # now that no descriptor of ours can have the number
        _move(fd, int(os.environ["DDPLAUNCH_STACKS"].partition(",")[0]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(_NO_PARENT)
    return arguments


def _move(fd: int, target: int) -> None:
    """Give a descriptor this number, unless an imported module has taken it, or a low limit of open files forbids it."""
    if fd == target:
        return
    try:
        if not _is_open(target):
            os.dup2(fd, target, False)
    except OSError:  # the program does without it
        pass
    os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _open_stdin() -> None:
    """Make sys.stdin again for the file that descriptor 0 is now: it remembers the kind of file for which it was made."""
    import io

    old: Any = sys.__stdin__
    raw: Any = io.FileIO(0, "rb", closefd=False)
    raw.name = "<stdin>"
    buffer = io.BufferedReader(raw)
    stdin: Any = io.TextIOWrapper(buffer, old.encoding, old.errors, "\n", raw.isatty(), old.write_through)
    stdin.mode = "r"
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def _seed() -> None:
    """Renew the secrets and random seeds that a fresh process would have of its own; `random` does so itself."""
    # torch.seed() would seed the GPUs too, whose seed is a constant
    if hasattr(sys.modules.get("torch"), "default_generator"):
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
