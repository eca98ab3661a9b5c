"""The discrete Intel GPUs that a process started here could use, narrowed by ZE_AFFINITY_MASK.

Ignores the integrated graphics of an Intel processor, which users do not mean by "one worker per GPU".
"""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.sysfs import Root, names, read

VARIABLE = "ZE_AFFINITY_MASK"
_DRM = "/sys/class/drm"
_INTEL = "0x8086"
_DRIVERS = ("i915", "xe")
_INTEGRATED = "0000:00:02.0"  # where every Intel processor has its graphics


def find(env: Mapping[str, str], root: Root) -> Hardware | None:
    """Return the devices in torch's order, None if there is no discrete Intel GPU.

    Level Zero takes each tile of a card for a device (ZE_FLAT_DEVICE_HIERARCHY=FLAT, its default) or each card
    (COMPOSITE). In the mask "1.0" is a tile of a card; such an entry is not checked.
    Source: the Level Zero programming guide, "Environment variables" and "Affinity mask".
    """
    devices = _gpus(root, by_tile=env.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT") != "COMPOSITE")
    if not devices:
        return None
    value = env.get(VARIABLE)
    if not value:
        return Hardware(devices=tuple(devices), device_source=_DRM, visible_variable=VARIABLE)
    by_name = {device.visible_as: device for device in devices}
    chosen: list[Device] = []
    left_out = []
    for entry in dict.fromkeys(part.strip() for part in value.split(",")):
        card, _, tile = entry.partition(".")
        if card in by_name and (not tile or tile.isdigit()):
            whole = by_name[card]
            pci = None if tile else whole.pci
            chosen.append(Device(kind="xpu", index=len(chosen), visible_as=entry, name=whole.name, pci=pci))
        else:
            left_out.append(entry)
    return Hardware(
        devices=tuple(chosen),
        device_source=VARIABLE if chosen else f"{VARIABLE}={value}",  # the value shows why there is none
        visible_variable=VARIABLE,
        notes=(f"{VARIABLE}={value}: there is no device {', '.join(left_out)} here",) if left_out else (),
    )


def _gpus(root: Root, *, by_tile: bool) -> list[Device]:
    """Return Intel's discrete GPUs, or, `by_tile`, each of their tiles; counted as Level Zero does."""
    found: list[Device] = []
    for card in names(root, _DRM, prefix="card"):
        if read(root, f"{_DRM}/{card}/device/vendor") != _INTEL:
            continue
        facts = dict(
            line.split("=", 1)
            for line in (read(root, f"{_DRM}/{card}/device/uevent") or "").splitlines()
            if "=" in line
        )
        pci = facts.get("PCI_SLOT_NAME", "").lower()
        if facts.get("DRIVER") not in _DRIVERS or pci == _INTEGRATED:
            continue
        tiles = len(names(root, f"{_DRM}/{card}/device", prefix="tile")) if by_tile else 1
        for _ in range(max(1, tiles)):  # a card without tiles has no such folder
            index = len(found)
            found.append(Device(kind="xpu", index=index, visible_as=str(index), pci=pci or None))
    return found
