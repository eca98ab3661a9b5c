"""`ddplaunch completion`: the script by which a shell completes our command lines, and the values that it completes then.

Script and answers are click's. Reads files only.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from ddplaunch.cli.command import Command, show
from ddplaunch.spec.options.table import SHELLS
from ddplaunch.system.errors import LaunchError

_HINT = "type `ddplaunch completion bash`, zsh or fish"
VARIABLE = "_DDPLAUNCH_COMPLETE"  # through which a shell asks
_NVIDIAS = "/proc/driver/nvidia/gpus"  # which has a folder for each GPU


class _Joined(ShellComplete):
    """Completes `--output=r`, too: click answers with the value alone, in place of the whole word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return the completions of a word; of `--name=value` the whole words, and the paths that a shell would list."""
        name, equals, value = incomplete.partition("=")
        if not equals or not name.startswith("--"):
            return super().get_completions(args, incomplete)
        found = []
        for item in super().get_completions([*args, name], value):
            if item.type == "plain":
                found.append(item.value)
            else:  # click asks the shell for files
                paths = glob.glob(f"{glob.escape(value)}*")
                found += [f"{path}/" if os.path.isdir(path) else path for path in paths]
        return [CompletionItem(f"{name}={each}") for each in found]


class _Zsh(_Joined, ZshComplete):
    def source(self) -> str:
        """Return the script, which is a file beside this one."""
        with open(f"{os.path.dirname(__file__)}/completion.zsh", encoding="utf-8") as file:
            return file.read() % self.source_vars()

    def format_completion(self, item: CompletionItem) -> str:
        """Return the three lines of a word: its kind, the word, and its description, or "_" for none."""
        return f"{item.type}\n{item.value}\n{item.help or '_'}"


class _Fish(_Joined, FishComplete):
    # a value may be a list, and have commas of its own
    source_template = FishComplete.source_template.replace("--no-files", "--keep-order --no-files").replace(
        'split ","', 'split --max 1 ","'
    )


class _Bash(BashComplete):
    # bash lists files by itself only where the script gives it no word: a verb would hide the scripts that begin as it does
    source_template = BashComplete.source_template.replace(
        "    return 0",
        """    if [[ $response == file,* && ${#COMPREPLY[@]} -gt 0 ]]; then
        COMPREPLY+=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
        compopt -o filenames
    fi

    return 0""",
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words without the = that bash makes a word of its own, so that the option stands before its value."""
        args, incomplete = super().get_completion_args()
        return [arg for arg in args if arg != "="], incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return the completions, files first: click's script replaces everything before a file by that file."""
        return sorted(super().get_completions(args, incomplete), key=lambda item: item.type == "plain")


for _class in (_Bash, _Zsh, _Fish):
    add_completion_class(_class)


def answer(application: click.Group) -> int:
    """Answer a shell that asks through VARIABLE: with `bash_complete`, say, and the words typed so far in variables, too."""
    return shell_complete(application, {}, "ddplaunch", VARIABLE, os.environ[VARIABLE])


def print_script(ctx: click.Context, shell: str, *, is_typed: bool) -> int:
    """Print the script for a shell, which was typed or is the user's."""
    found = get_completion_class(shell) if shell in SHELLS else None
    if found is None:
        raise LaunchError(
            f"completion {shell}: expected bash, zsh or fish" if is_typed else "SHELL is not bash, zsh or fish",
            hint=_HINT,
        )
    return show(found(ctx.find_root().command, {}, "ddplaunch", VARIABLE).source())


@click.command(
    cls=Command,
    takes="the name of one shell",
    hint=_HINT,
    examples=(
        ('eval "$(ddplaunch completion bash)"', "in ~/.bashrc"),
        ('eval "$(ddplaunch completion zsh)"', "in ~/.zshrc, after `autoload -Uz compinit && compinit`"),
        ("ddplaunch completion fish | source", "in ~/.config/fish/config.fish"),
    ),
)
@click.argument(
    "shell",
    required=False,
    metavar="[bash|zsh|fish]",
    shell_complete=lambda ctx, param, incomplete: [shell for shell in SHELLS if shell.startswith(incomplete)],
)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> int:
    """Prints the script that makes a shell complete our options. Put the line of your shell into its file."""
    return print_script(ctx, shell or os.path.basename(ctx.obj.get("SHELL", "")), is_typed=shell is not None)


# --- values: modules of the folder, devices, entries of a list


def complete_module(typed: str) -> list[CompletionItem]:
    """Return the modules and packages of this folder that complete what was typed behind -m: `pkg.tr` gives `pkg.train`."""
    package, dot, begun = typed.rpartition(".")
    if dot and not all(map(str.isidentifier, package.split("."))):  # dots alone would lead out of this folder
        return []
    try:
        with os.scandir(package.replace(".", "/") or ".") as entries:
            names = [entry.name if entry.is_dir() else entry.name.removesuffix(".py") for entry in entries
                     if entry.name.endswith(".py") or (entry.is_dir() and _is_package(entry.path))]  # fmt: skip
    except (OSError, ValueError):
        return []
    fitting = sorted(name for name in names if name.isidentifier() and name.startswith(begun))
    return [CompletionItem(f"{package}{dot}{name}") for name in fitting if not name.startswith("__")]


def _is_package(folder: str) -> bool:
    try:
        return any(name.endswith(".py") for name in os.listdir(folder))
    except OSError:
        return False


def complete_devices(typed: str) -> list[CompletionItem]:
    """Return what completes the value of --devices: the indices of NVIDIA's GPUs, as the driver has them, and cpu."""
    try:
        found = [str(index) for index in range(len(os.listdir(_NVIDIAS)))]
    except OSError:  # there is no driver
        found = []
    return complete_list([*found, *([] if "," in typed else ["cpu"])], typed)


def complete_list(values: Iterable[str], typed: str) -> list[CompletionItem]:
    """Return what completes the last entry of a list, whole, without the entries that stand before it: `0,` gives `0,1`."""
    before, comma, begun = typed.rpartition(",")
    used = before.split(",")
    return [
        CompletionItem(f"{before}{comma}{value}") for value in values if value.startswith(begun) and value not in used
    ]
