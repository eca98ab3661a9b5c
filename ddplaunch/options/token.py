"""The secret by which the agents of a job know each other, where the user gave one. It stands in no JobSpec and no message."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.errors import LaunchError
from ddplaunch.spec import JobSpec

VARIABLE = "DDPLAUNCH_TOKEN"
# no secrets, but as private: what a step in Slurm that ddplaunch has started is told besides
MEETING_PORT = "DDPLAUNCH_MEETING_PORT"  # where its agents meet
TASKS_PER_NODE = "DDPLAUNCH_TASKS_PER_NODE"  # what the batch script has asked for, which is not the step's own number
_LONGEST = 4096  # bytes; a file that is longer is probably another one


def find(spec: JobSpec, env: Mapping[str, str]) -> str | None:
    """Give the secret of --token-file or DDPLAUNCH_TOKEN, None if there is none; the nearer to the command line wins.

    Raises:
        LaunchError: the file cannot be read or holds no secret, or file and variable hold different ones.
    """
    said = env.get(VARIABLE, "").strip() or None
    origin = spec.origin("token_file")
    if spec.token_file is None or (said and origin.endswith(".toml")):
        return said
    asked = spec.asked("token_file", spec.token_file)
    kept = _read(spec.token_file, asked)
    if said and said != kept and not origin.startswith("--"):
        raise LaunchError(f"{asked} and {VARIABLE} hold different secrets", hint="unset one of them")
    return kept


def public(env: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that workers may see: all but those that agents have from whoever started them."""
    return {name: value for name, value in env.items() if name not in (VARIABLE, MEETING_PORT, TASKS_PER_NODE)}


def _read(path: str, asked: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST + 1)
        secret = content.decode().strip()
    except OSError as error:
        raise LaunchError(f"{asked}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{asked}: the file is not UTF-8 text") from None
    if not secret:
        raise LaunchError(f"{asked}: the file is empty", hint="openssl rand -hex 32 > FILE")
    if len(content) > _LONGEST:
        raise LaunchError(f"{asked}: the file is longer than {_LONGEST} bytes")
    return secret
