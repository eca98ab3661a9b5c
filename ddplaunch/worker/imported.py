"""Imports modules once for all workers that are forked afterwards.

Each worker repeats what the imports printed, and the variables and limits that they set, as if it had imported the modules
itself. Nothing may be forked where workers would share something to their harm, such as a thread or a socket; and no further
run where the modules would be imported from other files by now.
"""

import os
import sys

before = set(sys.modules)
import gc  # noqa: E402
import resource  # noqa: E402
from importlib import machinery as loading  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    Stamp = tuple[int, int, int] | None

_LONGEST_NOTE = 1000  # characters
# for `gc.set_threshold`: objects of imports become garbage at once or hardly ever; usual collections take a fifth of the time
_RARELY = (20_000, 1000, 1000)
_LIMITS = {resource.RLIMIT_NOFILE: "open files", resource.RLIMIT_NPROC: "processes"}  # which this process needs itself


class Imported:
    """The modules that were imported, and the side effects of their imports."""

    def __init__(self, modules: "list[str]", kind: str, target: str) -> None:
        """Import these modules as the program would; `kind` and `target` are those of the bootstrap."""
        self._printed = _Printed()
        before = dict(os.environ)
        limits = {which: resource.getrlimit(which) for which in _LIMITS}
        self._folder = _folder()
        thresholds = gc.get_threshold()
        gc.set_threshold(*_RARELY)
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
        _repeat(self._variables)
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
            notes.append(f"{name}: {_described(error)}"[:_LONGEST_NOTE].replace("\n", " "))
            package = name.partition(".")[0]
            if package not in sys.modules and any(other.startswith(f"{package}.") for other in sys.modules):
                # the program would import it once more, and parts in C may crash then
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
    """Fork a child that exits at once: libraries like OpenBLAS end their threads before a fork, and restart them when needed."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    wait(pid)


def wait(pid: int) -> int:
    """Wait for the end of a child; return its status, or 0 where an imported module, or the kernel for it, has reaped it."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _repeat(variables: "dict[str, tuple[str | None, str | None]]") -> None:
    """Change each variable as the imports did, from its value before to that after, where this process has the one before."""
    for name, (before, after) in variables.items():
        if os.environ.get(name) == before:
            if after is None:
                del os.environ[name]
            else:
                os.environ[name] = after


class ImportedFiles:
    """Files and folders from which modules were imported, as they were then, to see whether a later import finds the same."""

    def __init__(self, since: int, folder: str) -> None:
        """Remember them after imports that began at `since` (CLOCK_REALTIME nanoseconds), for a script in this folder."""
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
        try:
            entries = os.listdir(folder)
        except OSError:
            return set()
        names = {entry: entry.partition(".")[0] for entry in entries if entry.endswith(self._suffixes)}
        packages = (entry for entry in entries if entry in self._names and _is_package(f"{folder}/{entry}"))
        return {*names.values(), *packages} & self._names


def _is_package(path: str) -> bool:
    try:
        return any(entry.startswith("__init__.") for entry in os.listdir(path))
    except OSError:
        return False


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
