"""The AMD devices that a process started here could use: the kernel's KFD topology, narrowed by ROCm's variables."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.choose import listed
from ddplaunch.plan.devices.sysfs import Root, names, number, read

VARIABLE = "HIP_VISIBLE_DEVICES"
_OUTER = "ROCR_VISIBLE_DEVICES"
_NODES = "/sys/class/kfd/kfd/topology/nodes"
_VRAM = ("1", "2")  # HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE


def find(env: Mapping[str, str], root: Root) -> Hardware | None:
    """Return the devices in torch's order, None if there is no AMD GPU.

    ROCR_VISIBLE_DEVICES is applied first, then HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES in its place, counts
    within what that left. So a worker is narrowed down by HIP_VISIBLE_DEVICES, with the outer ROCR_VISIBLE_DEVICES
    left as it is. Source: "GPU isolation techniques" and "HIP environment variables" in ROCm's documentation.
    """
    devices = _gpus(root)
    if not devices:
        return None
    source, notes = _NODES, []
    inner = VARIABLE if VARIABLE in env else "CUDA_VISIBLE_DEVICES"
    for variable in (_OUTER, inner):
        value = env.get(variable)
        if value is None:
            continue
        visible = listed(value, [(device.uuid,) if device.uuid else () for device in devices], len(devices))
        devices = [devices[position] for position in visible.positions]
        source = variable if devices else f"{variable}={value}"  # the value shows why there is none
        if variable == _OUTER:
            # the inner variable counts anew in what this left
            devices = [replace(device, visible_as=str(index)) for index, device in enumerate(devices)]
        if visible.problem:
            is_narrowed = variable != _OUTER and _OUTER in env
            within = f"; it counts within {_OUTER}={env[_OUTER]}" if is_narrowed else ""
            notes.append(f"{variable}={value}: {visible.problem}{within}")
    return Hardware(
        devices=tuple(replace(device, index=index) for index, device in enumerate(devices)),
        device_source=source,
        visible_variable=VARIABLE,
        notes=tuple(notes),
    )


def _gpus(root: Root) -> list[Device]:
    """Return the GPUs behind the nodes of the kernel's KFD topology."""
    found: list[Device] = []
    for node in names(root, _NODES):
        # the node of a GPU that a container may not use reads as empty
        facts = _facts(read(root, f"{_NODES}/{node}/properties"))
        if facts.get("simd_count", 0) <= 0:
            continue
        folder = f"{_NODES}/{node}/mem_banks"
        banks = [_facts(read(root, f"{folder}/{bank}/properties")) for bank in names(root, folder)]
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks if str(bank.get("heap_type")) in _VRAM)
        location, unique = facts.get("location_id", 0), facts.get("unique_id", 0)
        device = Device(
            kind="cuda",
            index=len(found),
            visible_as=str(len(found)),
            uuid=f"GPU-{unique:016x}" if unique else None,
            name=read(root, f"{_NODES}/{node}/name") or None,
            memory=memory or None,
            # bus, device and function in 8, 5 and 3 bits, as the kernel's pci_dev_id()
            pci=f"{facts.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}",
        )
        found.append(device)
    return found


def _facts(text: str | None) -> dict[str, int]:
    pairs = (line.partition(" ") for line in (text or "").splitlines())
    return {key: number(value, 0) for key, _, value in pairs}
