"""Runs in a warm interpreter (warm.py): says whether another run would import the same modules from the same files."""

import os
import sys

before = set(sys.modules)
from importlib import machinery as loading  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what it imports, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    Stamp = tuple[int, int, int] | None  # of a file: modification time (ns), size and inode; None: there is none


class ImportedFiles:
    """Files and folders from which modules were imported, as they were then, to see whether a later import finds the same."""

    def __init__(self, since: int, folder: str) -> None:
        """Remember the imported files; imports began at `since` (CLOCK_REALTIME nanoseconds), for a script in `folder`."""
        modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
        files = {str(names["__file__"]) for names in modules if names.get("__file__")}
        folders = sys.path[1:]  # the first is that of the bootstrap
        self._stamps = {path: _stamp(path) for path in (*files, *folders)}
        # changed since the imports began, so that these may have read what was there before
        self._changed_meanwhile = [path for path in files if (stamp := self._stamps.get(path)) and stamp[0] >= since]
        self._suffixes = tuple(loading.all_suffixes())
        self._imported_names = {name.partition(".")[0] for name in sys.modules} - {
            "__main__",
            *sys.builtin_module_names,
        }
        self._replaced_libraries = (
            _replaced_libraries()
        )  # on the disk, since they were loaded; more of them make this stale
        self._script_folder = folder
        self._modules_in_script_folder = self._modules_by_imported_names(folder)

    def why_unfit(self, folder: str) -> "str | None":
        """Return why scripts in another folder than the first might import other modules; None if they would not."""
        if folder == self._script_folder:
            return None
        if found := self._modules_by_imported_names(folder) or self._modules_in_script_folder:
            return f"scripts in {folder} and in {self._script_folder} may import different modules {min(found)}"
        return None

    def why_stale(self) -> "str | None":
        """Return which file has changed since the imports; None if none has."""
        for path in self._changed_meanwhile:
            return f"{path} has changed"
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                return f"{path} has changed"
        if replaced := _replaced_libraries() - self._replaced_libraries:
            return f"{min(replaced)} has been replaced"
        if changed := self._modules_by_imported_names(self._script_folder) ^ self._modules_in_script_folder:
            return f"{min(changed)} in {self._script_folder} has changed"
        return None

    def _modules_by_imported_names(self, folder: str) -> "set[str]":
        """Return the modules in this folder that have the name of an imported module, and may be that one or stand before it."""
        entries = _entries(folder)
        names = {entry.partition(".")[0] for entry in entries if entry.endswith(self._suffixes)}
        for entry in self._imported_names.intersection(entries):
            if any(inner.startswith("__init__.") for inner in _entries(f"{folder}/{entry}")):  # a package
                names.add(entry)
        return names & self._imported_names


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
