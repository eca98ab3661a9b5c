"""What was meant by a name that is no option: the beginning of a flag of torchrun's, or another launcher's flag. Pure."""

from __future__ import annotations

from ddplaunch.errors import LaunchError
from ddplaunch.options.table import BY_NAME, OPTIONS


def written_out(argument: str, following: str) -> str:
    """Complete the beginning of a flag of torchrun's as its parser does, if no other flag begins so.

    `argument` is no option, `following` the next argument.

    Raises:
        LaunchError: it is a flag of another launcher, for which one of ours has to be typed.
    """
    typed, equals, value = argument.partition("=")
    name = typed.replace("_", "-")
    if meant := _meant(name, value if equals else following):
        raise LaunchError(f"{typed} is not an option", hint=f"did you mean `{meant}`?")
    found = [option for option in OPTIONS if option.flag.startswith(name)] if name.startswith("--") else []
    if len(found) != 1 or not (found[0].pet or found[0].torchruns):
        return argument
    return found[0].flag + equals + value


def _meant(name: str, value: str) -> str | None:
    """What to type in place of a flag that other launchers have, and one of ours that lacks a dash."""
    if name.startswith("-") and BY_NAME.get(name[1:].replace("-", "_")):
        return f"-{name}"
    counts = value.isdecimal()
    match name:
        case "--gpus" | "-g" if value and not counts:
            return f"--devices {value}"
        case "--gpus" | "-g" | "-j" | "-w" | "-p" if counts:
            return f"--nproc-per-node {value}"
        case "-j" if all(part.isdecimal() for part in value.split("x")) and value.count("x") == 1:
            nodes, _, workers = value.partition("x")
            return f"--nnodes {nodes} --nproc-per-node {workers}"
        case "-p" if value:
            return f"ddplaunch submit -p {value} -- ..."
        case "-w" | "-H" | "-host" | "--host" | "--nodelist":
            return f"--hosts {value}"
        case "-N":
            return f"--nnodes {value}"
        case "-x":
            return f"--env {value}"
    return None
