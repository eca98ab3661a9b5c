"""Forks workers from one warm interpreter, which has imported once what each of them would import.

The agent starts it with the command of a worker and one variable more. `serve` returns in each worker and never in the
server, so that a program runs and ends as in a fresh process: in the true `__main__`, with all that Python does at its end.
What the imports print is kept, and printed by each worker as if it had imported itself.

On the socket, whose number the variable holds:

    to the server    for each worker a length (8 bytes, with the descriptors that are to be 0, 1 and 2, that of the file for
                     stacks if there is one, and of a pipe from which the worker reads a byte before it begins), and then
                     as many bytes: CPUs, number of arguments, arguments and variables, each ended by a zero byte
    to the agent     lines: `note TEXT`, `ready`, `unsafe WHY` (the last); for each worker `pid N`, or `errno N`

It refuses to fork while it has threads, children, connections or an open GPU, which the workers would share.
"""

import os
import sys

before = set(sys.modules)
import _socket  # noqa: E402 - what `socket` is made of, with fewer imports
import gc  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

_EAGAIN = 11  # what a fork fails with where there is no room

_LONGEST_NOTE = 1000  # characters


def serve(
    fd: int, modules: "list[str]", arguments: "list[str]", become: "Callable[[int, bytes, list[int], int], list[str]]"
) -> "list[str]":
    """Import `modules`, then fork a worker for each request; return its arguments in each worker.

    `arguments` are those that every worker has: kind and target of the program come first. `become` is that of forked.py.
    """
    agent = os.getppid()
    control = _socket.socket(fileno=fd)
    imported = Imported(modules, *arguments[:2])
    ready = False
    while True:
        if (why := imported.why_unsafe((fd,))) is not None:
            send(control, f"unsafe {why}\n")
            os._exit(0)
        if not ready:
            imported.report_ready(control)
            ready = True
        try:
            content, (*stdio, release) = receive(control)
        except (EOFError, OSError):  # the agent wants no more
            os._exit(0)
        answer = _fork()
        if answer is None:
            control.close()
            arguments = become(agent, content, stdio, release)
            imported.take_over()
            return arguments
        for one in (*stdio, release):
            os.close(one)
        send(control, answer)


class Imported:
    """What was imported, and what it has done besides."""

    def __init__(self, modules: "list[str]", kind: str, target: str) -> None:
        """Import these modules as the program, which is of this kind, would."""
        self._printed = _Printed()
        before = dict(os.environ)
        self._folder = _folder()
        self._notes, self._why = _import_all(modules, kind, target)
        self._variables = {
            name: (before.get(name), os.environ.get(name))
            for name in before.keys() | os.environ.keys()
            if before.get(name) != os.environ.get(name)
        }
        self._printed.end()
        gc.collect()
        gc.freeze()  # a collection in a worker would write to the pages of all objects, and so copy them

    def why_unsafe(self, sockets: "Collection[int]", children: "Collection[int]" = ()) -> "str | None":
        """Say why nothing may be forked from this process, None if it may; these sockets and children are ours."""
        return self._why or _why_unsafe(sockets, children, self._folder)

    def leave_folder(self) -> None:
        """Go to where no file system is held; workers are to begin elsewhere anyway."""
        os.chdir("/")
        self._folder = _folder()

    def report_ready(self, control: "Any") -> None:
        """Tell the agent what was not imported, and that all else was."""
        send(control, "".join(f"note {note}\n" for note in self._notes) + "ready\n")

    def take_over(self) -> None:
        """Be, in a worker, the process that has imported all this: set its variables, print what it has printed."""
        _set_again(self._variables)
        self._printed.print()


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
    while len(header) < 8:
        some, found, _, _ = control.recvmsg(8 - len(header), 64)
        if not some:
            raise EOFError
        header += some
        for _, _, data in found:
            ancillary += data
    left = int.from_bytes(header, "big")
    parts = []
    while left:
        part = control.recv(min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts), [
        int.from_bytes(ancillary[at : at + 4], sys.byteorder) for at in range(0, len(ancillary), 4)
    ]


