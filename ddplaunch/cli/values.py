"""What completes a value that no table lists: modules of the folder, devices, entries of a list. Reads files only."""

from __future__ import annotations

import os
from collections.abc import Iterable

from click.shell_completion import CompletionItem

_NVIDIAS = "/proc/driver/nvidia/gpus"  # which has a folder for each GPU


def modules(typed: str) -> list[CompletionItem]:
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


def devices(typed: str) -> list[CompletionItem]:
    """Return what completes the value of --devices: the indices of NVIDIA's GPUs, as the driver has them, and cpu."""
    try:
        found = [str(index) for index in range(len(os.listdir(_NVIDIAS)))]
    except OSError:  # there is no driver
        found = []
    return listed([*found, *([] if "," in typed else ["cpu"])], typed)


def listed(values: Iterable[str], typed: str) -> list[CompletionItem]:
    """Return what completes the last entry of a list, whole, without the entries that stand before it: `0,` gives `0,1`."""
    before, comma, begun = typed.rpartition(",")
    used = before.split(",")
    return [
        CompletionItem(f"{before}{comma}{value}") for value in values if value.startswith(begun) and value not in used
    ]
