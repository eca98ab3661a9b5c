"""A disk that can be made to hang: ext4 in a file, mounted in a mount namespace of its own, frozen by fsfreeze(8). Needs root.

Who waits for it is in uninterruptible sleep, as with a dead file server. Whatever becomes of the test, it is thawed and gone.
"""

import functools
import os
import shutil
import subprocess
from pathlib import Path

# as soon as its stdin is at its end, by the end of the test or of pytest, nothing is left of it
HOLDER = """
mkfs.ext4 -q -F "$0" && mount -o loop "$0" "$1" && echo ready
while read -r option; do fsfreeze "$option" "$1"; echo done; done
fsfreeze --unfreeze "$1" 2> /dev/null
until umount "$1"; do sleep 0.05; done
"""


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


class Disk:
    """One such disk, seen by what is started with `prefix`, and below `seen` by us."""

    def __init__(self, folder: Path) -> None:
        """Make it. Raises: OSError."""
        image, self.place = folder / "image", folder / "disk"
        self.place.mkdir()
        with image.open("wb") as file:
            file.truncate(256 << 20)
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", HOLDER, image, self.place],
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

    def freeze(self) -> None:
        """Have it hang."""
        self._order("--freeze")

    def thaw(self) -> None:
        """Have it answer again."""
        self._order("--unfreeze")

    def _order(self, option: str) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(f"{option}\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == "done\n"

    def close(self) -> None:
        """Remove it, once nobody uses it any more."""
        self._holder.communicate(timeout=60)