def _import_all(modules: "list[str]", kind: str, target: str) -> "tuple[list[str], str | None]":
    """Import these modules as the program would; give a note for each that cannot be imported, and why none may be forked."""
    notes, why = [], None
    path = list(sys.path)
    callers = os.environ.get("DDPLAUNCH_CALL", "").split("\n")[1:]
    if any(callers):  # a function runs with the path of the program that called launch()
        sys.path[:] = callers
    elif not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder_of(kind, target)
    for name in modules:
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001 - whatever it raises, SystemExit too
            notes.append(f"{name}: {_described(error)}"[:_LONGEST_NOTE].replace("\n", " "))
            package = name.partition(".")[0]
            if package not in sys.modules and any(other.startswith(f"{package}.") for other in sys.modules):
                # the program would import it once more: what is made of C may crash
                why = f"{package} can only be imported in part"
    sys.path[:] = path
    return notes, why


def folder_of(kind: str, target: str) -> str:
    """Give the folder that is first on the import path of a program."""
    return os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its text is the module's own code
        return type(error).__name__


class _Printed:
    """What is written to stdout and stderr from now on until `end`."""

    def __init__(self) -> None:
        self._files = [_temporary_file(), _temporary_file()]
        self._texts = [b"", b""]
        for target, file in enumerate(self._files, 1):
            os.dup2(file, target)

    def end(self) -> None:
        """Keep it; what is written later is lost."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for target, file in enumerate(self._files, 1):
            self._texts[target - 1] = os.pread(file, os.fstat(file).st_size, 0)
            os.close(file)
            os.dup2(nowhere, target)
        os.dup2(nowhere, 0)  # where an import has closed it, a worker's stdout would become 0
        if nowhere:
            os.close(nowhere)

    def print(self) -> None:
        """Write it to what are stdout and stderr now."""
        for target, text in enumerate(self._texts, 1):
            left = text
            while left:
                left = left[os.write(target, left) :]


def _temporary_file() -> int:
    if hasattr(os, "memfd_create"):  # not where Python was built with an old glibc
        return os.memfd_create("printed")
    return os.open(os.environ.get("TMPDIR") or "/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)


def _folder() -> "tuple[int, int]":
    """The working directory, which may have lost its name."""
    found = os.stat(".")
    return found.st_dev, found.st_ino


def _why_unsafe(sockets: "Collection[int]", children: "Collection[int]", folder: "tuple[int, int]") -> "str | None":
    """Say what forked workers would share to their harm, None if nothing; `folder` is the one in which they should begin."""
    if _folder() != folder:
        return "an imported module has changed the working directory"
    if len(os.listdir("/proc/self/task")) > 1:
        _let_threads_end()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        return "an imported module has started threads, which a forked process would not have"
    try:
        with open(f"/proc/self/task/{threads[0]}/children") as file:
            if not set(map(int, file.read().split())) <= {*children}:
                return "an imported module has started a process"
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        pass
    for one in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{one}")
        except OSError:  # the folder itself, which was open for the list
            continue
        if name.startswith("socket:") and int(one) not in sockets:
            return "an imported module has opened a socket"
        if name.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/")):
            return f"an imported module has opened {name}: a GPU cannot be used across a fork"
    return None


def _let_threads_end() -> None:
    """Fork once for nothing: libraries like OpenBLAS end their threads before a fork, and start them again when they compute."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    _wait(pid)


def _wait(pid: int) -> int:
    """Wait for the end of a child; give its status, or 0 where an imported module has it reaped by another or by the kernel."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _fork() -> "str | None":
    """Fork a worker whose parent is the agent; give the line that says so, None in the worker.

    A process in between ends, and leaves the worker to the nearest subreaper.
    """
    read, write = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            worker = 0
            try:
                worker = os.fork()
            except OSError as error:
                os._exit(error.errno or 1)
            if worker:
                os.write(write, b"pid %d\n" % worker)
                os._exit(0)
            return None
        status = _wait(between)
        os.set_blocking(read, False)  # it fails where nothing was written
        answer = os.read(read, 32).decode() if status == 0 else f"errno {status >> 8 or _EAGAIN}\n"
    except OSError as error:
        answer = f"errno {error.errno}\n"
    finally:
        os.close(read)
        os.close(write)
    return answer


def _set_again(variables: "dict[str, tuple[str | None, str | None]]") -> None:
    """Set the variables as the imports have, from what they were to what they became, where this process has no others."""
    for name, (before, after) in variables.items():
        if os.environ.get(name) == before:
            if after is None:
                del os.environ[name]
            else:
                os.environ[name] = after
