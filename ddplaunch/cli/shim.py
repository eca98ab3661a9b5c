"""`ddplaunch shim`: a folder with a torchrun that is ddplaunch, for programs that start torchrun themselves.

The folder first in PATH stands for `torchrun`, and first in PYTHONPATH for `python -m torch.distributed.run` (or `.launch`).
What stands there runs `python -m ddplaunch.cli.shim KIND ARGS`, which is below. Nothing outside the folder is written.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from ddplaunch.errors import LaunchError, why_failed

_MARK = "made by `ddplaunch shim`"
_TORCHRUN = f"""\
#!/bin/sh
# torchrun that is ddplaunch, {_MARK}: delete this folder, or take it out of PATH, to have torch's again
exec {{command}} run "$@"
"""
_SITECUSTOMIZE = f'''\
"""python -m torch.distributed.run that is ddplaunch, {_MARK}; any other start of python is as without it."""

import os
import sys


def _module():
    """The module behind -m, and what follows it."""
    words = getattr(sys, "orig_argv", [])[1:]  # since Python 3.10
    while words and words[0].startswith("-") and words[0] != "-c":
        if words[0] == "-m":
            return words[1], words[2:]
        words = words[2 if words[0] in ("-W", "-X") else 1 :]
    return "", []


def _next():
    """Import the sitecustomize that this one hides, if there is one."""
    path, ours = sys.path[:], sys.modules.pop("sitecustomize")
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in path if os.path.abspath(place) != folder]
    try:
        import sitecustomize
    except ImportError:
        sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = path


_name, _words = _module()
if _name in ("torch.distributed.run", "torch.distributed.launch"):
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    _command = {{command}}
    os.execv(_command[0], [*_command, _name.rpartition(".")[2], *_words])
_next()
'''


def make(folder: str) -> str:
    """Write the folder; give what to type so that it is used.

    Raises:
        LaunchError: it cannot be written, or holds a torchrun that is not ours.
    """
    folder = os.path.abspath(folder)
    command = [sys.executable, "-P", "-m", "ddplaunch.cli.shim"]
    files = {
        "torchrun": _TORCHRUN.format(command=shlex.join(command)),
        "sitecustomize.py": _SITECUSTOMIZE.format(command=repr(command)),
    }
    try:
        os.makedirs(folder, exist_ok=True)
        for name in files:
            _check(os.path.join(folder, name))
        for name, text in files.items():
            path = os.path.join(folder, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(path, 0o755 if name == "torchrun" else 0o644)
    except OSError as error:
        raise LaunchError(f"cannot write {folder}: {why_failed(error)}") from None
    quoted = shlex.quote(folder)
    return f'export PATH={quoted}:"$PATH" PYTHONPATH={quoted}"${{PYTHONPATH:+:$PYTHONPATH}}"'


def _check(path: str) -> None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            if _MARK in file.read():
                return
    except FileNotFoundError:
        return
    raise LaunchError(
        f"{path} exists and is not ours", hint="name a folder of its own: `ddplaunch shim ~/torchrun-shim`"
    )


def main(argv: Sequence[str]) -> int:
    """Run what was typed for torchrun, "run" or "launch" (the modules of torch.distributed); give the exit status."""
    from ddplaunch.cli import main as cli

    kind, *words = argv
    # torchrun's default; of the variables the weakest but one, so that any other wins
    os.environ.setdefault("PET_NPROC_PER_NODE", "1")
    if _asks_for_help(words):
        sys.stdout.write(
            "This torchrun is ddplaunch, by `ddplaunch shim`. Without its folder in PATH it is torch's again.\n\n"
        )
        sys.stdout.flush()
    elif kind == "launch":
        words = _with_local_rank(words)
    return cli.main(["run", *words])


def _asks_for_help(words: Sequence[str]) -> bool:
    at = next((at for at, word in enumerate(words) if word in ("-h", "--help")), None)
    return at is not None and not _program(words[:at])


def _with_local_rank(words: list[str]) -> list[str]:
    """Add --local-rank to the script's arguments, as torch.distributed.launch does without --use-env."""
    program = _program(words)
    at = len(words) - len(program)
    if not program or {"--use-env", "--use_env"} & set(words[:at]):
        return words
    # with a -- behind the script, which is dropped, it comes behind that
    return [*words[: at + 1], "--local-rank=${local_rank}", *words[at + 1 :]]


def _program(words: Sequence[str]) -> Sequence[str]:
    """The script and its arguments; none if there is a mistake, which is raised again, and printed, where they are run."""
    from ddplaunch.cli import main as cli

    try:
        return list(cli.parse("run", words)["program"])
    except LaunchError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
