"""Chooses the devices of a job from those of the node (--devices); pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.devices import Device, Hardware
from ddplaunch.errors import LaunchError

CPU = ("cpu",)  # --devices cpu: no accelerator


def choose(hardware: Hardware, wanted: Sequence[str] | None, asked: str) -> tuple[Device, ...]:
    """Return the wanted devices in the wanted order, all of them if `wanted` is None, none if it is "cpu".

    An entry is an index as torch counts (within the visibility variable), or a GPU-/MIG- UUID or the beginning of one.
    `asked` is how `wanted` was written.

    Raises:
        LaunchError: an entry names no device, several, or one that was named before.
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
            raise LaunchError(
                f"{asked}: there is no device {entry or '(empty)'}; this node has {_have(hardware)}",
                hint=f"--devices {','.join(str(device.index) for device in hardware.devices)}",
            )
        if len(matches) > 1:
            several = " and ".join(_uuid(device) for device in matches)
            raise LaunchError(f"{asked}: {entry} may be {several}", hint="give more digits of the UUID")
        if matches[0] in chosen:
            raise LaunchError(
                f"{asked}: device {entry} is named twice",
                hint="--workers-per-gpu 2 lets two workers share each device",
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
    return device.uuid or device.token


def _have(hardware: Hardware) -> str:
    last = len(hardware.devices) - 1
    have = f"0-{last}" if last else "0 alone"
    # a user who counts all of the machine's devices makes this mistake
    narrowed = hardware.device_source == hardware.visible_variable
    return f"{have}, counted within {hardware.visible_variable}" if narrowed else have
