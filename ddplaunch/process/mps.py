"""NVIDIA's MPS daemon for the workers of one node in one generation. Does not decide how much each worker may use.

It is started with folders of its own, separate from any other daemon, and becomes a child of the agent, which
is a subreaper: if it does not quit it is swept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping

from ddplaunch.errors import LaunchError

START_TIMEOUT = 10.0  # seconds in which the daemon must have started


class Mps:
    """A running daemon."""

    def __init__(self, control: str, env: Mapping[str, str]) -> None:
        """Start it; `control` is the path of nvidia-cuda-mps-control, `env` the workers' environment.

        Raises:
            LaunchError: it did not start.
        """
        import subprocess  # few jobs need it

        self._control = control
        self._folder = tempfile.mkdtemp(prefix="ddplaunch-mps-", dir=env.get("TMPDIR") or "/tmp")
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{self._folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{self._folder}/log",
        }
        for folder in self.variables.values():
            os.mkdir(folder, 0o700)
        # the daemon would renumber the devices visible to it, and its clients apply the variable again
        self._env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"} | self.variables
        why = ""
        # not a pipe, which would stay open until the daemon, which inherits it, exits
        with open(f"{self._folder}/stderr", "wb+") as stderr:
            try:
                done = subprocess.run(
                    [control, "-d"],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    timeout=START_TIMEOUT,
                    check=False,
                )
                failed = done.returncode != 0
                stderr.seek(0)
                why = stderr.read().decode(errors="replace").strip()
            except (OSError, subprocess.TimeoutExpired) as error:
                failed, why = True, str(error)
        if failed:
            self.remove()
            raise LaunchError(f"{control} -d did not start: {why or 'no output on stderr'}")

    def quit(self) -> None:
        """Send the daemon `quit`, without waiting for its end."""
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
