"""The secret that authenticates the agents of a job, where the user gives one. It is in no JobSpec and no message."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import why_failed

VARIABLE = "DDPLAUNCH_TOKEN"
# not secret, but for agents only as well: set for a Slurm step that ddplaunch starts
RDZV_HOST = "DDPLAUNCH_RDZV_HOST"  # where the command is that has started the agents, and coordinates them
RDZV_PORT = "DDPLAUNCH_RDZV_PORT"
TASKS_PER_NODE = "DDPLAUNCH_TASKS_PER_NODE"  # of the batch script, which differ from the step's
SCREEN = "DDPLAUNCH_SCREEN"  # where srun writes what the step prints
# the order for the agents of that step, see `spec/order.py`: numbered, as the kernel bounds each variable
ORDER = "DDPLAUNCH_ORDER_"
STDIN = "DDPLAUNCH_STDIN"  # where the agent on this host gets the stdin of the command
_MIN_LENGTH = 16  # characters; a shorter one is warned of
_MAX_SIZE = 4096  # characters; a longer file is probably not a token


def find(spec: JobSpec, env: Mapping[str, str]) -> str | None:
    """Return the secret of --token-file or DDPLAUNCH_TOKEN, None if there is none; the nearer to the command line wins.

    A file is read once, for it may be a pipe.

    Raises:
        LaunchError: the file cannot be read or holds no secret, or file and variable hold different ones.
    """
    from_variable = env.get(VARIABLE, "").strip() or None
    origin = spec.origin("token_file")
    is_named_in_toml, is_typed = origin.endswith(".toml"), origin.startswith("--")  # else a variable names the file
    if spec.token_file is None or (from_variable and is_named_in_toml):
        return from_variable
    option = spec.typed("token_file", spec.token_file)
    from_file = _read(spec.token_file, option)
    if from_variable and from_variable != from_file and not is_typed:
        raise LaunchError(f"{option} and {VARIABLE} hold different secrets", hint="unset one of them")
    return from_file


def weaknesses(spec: JobSpec, secret: str) -> list[str]:
    """Return what makes the secret easy to learn, a sentence for each weakness."""
    found = []
    if len(secret) < _MIN_LENGTH:
        found.append(
            f"the token has {len(secret)} characters, and may be guessed: `openssl rand -hex 32` makes a better one"
        )
    if spec.token_file is None:
        return found
    with suppress(OSError):  # removed meanwhile
        file, option = os.stat(spec.token_file), spec.typed("token_file", spec.token_file)
        if stat.S_ISREG(file.st_mode) and file.st_uid not in (os.geteuid(), 0):
            found.append(f"{option}: the file belongs to user {file.st_uid}, who knows the token")
        if file.st_mode & (stat.S_IROTH | stat.S_IWOTH):
            import shlex  # few jobs need it

            found.append(
                f"{option}: every user of this host has access to the file: chmod 600 {shlex.quote(spec.token_file)}"
            )
    return found


def visible_to_workers(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers may see: all but those that are for agents only."""
    for_agents = (VARIABLE, RDZV_HOST, RDZV_PORT, TASKS_PER_NODE, SCREEN, STDIN)
    return {name: value for name, value in env.items() if name not in for_agents and not name.startswith(ORDER)}


def _read(path: str, option: str) -> str:
    """Return the secret in a file; `option` stands in errors as the user wrote it."""
    from ddplaunch.system.process.files import read_text  # few jobs have a file

    try:
        secret = read_text(path, _MAX_SIZE).strip()
    except OSError as error:
        raise LaunchError(f"{option}: {why_failed(error)}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{option}: the file is not UTF-8 text") from None
    if not secret:
        raise LaunchError(f"{option}: the file is empty", hint="openssl rand -hex 32 > FILE")
    return secret
