"""How a worker is bound to the devices that it owns, and their names inside it. Pure; `worker/torch_settings.py` does it."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.devices import Device, Hardware
from ddplaunch.errors import LaunchError, count
from ddplaunch.plan.assign import Owned
from ddplaunch.spec import JobSpec, ProgramKind

_ONE_INSTANCE = "CUDA shows a process no more than one MIG instance"  # CUDA programming guide


def choose(spec: JobSpec, owned: Owned) -> tuple[str, str]:
    """Return "device", "visible" or "none" and the reason.

    Raises:
        LaunchError: --pin device where it cannot work.
    """
    devices = {device for own in owned for device in own}
    mig = any(device.is_mig for device in devices)
    command = spec.program.kind is ProgramKind.COMMAND
    if spec.virtual_local_rank:
        return "visible", spec.origin("virtual_local_rank")
    if spec.pin == "device" and command:
        raise LaunchError(
            f"{spec.asked('pin', spec.pin)}: it works inside python, but --no-python runs a command",
            hint="--pin visible",
        )
    if spec.pin == "device" and mig and len(devices) > 1:
        raise LaunchError(f"{spec.asked('pin', spec.pin)}: {_ONE_INSTANCE}", hint="--pin visible")
    if spec.pin:
        return spec.pin, spec.origin("pin")
    if any(len(own) > 1 for own in owned):
        return "visible", "each worker has several devices"  # these can be handed over only as a set
    if mig:
        return "visible", _ONE_INSTANCE
    # a command is most often a wrapper around a Python script that counts on seeing every device
    return ("none", "default for a command") if command else ("device", "default")


def place(
    spec: JobSpec, pin: str, own: tuple[Device, ...], devices: Sequence[Device], hardware: Hardware
) -> tuple[str, dict[str, str]]:
    """Return the name of a worker's device inside the worker, and the variables that bind it.

    `own` are the worker's devices, `devices` those of the job on this node, `hardware` is all that it has.
    """
    if not own:
        return "cpu", {}
    hidden = hardware.visible_variable
    if pin == "visible":
        return f"{own[0].kind}:0", {hidden: ",".join(device.token for device in own)}
    result = {}
    index = own[0].index
    # where CUDA chooses the order of the devices, tokens are UUIDs, and only a list of them makes an index certain
    if spec.devices is not None or not all(device.token.isdigit() for device in devices):
        result[hidden] = ",".join(device.token for device in devices)
        index = devices.index(own[0])
    mine = f"{own[0].kind}:{index}"
    if pin == "device":
        result["DDPLAUNCH_PIN_DEVICE"] = mine
    return mine, result


def notes(spec: JobSpec, pin: str, owned: Owned) -> list[str]:
    """Warn scripts that take LOCAL_RANK for a device index."""
    workers = len(owned)
    devices = len({device for own in owned for device in own})
    if not devices or spec.virtual_local_rank:
        return []
    if pin == "visible" and workers > 1:
        return ["each worker sees only its own devices, so LOCAL_RANK is not a device index: use DDPLAUNCH_DEVICE"]
    if pin != "visible" and workers > devices:
        return [
            f"{workers} workers on {count(devices, 'device')}: set_device(LOCAL_RANK) fails from local rank "
            f"{devices} on; use DDPLAUNCH_DEVICE, or --virtual-local-rank"
        ]
    return []
