"""Which interpreter runs the workers where nobody named one: ddplaunch's own, as with torchrun, or the activated one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from ddplaunch.devices import torch_build
from ddplaunch.spec import Given, JobSpec, ProgramKind

# a file in the prefix of an environment that one of these made for a tool (uv 0.4 and later, pipx 0.14 and later)
_RECEIPTS = {"uv-receipt.toml": "uv", "pipx_metadata.json": "pipx"}


def chosen(spec: JobSpec, env: Mapping[str, str], *, own: str = sys.executable, prefix: str = sys.prefix) -> JobSpec:
    """Return the job with the interpreter of its workers, and as its origin the reason, where that is not ddplaunch's own.

    The order is: --python, PYTHON_EXEC, or a file; else the activated environment, if ddplaunch is installed as a tool
    of uv or pipx, or if ddplaunch's interpreter has no torch while the activated one has; else ddplaunch's interpreter.
    """
    if spec.program.python is not None or spec.program.kind is ProgramKind.COMMAND:
        return spec
    tool = next((tool for name, tool in _RECEIPTS.items() if os.path.exists(os.path.join(prefix, name))), None)
    if tool is None and torch_build.find(own) is not None:
        return spec
    why = ""
    for python, found in _activated(env):
        if os.path.abspath(python) == os.path.abspath(own):
            break
        has_torch = torch_build.find(python) is not None
        # an activated environment is meant where ddplaunch has none of its own; any python on PATH is not
        if has_torch or (tool is not None and found != "PATH"):
            why = f"ddplaunch is a tool of {tool}" if tool else f"{own} has no torch"
            origin = f"{found}, since {why}"
            return replace(
                spec,
                program=replace(spec.program, python=python),
                origins={**spec.origins, "python": origin},
                given=(*spec.given, Given.chosen("python", python, origin)),
            )
        why = why or f"ddplaunch's own; neither it nor {python} ({found}) has torch"
    return replace(spec, origins={**spec.origins, "python": why}) if why and tool is None else spec


def _activated(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The interpreters that the shell has activated, in the order in which they count, and where each was found."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if prefix := env.get(variable):
            python = os.path.join(prefix, "bin", "python")
            if _is_program(python):
                yield python, variable
    for folder in env.get("PATH", "").split(os.pathsep):
        for name in ("python", "python3"):
            if folder and _is_program(python := os.path.join(folder, name)):
                yield os.path.abspath(python), "PATH"
                return


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
