"""`ddplaunch shim`: a folder with a torchrun that is ddplaunch, for programs that start torchrun themselves.

The folder first in PATH stands for `torchrun`, and first in PYTHONPATH for `python -m torch.distributed.run` (or `.launch`).
What stands there runs `python -m ddplaunch.cli.shim KIND ARGS`, which is below. Nothing outside the folder is written.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from ddplaunch.cli.command import Command, show
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import why_failed

_LONGEST_FILE = 1 << 16  # bytes of a file of ours
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
    """Write the folder of the shim; return what to type so that the shim is used."""
    folder = os.path.abspath(folder)
    command = [sys.executable, "-P", "-m", "ddplaunch.cli.shim"]
    files = {
        "torchrun": _TORCHRUN.format(command=shlex.join(command)),
        "sitecustomize.py": _SITECUSTOMIZE.format(command=repr(command)),
    }
    try:
        os.makedirs(folder, 0o755, exist_ok=True)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_owner(folder, folder_fd)
            for name in files:
                _check_is_ours(folder, folder_fd, name)
            for name, text in files.items():
                _write(folder_fd, name, text, 0o755 if name == "torchrun" else 0o644)
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise LaunchError(f"cannot write {folder}: {why_failed(error)}") from None
    quoted = shlex.quote(folder)
    return f'export PATH={quoted}:"$PATH" PYTHONPATH={quoted}"${{PYTHONPATH:+:$PYTHONPATH}}"'


_HINT_OWN_FOLDER = "name a folder of its own: `ddplaunch shim ~/torchrun-shim`"


def _check_owner(folder: str, folder_fd: int) -> None:
    """Check that no other user can change the folder: the folder stands in PATH, so its programs run as you."""
    from ddplaunch.record.folders import replaceable_by  # a start of a job through the shim does not need it

    found = os.fstat(folder_fd)
    why = ""
    if found.st_uid != os.geteuid():
        why = f"{folder} belongs to another user ({found.st_uid})"
    elif found.st_mode & stat.S_IWOTH:
        why = f"every user may write to {folder}"
    elif who := replaceable_by(folder):
        why = f"{folder} may be replaced: {who}"
    if why:
        raise LaunchError(f"{why}, and what lies there would run as you", hint=_HINT_OWN_FOLDER)


def _check_is_ours(folder: str, folder_fd: int, name: str) -> None:
    """Refuse to replace a file of this name in the folder that ddplaunch has not written.

    A link, or what is no plain file, is not ours either.
    """
    from ddplaunch.system.process.files import open_regular

    is_ours = False
    try:
        with open_regular(name, dir_fd=folder_fd) as file:
            is_ours = _MARK.encode() in file.read(_LONGEST_FILE)
    except FileNotFoundError:
        return
    except OSError:
        pass
    if not is_ours:
        raise LaunchError(f"{folder}/{name} exists and is not ours", hint=_HINT_OWN_FOLDER)


def _write(folder_fd: int, name: str, text: str, mode: int) -> None:
    """Write a file of the folder, whole or not at all, in place of whatever has its name by now."""
    new = f".{name}.{os.urandom(4).hex()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder_fd)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(fd, mode)
        os.replace(new, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except OSError:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder_fd)
        raise


def main(argv: Sequence[str]) -> int:
    """Run what was typed for torchrun, "run" or "launch" (the modules of torch.distributed); give the exit status."""
    from ddplaunch.cli import main as cli

    torch_module, *words = argv
    # torchrun starts one worker unless told otherwise. Our own variable and the command line win over this one
    os.environ.setdefault("PET_NPROC_PER_NODE", "1")
    if torch_module == "launch" or {"-h", "--help"} & set(words):
        words = _adapted(torch_module, words)
    return cli.main(["run", *words])


def _adapted(torch_module: str, words: list[str]) -> list[str]:
    """Return the words as ddplaunch takes them: with the --local-rank behind the script that torch.distributed.launch adds.

    If the words ask for help, print first that the help is not torch's.
    """
    from ddplaunch.cli import job

    program: Sequence[str] = ()
    with suppress(LaunchError):  # a mistake is found again, and said, where the words are run
        program = job.parse(words, resilient=True).program
    script_at = len(words) - len(program)
    before = set(words[:script_at])
    if {"-h", "--help"} & before:
        sys.stdout.write(
            "This torchrun is ddplaunch, by `ddplaunch shim`. Without its folder in PATH it is torch's again.\n\n"
        )
        sys.stdout.flush()
    elif torch_module == "launch" and program and not {"--use-env", "--use_env"} & before:
        # where a -- stands right behind the script, it is not in `program`, and `script_at` is its index: it stays where it is
        return [*words[: script_at + 1], "--local-rank=${local_rank}", *words[script_at + 1 :]]
    return words


_NOT_REACHED = """\
ddplaunch: accelerate launch, fabric run and tune run call torch's launcher in their own process, which no shim reaches: \
type `ddplaunch --nproc-per-node N train.py ARGS` in place of them
"""
_HINT = "type `ddplaunch shim ~/torchrun-shim`"


@click.command(
    cls=Command,
    takes="one FOLDER",
    hint=_HINT,
    examples=(
        ('eval "$(ddplaunch shim ~/torchrun-shim)"', "in this shell"),
        ("ddplaunch shim ~/torchrun-shim", "only write it, and show the line"),
    ),
)
@click.argument("folder", required=False, metavar="FOLDER")
def shim(folder: str | None) -> int:
    """Writes a torchrun that is ddplaunch into FOLDER, for programs that start torchrun, or python -m torch.distributed.run,
    themselves, and prints the line that puts FOLDER first in PATH and PYTHONPATH of your shell. Nothing else is changed:
    without that line, torchrun stays torch's. Programs that call torch's launcher in their own process, as accelerate launch,
    fabric run and tune run do, start no torchrun: start their script by ddplaunch itself.
    """  # noqa: D205 - the help of a verb is one paragraph
    if folder is None:
        raise LaunchError("ddplaunch shim needs a FOLDER to write torchrun into", hint=_HINT)
    is_new = not os.path.exists(os.path.join(folder, "torchrun"))
    line = make(folder)
    if is_new:  # a line in a shell's profile is silent from the second shell on
        sys.stderr.write(_NOT_REACHED)
    return show(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
