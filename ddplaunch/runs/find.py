"""Finds runs: their folders, and the sockets of those that go on. Believes no file: who does not answer is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ddplaunch.report import run_socket
from ddplaunch.report.run_folder import runs_folder
from ddplaunch.runs.client import Place


def places(env: Mapping[str, str]) -> Iterator[Place]:
    """Give where the sockets of this user's runs lie: in their folders, and in the folder of those that lie in none."""
    if (runs := runs_folder(env)) is not None:
        with suppress(OSError):
            for name in sorted(os.listdir(runs)):
                if os.path.lexists(f"{runs}/{name}/{run_socket.NAME}"):
                    yield Place(f"{runs}/{name}", run_socket.NAME)
    with suppress(OSError):
        folder = run_socket.open_runtime_folder()
        try:
            for name in sorted(os.listdir(folder)):
                if not name.startswith("."):
                    yield Place(run_socket.runtime_folder(os.getuid()), name)
        finally:
            os.close(folder)
