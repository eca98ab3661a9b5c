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

Each worker repeats what the imports printed, and the variables and limits that they set, as if it had imported the modules
itself. Nothing is forked where workers would share something to their harm, such as a thread, a child, a connection or an open
GPU. warm.py serves further runs in the same way, but none where the modules would be imported from other files by now.
"""

import os
import sys

before = set(sys.modules)
import _socket  # noqa: E402 - the C part of `socket`, with fewer imports
import ctypes  # noqa: E402
import gc  # noqa: E402
import resource  # noqa: E402
from importlib import machinery as loading  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    Stamp = tuple[int, int, int] | None

_EAGAIN = 11  # what a fork fails with where there is no room
_EMFILE = 24  # too many open files
_LENGTH = 8  # bytes of one
_LONGEST_ANCILLARY = 2048  # bytes: more than the kernel sends descriptors with (SCM_MAX_FD, unix(7))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGKILL = 9
_NO_PARENT = 127  # exit status of a worker whose agent has ended, or has given it up: nothing waits for it
_LONGEST_NOTE = 1000  # characters
# for `gc.set_threshold`: objects of imports become garbage at once or hardly ever; usual collections take a fifth of the time
_RARELY = (20_000, 1000, 1000)
_LIMITS = {resource.RLIMIT_NOFILE: "open files", resource.RLIMIT_NPROC: "processes"}  # which this process needs itself


def serve(fd: int, modules: "list[str]", arguments: "list[str]") -> "list[str]":
    """Import `modules`, then fork the workers of each request. Returns only in a worker, with the worker's arguments.

    `arguments` begin with the kind and the target of the program, which are the same for all.
    """
    agent = os.getppid()
    control = _socket.socket(fileno=fd)
    imported = Imported(modules, *arguments[:2])
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
        mine = _fork_all(control, len(workers))
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


def _fork_all(control: "Any", number: int) -> "int | None":
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
    """Make this forked process like a fresh one; once a byte comes from the pipe `release`, return its arguments.

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
    """Give a descriptor the number `target`; close it instead if that number is in use, or above the limit."""
    if fd == target:
        return
    try:
        os.fstat(target)  # in use
    except OSError:
        try:
            os.dup2(fd, target, False)
        except OSError:  # the program does without it
            pass
    os.close(fd)


def _open_stdin() -> None:
    """Make sys.stdin again for the file that descriptor 0 is now: a stream remembers what kind of file it was made for."""
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


# --- the modules that all workers share


class Imported:
    """The modules that were imported, and the side effects of their imports."""

    def __init__(self, modules: "list[str]", kind: str, target: str) -> None:
        """Import these modules as the program would, and record what else the imports change: output, variables, limits.

        `kind` and `target` are those of the bootstrap. Each forked worker makes the same changes in its own environment.
        """
        self._printed = _Printed()
        before = dict(os.environ)
        limits = {which: resource.getrlimit(which) for which in _LIMITS}
        self._folder = _folder()
        thresholds = gc.get_threshold()
        gc.set_threshold(*_RARELY)
        ours = gc.get_threshold()  # Python 3.14 has only two of them
        self._notes, self._why = _import_all(modules, kind, target)
        # an import may have set thresholds of its own, even only the first of the three: these stay
        found = zip(gc.get_threshold(), ours, thresholds)  # noqa: B905 - Python 3.8 has no `strict`
        gc.set_threshold(*(old if now == our else now for now, our, old in found))
        self._limits = {which: now for which in _LIMITS if (now := resource.getrlimit(which)) != limits[which]}
        for which in self._limits:
            try:
                resource.setrlimit(which, limits[which])
            except ValueError:
                self._why = f"an imported module has lowered the hard limit of {_LIMITS[which]}"
        self._variables = {
            name: (before.get(name), os.environ.get(name))
            for name in before.keys() | os.environ.keys()
            if before.get(name) != os.environ.get(name)
        }
        self._printed.end()
        gc.collect(0)  # older objects have been collected
        gc.freeze()  # a collection in a worker would write to the pages of all objects, and so copy them

    def why_unsafe(self, sockets: "Collection[int]", children: "Collection[int]" = ()) -> "str | None":
        """Return why nothing may be forked from this process; None if it may. `sockets` and `children` are our own."""
        return self._why or _why_unsafe(sockets, children, self._folder)

    def leave_folder(self) -> None:
        """Leave the working directory, so that its file system can be unmounted; workers begin elsewhere anyway."""
        os.chdir("/")
        self._folder = _folder()

    @property
    def lines(self) -> str:
        """The lines for the agent: which modules could not be imported, and that all others are."""
        return "".join(f"note {note}\n" for note in self._notes) + "ready\n"

    def take_over(self) -> None:
        """Repeat in a worker the side effects of the imports: set their variables and limits, print what they printed."""
        for name, (before, after) in self._variables.items():
            if os.environ.get(name) == before:  # else the worker has a value of its own
                if after is None:
                    del os.environ[name]
                else:
                    os.environ[name] = after
        self._printed.print()
        for which, limits in self._limits.items():
            resource.setrlimit(which, limits)


