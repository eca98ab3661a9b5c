"""The code that a run runs, its packages and its machine: `about.json`. A child of the agent finds out, and no job waits for it.

Git is asked without its locks, hooks and helper programs, and has a few seconds. Secrets in its diff are hidden before anything
is written.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ddplaunch.plan.devices import Device
from ddplaunch.plan.devices.interpreter import packages
from ddplaunch.record.events import VERSION
from ddplaunch.system.fields import line, piece
from ddplaunch.system.process.command import run
from ddplaunch.system.redaction import Redactor, diff

WITHIN = 15.0  # seconds for all of it; the commands have less
_GIT_TIMEOUT = 5.0  # seconds; `git status` reads every file of a large repository
_LONGEST_DIFF = 64_000  # characters
_MOST_FILES = 200  # changed ones that are named
_GIT = (
    "git",
    "--no-optional-locks",
    "--no-pager",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.quotePath=false",
    "-c",
    "color.ui=false",
)


def about(
    folder: str, python: str | None, devices: Sequence[Device], env: Mapping[str, str], secrets: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what about.json holds: `folder` is that of the program, `python` the interpreter of the workers.

    `secrets` are hidden wherever they stand.
    """
    return {
        "v": VERSION,
        "code": _code(folder, env, secrets),
        "machine": _machine(devices),
        "python": _python_version(python, env) if python is not None else None,
        "packages": dict(sorted(packages(python).items())) if python is not None else {},
    }


# --- the code


def _code(folder: str, env: Mapping[str, str], secrets: Sequence[str]) -> dict[str, Any] | None:
    """Return the commit of the repository in which a folder lies, and what was changed since; None without one."""
    until = time.monotonic() + _GIT_TIMEOUT
    git = partial(_output, env=_for_git(env), folder=folder, until=until)
    top_and_commit = git((*_GIT, "rev-parse", "--show-toplevel", "HEAD"))
    if top_and_commit is None or top_and_commit.count("\n") < 2:  # there is no repository, or no commit in it
        return None
    top, commit = top_and_commit.splitlines()[:2]
    git = partial(git, folder=top)
    status = git((*_GIT, "status", "--porcelain", "--branch", "--ignore-submodules=dirty"))
    found: dict[str, Any] = {"folder": line(top), "commit": line(commit), "branch": None, "changed": None, "diff": None,
                             "hidden": 0}  # fmt: skip
    if status is None:  # git took too long
        return found
    branch, *changed = status.splitlines() or [""]  # "## main...origin/main", then a line for each changed file
    found |= {
        "branch": line(branch.removeprefix("## ").partition("...")[0]),
        "changed": list(map(line, changed[:_MOST_FILES])),
    }
    if changed:
        redactor = Redactor(secrets)
        changes = git((*_GIT, "diff", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD"))
        found["diff"] = piece(diff(changes or "", redactor, _LONGEST_DIFF), _LONGEST_DIFF)
        found["hidden"] = redactor.hidden
    return found


def _for_git(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of git: that of the user, without a repository that is named there, as in a hook."""
    kept = {name: value for name, value in env.items() if not name.startswith("GIT_") or name == "GIT_CONFIG_GLOBAL"}
    return {**kept, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


# --- packages and the machine


def _python_version(python: str, env: Mapping[str, str]) -> str | None:
    ask = (python, "-ISE", "-c", "import sys; print(sys.version.split()[0])")
    text = _output(ask, env=env, folder="/", until=time.monotonic() + _GIT_TIMEOUT)
    return line(text.strip()) if text else None


def _machine(devices: Sequence[Device]) -> dict[str, Any]:
    """Return what the machine is: its system, processor, memory and accelerators."""
    system = os.uname()
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)', _text("/etc/os-release"), re.MULTILINE)
    cpu = re.search(r"^(?:model name|Model)\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    driver = re.search(r"Module\S*(?: for \S+)?\s+(\d+\.[\d.]+)", _text("/proc/driver/nvidia/version"))
    return {
        "host": line(system.nodename),
        "system": line(release[1]) if release else None,
        "kernel": line(f"{system.sysname} {system.release} {system.machine}"),
        "cpu": line(cpu[1]) if cpu else None,
        "cpus": os.cpu_count(),
        "memory": int(memory[1]) << 10 if memory else None,
        # a device without a name as CUDA_VISIBLE_DEVICES has it
        "devices": [line(device.name or device.visible_as) for device in devices],
        "driver": driver[1] if driver else None,
    }


def _text(path: str) -> str:
    """Return the beginning of a file; "" if it cannot be read."""
    with suppress(OSError), open(path, errors="replace") as file:
        return file.read(1 << 18)
    return ""


def _output(command: Sequence[str], *, env: Mapping[str, str], folder: str, until: float) -> str | None:
    """Return what a command prints; None if it fails, or has not ended by then."""
    try:
        ended = run(command, env, max(until - time.monotonic(), 0.01), folder, keeps_start=True)
    except (OSError, ValueError):
        return None
    return ended.out if ended.status == 0 else None
