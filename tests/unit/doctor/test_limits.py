"""What is said of ulimits and of control groups, from made-up ones; the files of both versions of control groups."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.plan.devices.sysfs import GroupLimit, group_limit
from ddplaunch.tools.doctor import Subject
from ddplaunch.tools.doctor.limits import Groups, Limit, Ulimits, judge_groups, judge_ulimits, read_groups, read_ulimits
from tests.verdicts import found

GIB = 1 << 30
ENDLESS = Limit(-1, -1)
ULIMITS = Ulimits(
    files=Limit(1024, 1 << 20),
    locked=Limit(8 << 20, 8 << 20),
    processes=Limit(96365, 96365),
    core=Limit(0, -1),
    address_space=ENDLESS,
)
GROUPS = Groups(memory=64 * GIB, available=60 * GIB, machine_cpus=8, cpus=8)


@pytest.mark.parametrize(
    ("limits", "title"),
    [
        (ULIMITS, ""),  # the soft limit of files is raised by ddplaunch
        (replace(ULIMITS, files=Limit(256, 256)), "a process may have 256 open files only"),
        (replace(ULIMITS, has_rdma=True), "a process may lock 8 MiB of memory only, and this machine has RDMA devices"),
        (replace(ULIMITS, has_rdma=True, locked=ENDLESS), ""),
        (replace(ULIMITS, processes=Limit(100, 100)), "you may have 100 processes and threads only"),
        (replace(ULIMITS, processes=Limit(100, 100), is_root=True), ""),
        (replace(ULIMITS, address_space=Limit(99 * GIB, 99 * GIB)), ""),
        (
            replace(ULIMITS, has_nvidia=True, address_space=Limit(99 * GIB, 99 * GIB)),
            "a process may have 99 GiB of address space only",
        ),
        (replace(ULIMITS, address_space=Limit(GIB, GIB)), "a process may have 1 GiB of address space only"),
    ],
)
def test_a_limit_is_a_finding_only_where_it_matters(limits, title):
    assert found(judge_ulimits(limits)) == ([("slow", title)] if title else [])


@pytest.mark.parametrize(
    ("groups", "finding"),
    [
        (GROUPS, None),
        (replace(GROUPS, memory_limit=32 * GIB, memory_used=GIB), None),
        (
            replace(GROUPS, memory_limit=4 * GIB, memory_used=3 * GIB),
            ("slow", "only 1 GiB of memory are left for a job"),
        ),
        (replace(GROUPS, available=GIB), ("slow", "only 1 GiB of memory are left for a job")),
        (replace(GROUPS, cpu_quota=0.5), ("slow", "this process may use 0.5 of a CPU only")),
        (replace(GROUPS, cpus=1), ("slow", "this process may run on 1 of 8 CPUs only")),
        (replace(GROUPS, cpus=1, machine_cpus=1), None),
        (replace(GROUPS, pids_limit=1000, pids_used=100), None),
        (
            replace(GROUPS, pids_limit=200, pids_used=100),
            ("slow", "the control group has room for 100 processes and threads only"),
        ),
        (
            replace(GROUPS, pids_limit=200, pids_used=200),
            ("broken", "the control group has room for 0 processes and threads only"),
        ),
    ],
)
def test_control_groups_are_judged_by_the_room_that_they_leave(groups, finding):
    assert found(judge_groups(groups)) == ([finding] if finding else [])


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_on_the_path_counts(tmp_path: Path, version: int):
    kind, controllers, mount = (
        ("cgroup2", "", "/sys/fs/cgroup") if version == 2 else ("cgroup", "memory", "/sys/fs/cgroup/memory")
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{'0' if version == 2 else '4'}:{controllers}:/a/b\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        f"30 25 0:26 / {mount} rw - {kind} cgroup rw,{controllers or 'nsdelegate'}\n"
    )
    limit, used = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    inner = tmp_path / mount.lstrip("/") / "a/b"
    inner.mkdir(parents=True)
    (inner / limit).write_text("max" if version == 2 else str(0x7FFFFFFFFFFFF000))
    assert group_limit(tmp_path, "memory") is None
    (inner.parent / limit).write_text("4096")
    (inner.parent / used).write_text("1024")
    assert group_limit(tmp_path, "memory") == GroupLimit(4096, 1024)


def test_this_machine_can_be_read():
    subject = Subject(env={}, python="python")
    assert read_ulimits(subject).files[1] != 0
    assert read_groups(subject).memory > 0