def _import_all(modules: "list[str]", kind: str, target: str) -> "tuple[list[str], str | None]":
    """Import modules as the program would; return a note on each that cannot be imported, and why nothing may be forked then."""
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
            try:
                text = f"{type(error).__name__}: {error}"
            except Exception:  # noqa: BLE001 - its text is the module's own code
                text = type(error).__name__
            notes.append(f"{name}: {text}"[:_LONGEST_NOTE].replace("\n", " "))
            package = name.partition(".")[0]
            if package not in sys.modules and any(other.startswith(f"{package}.") for other in sys.modules):
                # the program would import it once more, and parts in C may crash then
                why = f"{package} can only be imported in part"
    sys.path[:] = path
    return notes, why


def folder_of(kind: str, target: str) -> str:
    """Return the folder that is first on the import path of a program."""
    return os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))


class _Printed:
    """Everything that is written to stdout and stderr from its construction until `end`."""

    def __init__(self) -> None:
        self._files = [_temporary_file(), _temporary_file()]
        self._texts = [b"", b""]
        for target, file in enumerate(self._files, 1):
            os.dup2(file, target)

    def end(self) -> None:
        """Keep the texts; anything that is written later is lost."""
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
        """Write the texts to the stdout and stderr of now."""
        for target, text in enumerate(self._texts, 1):
            left = text
            while left:
                left = left[os.write(target, left) :]


def _temporary_file() -> int:
    if hasattr(os, "memfd_create"):  # not where Python was built with an old glibc
        return os.memfd_create("printed")
    return os.open(os.environ.get("TMPDIR") or "/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)


def _folder() -> "tuple[int, int]":
    """Return device and inode of the working directory, which may have lost its name."""
    found = os.stat(".")
    return found.st_dev, found.st_ino


def _why_unsafe(sockets: "Collection[int]", children: "Collection[int]", folder: "tuple[int, int]") -> "str | None":
    """Return what forked workers would share to their harm; None if nothing. `folder` is the working directory to expect."""
    if _folder() != folder:
        return "an imported module has changed the working directory"
    if len(os.listdir("/proc/self/task")) > 1:
        # libraries like OpenBLAS end their threads before a fork, and restart them when needed
        if (pid := os.fork()) == 0:
            os._exit(0)
        wait(pid)
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


def wait(pid: int) -> int:
    """Wait for the end of a child; return its status, or 0 where an imported module, or the kernel for it, has reaped it."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


class ImportedFiles:
    """Files and folders from which modules were imported, as they were then, to see whether a later import finds the same."""

    def __init__(self, since: int, folder: str) -> None:
        """Remember the imported files; imports began at `since` (CLOCK_REALTIME nanoseconds), for a script in `folder`."""
        modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
        files = {str(names["__file__"]) for names in modules if names.get("__file__")}
        self._seen = {
            path: _stamp(path)
            for path in (*files, *sys.path[1:])  # the first is that of the bootstrap
        }
        # changed since the imports began: they may have read the file before
        self._unsure = [path for path in files if (stamp := self._seen.get(path)) and stamp[0] >= since]
        self._suffixes = tuple(loading.all_suffixes())
        self._names = {name.partition(".")[0] for name in sys.modules} - {"__main__", *sys.builtin_module_names}
        self._libraries = _replaced_libraries()
        self._folder = folder
        self._found = self._in(folder)

    def why_unfit(self, folder: str) -> "str | None":
        """Return why scripts in another folder than the first might import other modules; None if they would not."""
        if folder != self._folder and (found := self._in(folder) or self._found):
            return f"scripts in {folder} and in {self._folder} may import different modules {min(found)}"
        return None

    def why_stale(self) -> "str | None":
        """Return which file has changed since the imports; None if none has."""
        for path in self._unsure:
            return f"{path} has changed"
        for path, stamp in self._seen.items():
            if _stamp(path) != stamp:
                return f"{path} has changed"
        if replaced := _replaced_libraries() - self._libraries:
            return f"{min(replaced)} has been replaced"
        if changed := self._in(self._folder) ^ self._found:
            return f"{min(changed)} in {self._folder} has changed"
        return None

    def _in(self, folder: str) -> "set[str]":
        """Return the modules in this folder whose names have been imported, from here or elsewhere."""
        entries = _entries(folder)
        names = {entry.partition(".")[0] for entry in entries if entry.endswith(self._suffixes)}
        for entry in self._names.intersection(entries):
            if any(inner.startswith("__init__.") for inner in _entries(f"{folder}/{entry}")):  # a package
                names.add(entry)
        return names & self._names


def _entries(folder: str) -> "list[str]":
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _stamp(path: str) -> "Stamp":
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _replaced_libraries() -> "set[str]":
    """Return the libraries whose files were removed or replaced since they were loaded (proc_pid_maps(5))."""
    with open("/proc/self/maps", "rb") as file:
        lines = [os.fsdecode(line) for line in file if line.endswith(b" (deleted)\n") and b".so" in line]
    return {line.split(None, 5)[5].replace(" (deleted)\n", "") for line in lines}
