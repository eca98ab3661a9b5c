"""A program in a terminal of a host, as pexpect has programs in terminals of this machine."""

from __future__ import annotations

import os
import pty
import termios
from functools import partial
from pathlib import Path
from typing import Any

from pexpect import fdpexpect

from tests.conftest import PATIENCE
from tests.hosts.bed import Bed
from tests.hosts.job import HostsJob


class Spawned(fdpexpect.fdspawn):  # type: ignore[misc]  # pexpect has no types
    """It leads a session. A file descriptor for pexpect, with what the tests use of pexpect.spawn besides."""

    def __init__(
        self,
        bed: Bed,
        host: str,
        program: str,
        args: list[str],
        *,
        env: dict[str, str],
        cwd: str,
        dimensions: tuple[int, int],
        **options: object,
    ) -> None:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, dimensions)
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = bed.start(host, ["setsid", "--ctty", program, *args], env=env, cwd=Path(cwd), **streams)
        os.close(theirs)
        super().__init__(ours, **options)

    def wait(self) -> int:
        """Wait for the end of the program and return its status."""
        self.exitstatus = self.process.wait(PATIENCE)
        return self.exitstatus


def on_host(job: HostsJob, host: str) -> dict[str, Any]:
    """What a Terminal of a host takes besides; HOME is where ssh finds its keys."""
    return {"env": {"HOME": str(job.bed.home)}, "spawn": partial(Spawned, job.bed, host)}
