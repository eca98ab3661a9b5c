"""Disks that can be made to hang, each mounted in a mount namespace of its own. They need root.

`Disk` is ext4 in a file, frozen by fsfreeze(8): what writes to it waits. `SilentDisk` is a file system of our own, of which any
request may wait. Who waits is in uninterruptible sleep, as with a dead file server. Whatever becomes of the test, all goes on and
is gone.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

# as soon as its stdin is at its end, by the end of the test or of pytest, nothing is left of it
HOLDER = """
mkfs.ext4 -q -F "$0" && mount -o loop "$0" "$1" && echo ready
while read -r option; do fsfreeze "$option" "$1"; echo done; done
fsfreeze --unfreeze "$1" 2> /dev/null
until umount "$1"; do sleep 0.05; done
"""


SERVER = Path(__file__).with_name("fuse_server.py")


@functools.cache
def missing(folder: Path) -> str | None:
    """Why there can be no such disk here, in this folder; None: there can."""
    if os.geteuid() != 0:
        return "a disk of our own needs root"
    for command in ("unshare", "nsenter", "mkfs.ext4", "mount", "fsfreeze"):
        if shutil.which(command) is None:
            return f"a disk of our own needs {command}"
    try:
        Disk(folder).close()
    except OSError as error:
        return f"a disk of our own cannot be made here: {error}"
    return None


@functools.cache
def missing_silent(folder: Path) -> str | None:
    """Why there can be no SilentDisk here, in this folder; None: there can."""
    if os.geteuid() != 0:
        return "a disk of our own needs root"
    for command in ("unshare", "nsenter"):
        if shutil.which(command) is None:
            return f"a disk of our own needs {command}"
    try:
        SilentDisk(folder).close()
    except OSError as error:
        return f"a disk of our own cannot be made here: {error}"
    return None


class MountedDisk:
    """One such disk, at `place`, seen by what is started with `prefix`."""

    def __init__(self, folder: Path, *holder: str | Path) -> None:
        """Have `holder` mount it. Raises: OSError."""
        self.place = folder / "disk"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", *holder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise OSError(self._holder.communicate()[1].strip())
        self.prefix = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wdns={folder}"]
        self.seen = Path(f"/proc/{self._holder.pid}/root{self.place}")

    def _order(self, order: str) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(f"{order}\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == "done\n"

    def close(self) -> None:
        """Remove it, once nobody uses it any more."""
        self._holder.communicate(timeout=60)


class Disk(MountedDisk):
    """A disk to which nothing can be written while it hangs; below `seen` we see it, too."""

    def __init__(self, folder: Path) -> None:
        """Make it. Raises: OSError."""
        image, place = folder / "image", folder / "disk"
        place.mkdir()
        with image.open("wb") as file:
            file.truncate(256 << 20)
        super().__init__(folder, "sh", "-c", HOLDER, image, place)

    def freeze(self) -> None:
        """Have it hang."""
        self._order("--freeze")

    def thaw(self) -> None:
        """Have it answer again."""
        self._order("--unfreeze")


class SilentDisk(MountedDisk):
    """A disk that leaves any requests unanswered; what lies on it is below `seen`, which never hangs."""

    def __init__(self, folder: Path) -> None:
        """Make it. Raises: OSError."""
        place, seen = folder / "disk", folder / "on-disk"
        place.mkdir()
        seen.mkdir()
        super().__init__(folder, sys.executable, SERVER, seen, place)
        self.seen = seen

    def hang(self, requests: str = "all") -> None:
        """Leave such requests unanswered, by the names of fuse_server.py, divided by commas."""
        self._order(f"hang {requests}")

    def answer(self) -> None:
        """Answer again, and what waits first."""
        self._order("answer")
