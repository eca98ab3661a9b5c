"""Whether what was imported would be imported again: the files, and the folders in which they were looked for."""

import os
import sys

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
        self._names = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
        self._libraries = _replaced_libraries()
        self._folder = folder
        self._found = self._in(folder)

    def why_stale(self, folder: str) -> "str | None":
        """Say what has changed since, None if nothing has; `folder` is that of the script to be run."""
        for path in self._unsure:
            return f"{path} has changed"
        for path, stamp in self._seen.items():
            if _stamp(path) != stamp:
                return f"{path} has changed"
        if replaced := _replaced_libraries() - self._libraries:
            return f"{min(replaced)} has been replaced"
        found = self._in(folder)
        if found != self._found or (found and folder != self._folder):
            name = min(found ^ self._found or found)
            return f"a script in {folder} may import another module {name}"
        return None

    def _in(self, folder: str) -> "set[str]":
        """The names in this folder that have been imported, from wherever."""
        try:
            return {entry.partition(".")[0] for entry in os.listdir(folder)} & self._names
        except OSError:
            return set()


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
