"""What is said of GPUs, from made-up answers of the driver; `tests/cli/test_doctor.py` has a made-up driver."""

import pytest
from msgspec.structs import replace

from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.gpu_health import Health, Holder, Machine, Pair
from ddplaunch.plan.devices.interpreter import TorchBuild
from ddplaunch.tools.doctor.gpus import Gpus, UsingProcess, judge
from tests import verdicts

GIB = 1 << 30
DEVICES = tuple(Device(kind="cuda", index=at, visible_as=str(at), uuid=f"GPU-{at}", name="H200") for at in range(2))
HARDWARE = Hardware(devices=DEVICES, device_source="NVML", cpus=(0, 1, 2, 3))
HEALTHY = tuple(Health(index=at, uuid=f"GPU-{at}", name="H200", memory=80 * GIB, persistence=True) for at in range(2))
MACHINE = Machine(driver="580.95", cuda=(13, 0), gpus=HEALTHY, pairs=(Pair(0, 1, True),))
BUILD = TorchBuild(version="2.13.0+cu130", cuda="13.0", hip=None, xpu=None, nccl=True)
GPUS = Gpus(hardware=HARDWARE, machine=MACHINE, build=BUILD)
OURS = UsingProcess(is_ours=True, uid=1000, command="python train.py", seconds=7200.0, is_orphan=False)


def found(gpus: Gpus) -> list[tuple[str, str]]:
    return verdicts.found(judge(gpus))


def with_first(**changes: object) -> Gpus:
    return replace(GPUS, machine=replace(MACHINE, gpus=(replace(HEALTHY[0], **changes), HEALTHY[1])))


def test_healthy_gpus_are_facts_alone():
    assert found(GPUS) == []
    assert judge(GPUS).facts == "2 GPUs: H200, driver 580.95, CUDA 13.0"


def test_a_machine_without_accelerators_has_no_finding():
    assert found(Gpus(hardware=Hardware(), build=replace(BUILD, cuda=None))) == []


@pytest.mark.parametrize(
    ("changes", "severity", "title"),
    [
        ({"lost": True}, "broken", "GPU 0 has fallen off the bus"),
        ({"prohibited": True}, "broken", "GPU 0 takes no process: its compute mode is prohibited"),
        ({"exclusive": True}, "", ""),
        (
            {"fabric_starts": True},
            "broken",
            "GPU 0 waits for the fabric manager of its NVSwitch, and CUDA fails until then",
        ),
        ({"remap_failed": True}, "broken", "GPU 0 has defective memory that it cannot replace any more"),
        ({"remap_pending": True}, "note", "GPU 0 will replace defective memory at its next reset"),
        ({"uncorrected": 2}, "slow", "GPU 0 has had 2 memory errors that could not be corrected"),
        ({"brakes": ("heat (driver)",)}, "slow", "GPU 0 runs at lower clocks because of heat (driver)"),
        ({"pci_width": (4, 16)}, "slow", "GPU 0 uses 4 of its 16 PCI lanes"),
        ({"links": (16, 18)}, "slow", "16 of the 18 NVLinks of GPU 0 are up"),
        ({"links": (0, 18)}, "", ""),  # a card without a bridge
        (
            {"persistence": False},
            "note",
            "GPU 0 is not in persistence mode, so each start waits for the driver to wake it",
        ),
    ],
)
def test_a_state_of_a_gpu_is_judged(changes, severity, title):
    assert found(with_first(**changes)) == ([(severity, title)] if title else [])


def test_gpus_that_the_job_would_not_get_are_no_finding():
    sick = with_first(uncorrected=2)
    only_second = replace(HARDWARE, devices=DEVICES[1:], granted="CUDA_VISIBLE_DEVICES=1")
    assert found(replace(sick, hardware=only_second)) == []


def test_a_stale_process_of_yours_is_named_with_the_line_that_ends_it():
    gpus = replace(with_first(holders=(Holder(4711, 20 * GIB),)), processes={4711: replace(OURS, is_orphan=True)})
    (finding,) = judge(gpus).findings
    assert (finding.severity, finding.title) == ("slow", "GPU 0 is in use by pid 4711")
    assert finding.evidence == (
        "pid 4711 has 20 GiB of GPU 0: yours, for 2 h, and no shell or launcher waits for it: python train.py"
    )
    assert finding.hint == "if no job of yours needs it any more: `kill 4711`"


def test_a_process_that_somebody_waits_for_or_of_another_user_is_not_to_be_killed():
    holders = with_first(holders=(Holder(4711, GIB), Holder(4712, None)))
    for user in (OURS, replace(OURS, is_ours=False, is_orphan=True), None):
        (finding,) = judge(replace(holders, processes={} if user is None else {4711: user})).findings
        assert finding.severity == "note"
        assert "kill" not in finding.hint
    assert "pid 4712 has 0 B of GPU 0: of another container, or hidden from you" in finding.evidence


def test_torch_is_compared_with_the_driver():
    old = replace(GPUS, machine=replace(MACHINE, cuda=(12, 4)))
    assert found(old) == [
        ("broken", "torch 2.13.0+cu130 needs a driver for CUDA 13.0, and this driver runs CUDA 12.4 at most")
    ]
    older_torch = replace(GPUS, build=replace(BUILD, cuda="12.8"))
    assert found(older_torch) == []
    cpu = replace(GPUS, build=replace(BUILD, version="2.13.0+cpu", cuda=None))
    title = "torch 2.13.0+cpu is a build for CPUs, though this machine has 2 accelerators"
    assert found(cpu) == [("slow", title)]
    assert found(replace(cpu, hardware=replace(HARDWARE, granted="CUDA_VISIBLE_DEVICES=0,1"))) == [("broken", title)]


def test_a_driver_that_does_not_work_breaks_a_job():
    broken = Gpus(hardware=Hardware(device_source="NVML: x"), problem="RM has detected an NVML/RM version mismatch")
    (finding,) = judge(broken).findings
    assert finding.severity == "broken"
    assert "reboot" in finding.hint


def test_devices_that_a_variable_grants_and_no_driver_shows_break_a_job():
    hardware = Hardware(
        device_source="no GPU driver found, although CUDA_VISIBLE_DEVICES=0", granted="CUDA_VISIBLE_DEVICES=0"
    )
    assert found(Gpus(hardware=hardware)) == [("broken", hardware.device_source)]


def test_a_variable_that_names_too_many_gpus_is_noted_and_a_gpu_that_is_left_out_is_told_once():
    notes = ("CUDA_VISIBLE_DEVICES=0,1,9: there is no 9", "GPU 2 is left out: NVML reports it as lost")
    assert found(replace(GPUS, hardware=replace(HARDWARE, notes=notes))) == [("note", notes[0])]


def test_pairs_without_peer_to_peer_and_cpus_on_the_other_socket_are_found():
    apart = replace(GPUS, machine=replace(MACHINE, pairs=(Pair(0, 1, False),)), far_from_cpus=(1,))
    assert found(apart) == [
        ("note", "in 1 of 1 pair of GPUs neither reads the other's memory"),
        ("slow", "this process may not use the CPUs near GPU 1"),
    ]
