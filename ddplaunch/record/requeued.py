"""How far a job had come when it was requeued, for its next start: in a file of the state folder, by the job's id.

A job without the same home on its next first node finds none, and begins from nothing, as does one whose file cannot be read.
The disk may hang: a child of the loop is to be asked for either.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from hashlib import sha256

import msgspec
from msgspec import Struct

from ddplaunch.record.folders import make_all
from ddplaunch.system.process.files import open_regular, replaced

KEPT = 30 * 86400.0  # seconds, after which the file of a job is removed
_LARGEST_FILE = 1 << 10  # bytes


class Requeued(Struct, frozen=True, kw_only=True):
    """What a job that was requeued had reached, over all its starts."""

    start: int  # of the job, which has written this, counted from 0
    best_step: int
    without_new_step: int  # generations in a row

    def count_at(self, start: int) -> int:
        """Return how many generations in a row had made no new step before this start of the job.

        What an earlier start has left was not in a row with this one: Slurm has requeued the job itself in between.
        """
        return self.without_new_step if self.start == start - 1 else 0


def file_of(state_folder: str, job: str, program: str) -> str:
    """Return the path of the file for a program of a job: a batch script may have several."""
    name = sha256(f"{job}\0{program}".encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{state_folder}/ddplaunch/requeued/{name}.json"


def read(path: str) -> Requeued | None:
    """Return what was kept; None if there is nothing that can be read."""
    with suppress(OSError, msgspec.DecodeError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_uid == os.getuid():
            return msgspec.json.decode(file.read(_LARGEST_FILE), type=Requeued)
    return None


def keep(path: str, requeued: Requeued) -> None:
    """Keep this for the next start, if that is possible, and remove what is old. Nothing is done in a folder of another user."""
    above, own = os.path.split(path)
    with suppress(OSError):
        make_all(above)
        folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.getuid():
                return
            with replaced(path, 0o600) as file:
                file.write(msgspec.json.encode(requeued))
            for name in os.listdir(folder):
                with suppress(OSError):  # it is gone, or a folder
                    is_old = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - KEPT
                    if is_old and name != own:
                        os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
