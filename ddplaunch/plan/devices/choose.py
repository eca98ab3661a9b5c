"""Which devices of the node a job may use: the visibility variable as the runtime will read it, and --devices. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.system.errors import LaunchError

# --- --devices


CPU = ("cpu",)  # --devices cpu: no accelerator


def choose(hardware: Hardware, wanted: Sequence[str] | None, asked: str) -> tuple[Device, ...]:
    """Return the wanted devices in the wanted order, all of them if `wanted` is None, none if it is "cpu".

    An entry is an index as torch counts (within the visibility variable), or a GPU-/MIG- UUID or the beginning of one.
    `asked` is how `wanted` was written.
    """
    if wanted is None:
        return hardware.devices
    if tuple(wanted) == CPU:
        return ()
    if not hardware.devices:
        raise LaunchError(f"{asked}: this node has no accelerator ({hardware.device_source})", hint="leave it out")
    chosen: list[Device] = []
    for entry in wanted:
        matches = _matching(hardware.devices, entry)
        if not matches:
            last = len(hardware.devices) - 1
            have = f"0-{last}" if last else "0 alone"
            # a user who counts all of the machine's devices makes this mistake
            if hardware.device_source == hardware.visible_variable:
                have = f"{have}, counted within {hardware.visible_variable}"
            raise LaunchError(
                f"{asked}: there is no device {entry or '(empty)'}; this node has {have}",
                hint=f"--devices {','.join(str(device.index) for device in hardware.devices)}",
            )
        if len(matches) > 1:
            several = " and ".join(_uuid(device) for device in matches)
            raise LaunchError(f"{asked}: {entry} may be {several}", hint="give more digits of the UUID")
        if matches[0] in chosen:
            raise LaunchError(
                f"{asked}: device {entry} is named twice", hint="--workers-per-gpu 2 lets two workers share each device"
            )
        chosen += matches
    return tuple(chosen)


def _matching(devices: Sequence[Device], entry: str) -> list[Device]:
    if entry.isascii() and entry.isdigit():
        return [device for device in devices if device.index == int(entry)]
    if not entry.startswith(("GPU-", "MIG-")):
        return []
    return [device for device in devices if entry == device.uuid] or [
        device for device in devices if _uuid(device).startswith(entry)
    ]


def _uuid(device: Device) -> str:
    return device.uuid or device.visible_as


# --- a visibility variable such as CUDA_VISIBLE_DEVICES: what the runtime would ignore is ignored too, and reported


_UUID_PREFIXES = ("GPU-", "MIG-")
HIDES_ALL = ("", "-1", "NoDevFiles")  # the usual ways of hiding every device; the last one is Slurm's


class Listed(NamedTuple):
    """The devices that a variable names."""

    positions: tuple[int, ...]  # of those that will be visible, in the order they will be counted
    entries: tuple[str, ...]  # how the variable names each of them
    problem: str | None = None  # why there are fewer than the variable names; None: there are not


def listed(value: str, uuids: Sequence[tuple[str, ...]], count: int) -> Listed:
    """Return what `value` makes visible; `uuids[i]` are those of device i, and the first `count` devices have an index, too.

    Rules: an entry that names no device, or several, ends the list; a device named twice hides them all; a UUID
    may be cut short; an index may have letters behind it; the first entry says whether the list is of indices or
    of UUIDs.
    Source: the CUDA programming guide, "CUDA environment variables"; torch/cuda/__init__.py, _parse_visible_devices.
    """
    if value.strip() in HIDES_ALL:
        return Listed(positions=(), entries=())
    entries = [entry.strip() for entry in value.split(",")]
    by_uuid = entries[0].startswith(_UUID_PREFIXES)
    positions: list[int] = []
    for entry in entries:
        matches = []
        if not by_uuid:
            digits = re.match(r"\+?([0-9]+)", entry)
            matches = [int(digits[1])] if digits and int(digits[1]) < count else []
        elif entry.startswith(_UUID_PREFIXES):
            # a whole UUID, else the beginning of one
            matches = [position for position, own in enumerate(uuids) if entry in own] or [
                position for position, own in enumerate(uuids) if any(uuid.startswith(entry) for uuid in own)
            ]
        if len(matches) != 1:
            return Listed(tuple(positions), tuple(entries[: len(positions)]), _why(entry, len(matches)))
        if matches[0] in positions:
            return Listed(positions=(), entries=(), problem=f"it names {entry} twice, which hides every device")
        positions += matches
    return Listed(tuple(positions), tuple(entries))


def _why(entry: str, matches: int) -> str | None:
    if entry == "-1":  # the documented way to end a list
        return None
    names = f"{entry} names {matches} devices" if matches else f"there is no device {entry or '(empty)'} here"
    return f"{names}, so it and what follows it is ignored"
