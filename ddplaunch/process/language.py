"""Tells scripts of Python from notebooks, shell scripts and the like, by name and content. Pure; runs nothing."""

from __future__ import annotations

import os
import re
import warnings

from ddplaunch.errors import LaunchError

_SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
_TEXTS = (".csv", ".tsv", ".md", ".rst", ".log", ".html", ".xml")
_SHELL = re.compile(rb"#!.*\b(ba|da|k|z|fi)?sh\b")
_ELF = b"\x7fELF"
_COMPILED_PYTHON = b"\r\n"  # third and fourth byte, of any version


def check(target: str, content: bytes, *, compiled: bool) -> None:
    """Refuse what is no Python; `compiled`: `content` is all of it, and for our version.

    Raises:
        LaunchError: it is something else.
    """
    if found := _other(target, content):
        kind, hint = found
        raise LaunchError(f"{target} is a {kind}, not a Python script", hint=hint)
    if compiled and b"\0" not in content and (reason := _syntax_error(target, content)):
        raise LaunchError(f"{target} is not a Python script: {reason}", hint="name the script, such as train.py")


def _other(target: str, content: bytes) -> tuple[str, str] | None:
    """What it is, and what to type."""
    stem, suffix = os.path.splitext(target)
    if suffix == ".ipynb":
        return "notebook", (
            f"type `jupyter nbconvert --to script {target}`, then `ddplaunch {stem}.py`; in the notebook itself "
            "`ddplaunch.launch(function)` starts workers"
        )
    if suffix in _SETTINGS:
        return "configuration file", f"the script comes first: `ddplaunch train.py {target}`"
    if suffix in _TEXTS:
        return "text file", "name the script, such as train.py"
    if b"\n#SBATCH" in content:
        return "batch script", f"type `sbatch {target}`"
    if suffix in (".sh", ".bash", ".zsh") or _SHELL.match(content):
        return "shell script", (
            f"type `bash {target}` if it starts ddplaunch, or `ddplaunch --no-python bash {target}` for one in each worker"
        )
    if content.startswith(_ELF) or (b"\0" in content and content[2:4] != _COMPILED_PYTHON):
        program = target if "/" in target else f"./{target}"
        return "binary file", f"if it is a program, type `ddplaunch --no-python {program}`"
    return None


def _syntax_error(target: str, source: bytes) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the worker's interpreter gives them
        try:
            compile(source, target, "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"line {error.lineno}: {error.msg}"
    return None
