"""Imports modules once for all workers that are forked then, and says what of it the workers must not share.

What the imports print is kept, and printed by each worker as if it had imported itself; so are the variables and limits that
they set.
"""

import os
import sys

before = set(sys.modules)
import gc  # noqa: E402
import resource  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

_LONGEST_NOTE = 1000  # characters
# for `gc.set_threshold`: what imports make becomes garbage at once or hardly ever, and looking again takes a fifth of their time
_ONCE = (20_000, 1000, 1000)
_LIMITS = {resource.RLIMIT_NOFILE: "open files", resource.RLIMIT_NPROC: "processes"}  # which this process needs itself


class Imported:
    """What was imported, and what it has done besides."""

    def __init__(self, modules: "list[str]", kind: str, target: str) -> None:
        """Import these modules as the program, which is of this kind, would."""
        self._printed = _Printed()
        before = dict(os.environ)
        limits = {which: resource.getrlimit(which) for which in _LIMITS}
        self._folder = _folder()
        thresholds = gc.get_threshold()
        gc.set_threshold(*_ONCE)
        ours = gc.get_threshold()  # Python 3.14 has only two of them
        self._notes, self._why = _import_all(modules, kind, target)
        # an import may have set its own, and of the three only the first
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
        gc.collect(0)  # what is older was looked at
        gc.freeze()  # a collection in a worker would write to the pages of all objects, and so copy them

    def why_unsafe(self, sockets: "Collection[int]", children: "Collection[int]" = ()) -> "str | None":
        """Say why nothing may be forked from this process, None if it may; these sockets and children are ours."""
        return self._why or _why_unsafe(sockets, children, self._folder)

    def leave_folder(self) -> None:
        """Go to where no file system is held; workers are to begin elsewhere anyway."""
        os.chdir("/")
        self._folder = _folder()

    @property
    def lines(self) -> str:
        """The lines that tell the agent what was not imported, and that all else was."""
        return "".join(f"note {note}\n" for note in self._notes) + "ready\n"

    def take_over(self) -> None:
        """Be, in a worker, the process that has imported all this: set its variables and limits, print what it has printed."""
        _set_again(self._variables)
        self._printed.print()
        for which, limits in self._limits.items():
            resource.setrlimit(which, limits)


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
    """Return the folder that is first on the import path of a program."""
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
    wait(pid)


def wait(pid: int) -> int:
    """Wait for the end of a child; give its status, or 0 where an imported module has it reaped by another or by the kernel."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _set_again(variables: "dict[str, tuple[str | None, str | None]]") -> None:
    """Set the variables as the imports have, from what they were to what they became, where this process has no others."""
    for name, (before, after) in variables.items():
        if os.environ.get(name) == before:
            if after is None:
                del os.environ[name]
            else:
                os.environ[name] = after
