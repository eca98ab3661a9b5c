"""Runs in a fork server: one process of a node, which imports the program's modules once and forks the node's workers.

The agent starts it with the command of a worker and one variable more. `serve` returns in each worker and never in the
server, so that a program runs and ends as in a fresh process: in the true `__main__`, with all that Python does at its end.

It is asked at a socket, whose number the variable holds. A warm interpreter (warm.py), which does the same for several runs, and
its guards (guard.py) are asked in the same way. A request is a length (8 bytes, with all descriptors), and as many bytes: fields,
each ended by a zero byte, the first of which is the kind. What comes back is lines.

    fork ...                all workers that are to begin together: the number of descriptors of each (8 bytes); then for each
                            a length (8 bytes), and as many bytes: CPUs, number of arguments, arguments and variables. The
                            descriptors of a worker: those that become 0, 1 and 2, the file for stacks if there is one, a pipe
                            from which it reads a byte before it begins; with a guard, a pipe for how it has ended. The answer
                            is `pid N` for each, then `forked`; or `errno N` or `lost WHY`, after which none is forked
    agent PID MASK          a guard: for all workers, with the working directory, and two files to be kept open to the end
    reap PID                a guard: frees the pid of a worker that has ended; the answer is `usage RSS SECONDS`
    check SECONDS FOLDER    a warm interpreter, as all below: would it serve a script in FOLDER, and then be kept for SECONDS
                            unused? The answer is `ok`; or `unfit WHY` for this script; or `stale WHY` or `unsafe WHY`, and it
                            ends with its last guard
    guard SECONDS FOLDER    the same answers; after `ok` a guard serves the connection
    status                  the answer is pid, runs, running guards, seconds left, interpreter and modules, with tabs between
    stop                    the answer is `ok`; it ends with its last guard

Unasked come `guard PID` of a guard, `note TEXT` on imports, and `ready`; `unsafe WHY` is the last line.

Each worker repeats what the imports printed, and the variables and limits that they set, as if it had imported the modules
itself. Nothing is forked where workers would share something to their harm, such as a thread, a child, a connection or an open
GPU.
"""

import os
import sys

before = set(sys.modules)
import _socket  # noqa: E402 - the C part of `socket`, with fewer imports
import ctypes  # noqa: E402
import gc  # noqa: E402
import resource  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    # what the agent sends for one worker: content, and descriptors in the order above
    Request = tuple[bytes, list[int]]

_EAGAIN = 11  # what a fork fails with where there is no room
_EMFILE = 24  # too many open files
_LENGTH = 8  # bytes of a length or count on the socket
_LONGEST_ANCILLARY = 2048  # bytes: more than the kernel sends descriptors with (SCM_MAX_FD, unix(7))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGKILL = 9
_NO_PARENT = 127  # exit status of a worker whose agent has ended, or has given it up: nothing waits for it
_LONGEST_NOTE = 1000  # characters
# for `gc.set_threshold`: objects of imports become garbage at once or hardly ever; usual collections take a fifth of the time
_RARELY = (20_000, 1000, 1000)
_LIMITS = {resource.RLIMIT_NOFILE: "open files", resource.RLIMIT_NPROC: "processes"}  # which this process needs itself


def serve(fd: int, modules: "list[str]", arguments: "list[str]") -> "list[str]":
    """Import `modules`, then fork the workers of each request of the agent. Returns only in a worker, with its arguments.

    `fd` is the socket to the agent. `arguments` begin with kind ("script" or "module") and target of the program, the same
    for all workers.
    """
    agent = os.getppid()
    control = _socket.socket(fileno=fd)
    imported = Imported(modules, *arguments[:2])
    unsent = imported.report_to_agent
    while True:
        if (why := imported.why_unsafe((fd,))) is not None:
            send(control, f"unsafe {why}\n")
            os._exit(0)
        if unsent:
            send(control, unsent)
            unsent = ""
        try:
            _fork, fields, descriptors = receive(control)
        except (EOFError, OSError):  # the agent wants no more
            os._exit(0)
        workers = split_fork_request(control, fields, descriptors)
        if not workers:
            continue
        index = _fork_all(control, len(workers))
        if index is not None:  # in the worker
            control.close()
            content, (*files, release) = workers.pop(index)
            close_descriptors(workers)
            arguments = become_worker(agent, content, files, release)
            imported.repeat_side_effects()
            return arguments
        close_descriptors(workers)


