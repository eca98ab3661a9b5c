"""Whether what was imported would be imported again: the files, and the folders in which they were looked for."""

import os
import sys

before = set(sys.modules)
from importlib import machinery as loading  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    Stamp = tuple[int, int, int] | None


class ImportedFiles:
    """Files and folders as they are now, after the imports; `since` is when those began, in nanoseconds (CLOCK_REALTIME)."""

    def __init__(self, since: int, folder: str) -> None:
        """`folder` is that of the script, which comes first on the import path."""
        modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
        files = {str(names["__file__"]) for names in modules if names.get("__file__")}
        self._seen = {
            path: _stamp(path)
            for path in (*files, *sys.path[1:])  # the first is that of the bootstrap
        }
        # it may have been read before it was written
        self._unsure = [path for path in files if (stamp := self._seen.get(path)) and stamp[0] >= since]
        self._suffixes = tuple(loading.all_suffixes())
        self._names = {name.partition(".")[0] for name in sys.modules} - {"__main__", *sys.builtin_module_names}
        self._libraries = _replaced_libraries()
        self._folder = folder
        self._found = self._in(folder)

    def why_unfit(self, folder: str) -> "str | None":
        """Say why scripts in another folder than the first might import something else, None if they would not."""
        if folder != self._folder and (found := self._in(folder) or self._found):
            return f"scripts in {folder} and in {self._folder} may import different modules {min(found)}"
        return None

    def why_stale(self) -> "str | None":
        """Say what has changed since, None if nothing has."""
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
        """The modules in this folder with names that have been imported, from wherever."""
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
    """Libraries whose files were removed or replaced since they were loaded (proc_pid_maps(5))."""
    with open("/proc/self/maps", "rb") as file:
        lines = [os.fsdecode(line) for line in file if line.endswith(b" (deleted)\n") and b".so" in line]
    return {line.split(None, 5)[5].replace(" (deleted)\n", "") for line in lines}
