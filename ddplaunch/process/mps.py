"""NVIDIA's MPS daemon for the workers of one node in one generation. Knows nothing of who may use how much.

It is started with folders of its own, so that it meets no other on the machine, and becomes a child of the agent, which
is a subreaper: what does not end when asked is swept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping

from ddplaunch.errors import LaunchError

PATIENCE = 10.0  # seconds in which the daemon must have started


class Mps:
    """A running daemon."""

    def __init__(self, control: str, env: Mapping[str, str]) -> None:
        """Start it; `control` is the path of nvidia-cuda-mps-control, `env` the workers' environment.

        Raises:
            LaunchError: it did not start.
        """
        import subprocess  # only this and no job without it needs it

        self._control = control
        self._folder = tempfile.mkdtemp(prefix="ddplaunch-mps-", dir=env.get("TMPDIR") or "/tmp")
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{self._folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{self._folder}/log",
        }
        for folder in self.variables.values():
            os.mkdir(folder, 0o700)
        # devices that it is shown would count anew for its clients, which are shown them by the same numbers
        self._env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"} | self.variables
        why = ""
        # a pipe would be at its end only when the daemon, which inherits it, has closed it
        with open(f"{self._folder}/said", "wb+") as said:
            try:
                done = subprocess.run(
                    [control, "-d"],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    timeout=PATIENCE,
                    check=False,
                )
                failed = done.returncode != 0
                said.seek(0)
                why = said.read().decode(errors="replace").strip()
            except (OSError, subprocess.TimeoutExpired) as error:
                failed, why = True, str(error)
        if failed:
            self.remove()
            raise LaunchError(f"{control} -d did not start: {why or 'it gave no reason'}")

    def quit(self) -> None:
        """Ask it to end, and wait for nothing."""
        ours, theirs = os.pipe()
        try:
            os.write(theirs, b"quit\n")
            streams = [
                (os.POSIX_SPAWN_DUP2, ours, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            os.posix_spawn(self._control, [self._control], self._env, file_actions=streams)
        except OSError:
            pass  # the sweep ends it
        finally:
            os.close(ours)
            os.close(theirs)

    def remove(self) -> None:
        """Remove its folders, once it has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)