def send(control: "Any", text: str) -> None:
    """Send the agent these lines; exit if it has ended."""
    try:
        control.sendall(text.encode(errors="replace"))
    except OSError:  # the agent has ended
        os._exit(0)


def receive(control: "Any") -> "tuple[str, bytes, list[int]]":
    """Wait for the next request; return its kind, the fields behind that, and the descriptors that came with it.

    Raises:
        EOFError, OSError: who asks has closed the connection.
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
    kind, _, fields = b"".join(received).partition(b"\0")
    descriptors = [int.from_bytes(ancillary[at : at + 4], sys.byteorder) for at in range(0, len(ancillary), 4)]
    return kind.decode(errors="replace"), fields, descriptors


def split_fork_request(control: "Any", fields: bytes, descriptors: "list[int]") -> "list[Request]":
    """Return what a request to fork holds for each worker; [] if descriptors are missing, which the agent is told here."""
    descriptors_each, rest = int.from_bytes(fields[:_LENGTH], "big"), fields[_LENGTH:]
    contents = []
    while rest:
        end = _LENGTH + int.from_bytes(rest[:_LENGTH], "big")
        contents.append(rest[_LENGTH:end])
        rest = rest[end:]
    if len(descriptors) != descriptors_each * len(contents):  # the kernel gives none beyond our limit of open files
        close_descriptors([(b"", descriptors)])
        send(control, f"errno {_EMFILE}\n")
        return []
    starts = [descriptors_each * index for index in range(len(contents))]
    return [(one, descriptors[at : at + descriptors_each]) for one, at in zip(contents, starts)]  # noqa: B905 - Python 3.8


def close_descriptors(workers: "list[Request]") -> None:
    """Close the descriptors of these workers in a process that is none of them."""
    for _, descriptors in workers:
        for fd in descriptors:
            os.close(fd)


def _fork_all(control: "Any", number: int) -> "int | None":
    """Fork this many workers, and tell the agent their pids; return in each worker its index, from 0, and None in the server.

    Their parent becomes the agent, the nearest subreaper, since the process in between that forks them all exits at once.
    That process reports by its exit status: 0, or the errno of a fork that failed.
    """
    try:
        between = os.fork()
    except OSError as error:
        send(control, f"errno {error.errno}\n")
        return None
    if between == 0:
        for index in range(number):
            try:
                worker = os.fork()
            except OSError as error:
                os._exit(error.errno or _EAGAIN)
            if worker == 0:
                return index
            send(control, f"pid {worker}\n")
        os._exit(0)
    status = wait(between)
    if signum := status & 0x7F:  # WTERMSIG, wait(2)
        send(control, f"lost the process that was to fork them was killed by signal {signum}\n")
    else:
        send(control, "forked\n" if status == 0 else f"errno {status >> 8}\n")
    return None


def become_worker(parent: int, content: bytes, files: "list[int]", release: int) -> "list[str]":
    """Make this forked process like a fresh one; once a byte comes from the pipe `release`, return the worker's arguments.

    `content` holds CPUs, the number of arguments, arguments and variables, each ended by a zero byte. `files` become the
    descriptors 0, 1 and 2, and a fourth the file for stacks. This process exits if `parent`, the pid of the agent or guard, is
    not its parent by then.
    """
    os.setsid()
    for target, fd in enumerate(files[:3]):
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
    _renew_seeds()
    if "threading" in sys.modules:  # its main thread keeps the thread id of the server's
        sys.modules["threading"].main_thread()._set_native_id()
    # The byte comes once `parent` is our parent: a death signal that is set earlier would come with the end of the process in
    # between. No byte, but the end of the pipe: the agent has ended, or waits no more.
    if not os.read(release, 1):
        os._exit(_NO_PARENT)
    os.close(release)
    for stacks in files[3:]:  # only now: `release` might have had the number
        number, _, _signal = os.environ["DDPLAUNCH_STACKS"].partition(",")
        _renumber(stacks, int(number))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the death signal was set
        os._exit(_NO_PARENT)
    return arguments


def _renumber(fd: int, target: int) -> None:
    """Give a descriptor the number `target`; close it instead if that number is in use, or above the limit of open files."""
    if fd == target:
        return
    try:
        os.fstat(target)  # succeeds: it is in use
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


def _renew_seeds() -> None:
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
    """The modules that a fork server or warm interpreter has imported, and the side effects of their imports."""

    def __init__(self, modules: "list[str]", kind: str, target: str) -> None:
        """Import these modules as the program would, and record what else the imports change: output, variables, limits.

        `kind` and `target` are those of the program. Each forked worker makes the same changes to itself.
        """
        self._printed = _Printed()
        variables = dict(os.environ)
        limits = {which: resource.getrlimit(which) for which in _LIMITS}
        self._working_directory = _working_directory()
        self._notes, self._why_unsafe = _import_with_few_collections(modules, kind, target)
        self._limits = {which: now for which in _LIMITS if (now := resource.getrlimit(which)) != limits[which]}
        # workers get what the imports have set; this process takes back its own, which it needs
        for which in self._limits:
            try:
                resource.setrlimit(which, limits[which])
            except ValueError:
                self._why_unsafe = f"an imported module has lowered the hard limit of {_LIMITS[which]}"
        self._variables = {  # those that the imports have changed: value before and value now, None where there is none
            name: (variables.get(name), os.environ.get(name))
            for name in variables.keys() | os.environ.keys()
            if variables.get(name) != os.environ.get(name)
        }
        self._printed.end()
        gc.collect(0)  # the youngest objects; all others have survived a collection
        gc.freeze()  # a collection in a worker would write to the pages of all objects, and so copy them

    def why_unsafe(self, sockets: "Collection[int]", children: "Collection[int]" = ()) -> "str | None":
        """Return why nothing may be forked from this process; None if it may. `sockets` and `children` are our own."""
        return self._why_unsafe or _why_unsafe(sockets, children, self._working_directory)

    def leave_working_directory(self) -> None:
        """Leave the working directory, so that its file system can be unmounted; workers begin elsewhere anyway."""
        os.chdir("/")
        self._working_directory = _working_directory()

    @property
    def report_to_agent(self) -> str:
        """The lines for the agent: which modules could not be imported, and that all others are."""
        return "".join(f"note {note}\n" for note in self._notes) + "ready\n"

    def repeat_side_effects(self) -> None:
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


def _import_with_few_collections(modules: "list[str]", kind: str, target: str) -> "tuple[list[str], str | None]":
    """Import modules while the garbage collector runs rarely; return notes, and why nothing may be forked."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    ours = gc.get_threshold()  # Python 3.14 has only two of them
    notes_and_why = _import_all(modules, kind, target)
    # an import may have set thresholds of its own, even only the first of the three: these stay
    found = zip(gc.get_threshold(), ours, thresholds)  # noqa: B905 - Python 3.8 has no `strict`
    gc.set_threshold(*(old if now == our else now for now, our, old in found))
    return notes_and_why


