"""Completion by shells: the script for each, and how it asks us. What completes what is in `commands.py`.

click's own scripts let the names of files take the place of the verbs in bash, say nothing where zsh lacks compinit, and
cut a description at its first comma in fish. It has none for tcsh.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from ddplaunch.cli.commands import root

VARIABLE = "_DDPLAUNCH_COMPLETE"  # through which a shell asks


class _WithValues(ShellComplete):
    """Completes `--output=r`, too, which click completes in no shell if it is the first word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        name, equals, value = incomplete.partition("=")
        if not equals or not name.startswith("--"):
            return super().get_completions(args, incomplete)
        items = super().get_completions([*args, name], value)
        for item in items:
            if item.type == "plain":  # the shell adds the name to files itself
                item.value = f"{name}={item.value}"
        return items


class _Bash(_WithValues, BashComplete):
    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' type value
    while IFS=, read -r type value; do
        case $type in
            plain) COMPREPLY+=("$value") ;;
            dir|file)
                compopt -o filenames
                mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -A ${type/dir/directory} -- "$value") ;;
        esac
    done < <(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def source(self) -> str:
        """Without click's look at the version of bash, which starts one."""
        return ShellComplete.source(self)

    def get_completion_args(self) -> tuple[list[str], str]:
        """Without the = that bash makes a word of its own, so that the option stands before its value."""
        args, incomplete = super().get_completion_args()
        return [arg for arg in args if arg != "="], incomplete


class _Zsh(_WithValues, ZshComplete):
    source_template = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a plain described response
    local type value text files
    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
        %(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)}")
    for type value text in ${response}; do
        case $type in
            plain) if [[ $text == _ ]]; then plain+=("$value"); else described+=("$value:$text"); fi ;;
            dir) files=-/ ;;
            file) files=-f ;;
        esac
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#plain )) && compadd -U -V unsorted -a plain
    if [[ -n $files ]]; then
        [[ $PREFIX == --*=* ]] && compset -P '*='
        _path_files $files
    fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
elif (( $+functions[compdef] )); then
    compdef %(complete_func)s %(prog_name)s
else
    print -u2 'ddplaunch: zsh completes nothing before compinit: put `autoload -Uz compinit && compinit` above this line'
fi
"""


class _Fish(_WithValues, FishComplete):
    source_template = """\
function %(complete_func)s
    for item in (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp | string collect) \\
            COMP_CWORD=(commandline -ct) %(prog_name)s 2>/dev/null)
        set -l parts (string split -m 1 , -- $item)
        set -l before (string match -r -- '^--[^=]*=' (commandline -ct); or echo)
        switch $parts[1]
            case dir
                string replace -r '^' -- "$before" (__fish_complete_directories $parts[2])
            case file
                string replace -r '^' -- "$before" (__fish_complete_path $parts[2])
            case plain
                echo $parts[2]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments '(%(complete_func)s)'
"""


class _Tcsh(_WithValues):
    name = "tcsh"
    source_template = "complete %(prog_name)s 'p@*@`env %(complete_var)s=tcsh_complete %(prog_name)s`@@'"

    def get_completion_args(self) -> tuple[list[str], str]:
        """From the line up to the cursor."""
        line = os.environ.get("COMMAND_LINE", "")
        words = split_arg_string(line)[1:]
        return (words, "") if not words or line.endswith(" ") else (words[:-1], words[-1])

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """With the names of files, which tcsh does not add itself."""
        option = incomplete[: incomplete.find("=") + 1] if incomplete.startswith("--") else ""
        found = []
        for item in super().get_completions(args, incomplete):
            paths = glob.glob(f"{glob.escape(item.value)}*") if item.type in ("file", "dir") else []
            found += [CompletionItem(f"{option}{path}{'/' * os.path.isdir(path)}") for path in paths]
            found += [item] if item.type == "plain" else []
        return found

    def format_completion(self, item: CompletionItem) -> str:
        """A line of its own."""
        return str(item.value)


_CLASSES: Mapping[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish, "tcsh": _Tcsh}


def script(shell: str) -> str:
    """Return the script for a shell."""
    return _of(shell).source()


def answer(instruction: str) -> str:
    """Answer a shell that asks through VARIABLE: with `bash_complete`, say, and the words typed so far in variables, too."""
    shell = instruction.removesuffix("_complete")
    return _of(shell).complete() if shell in _CLASSES else ""


def _of(shell: str) -> ShellComplete:
    return _CLASSES[shell](root(), {}, "ddplaunch", VARIABLE)