def _import_all(modules: "list[str]", kind: str, target: str) -> "tuple[list[str], str | None]":
    """Import modules as the program would; return a note on each that cannot be imported, and why no worker may be forked.

    None: workers may be forked. The import path is as before at the end.
    """
    notes, why = [], None
    path = list(sys.path)
    # of launch(): the caller's address, then the caller's import path, with which the function runs
    import_path_of_caller = os.environ.get("DDPLAUNCH_CALL", "").split("\n")[1:]
    if any(import_path_of_caller):
        sys.path[:] = import_path_of_caller
    elif not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder_of(kind, target)  # in place of the bootstrap's folder
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
    """What imports print: everything that this process writes to stdout and stderr from the construction until `end`."""

    def __init__(self) -> None:
        self._files = [_temporary_file(), _temporary_file()]
        self._texts = [b"", b""]
        for target, file in enumerate(self._files, 1):
            os.dup2(file, target)

    def end(self) -> None:
        """Keep the texts; anything that this process writes later is lost. A worker gets other streams."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for target, file in enumerate(self._files, 1):
            self._texts[target - 1] = os.pread(file, os.fstat(file).st_size, 0)
            os.close(file)
            os.dup2(nowhere, target)
        os.dup2(nowhere, 0)  # where an import has closed it, a worker's stdout would become 0
        if nowhere:  # it may have got the number 0 itself
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


def _working_directory() -> "tuple[int, int]":
    """Return device and inode of the working directory, which may have lost its name."""
    found = os.stat(".")
    return found.st_dev, found.st_ino


def _why_unsafe(
    sockets: "Collection[int]", children: "Collection[int]", working_directory: "tuple[int, int]"
) -> "str | None":
    """Return what forked workers would share to their harm, such as a thread or a socket of a library; None if nothing.

    `sockets` and `children` are our own, which do no harm; `working_directory` is the one that this process should have.
    """
    if _working_directory() != working_directory:
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
    """Wait for the end of a child; return its status (wait(2)), or 0 if an imported module, or the kernel for it, reaped it."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0
