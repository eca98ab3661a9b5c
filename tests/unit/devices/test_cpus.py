from pathlib import Path

import pytest

from ddplaunch.plan.devices import Core, Hardware
from ddplaunch.plan.devices.sysfs import cores, cpu_quota
from tests.unit.builders import write_files

V1_CPU = "31 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "32 30 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_ALONE = "30 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_BESIDE = "33 30 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"


def quota(root: Path, *, groups: str, mounts: str, limits: dict[str, str]) -> float | None:
    write_files(root, {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts})
    write_files(root, {f"sys/fs/cgroup/{path}": text for path, text in limits.items()})
    return cpu_quota(root)


def test_version_2_limits_by_cpu_max(tmp_path: Path) -> None:
    found = quota(
        tmp_path, groups="0::/job\n", mounts=V2_ALONE, limits={"cpu.stat": "", "job/cpu.max": "250000 100000\n"}
    )
    assert found == 2.5


def test_the_tightest_group_on_the_path_counts(tmp_path: Path) -> None:
    limits = {
        "slice/cpu.max": "150000 100000\n",
        "slice/job/cpu.max": "max 100000\n",
        "slice/job/step/cpu.max": "400000 100000\n",
        "other/cpu.max": "1000 100000\n",
    }
    assert quota(tmp_path, groups="0::/slice/job/step\n", mounts=V2_ALONE, limits=limits) == 1.5


def test_without_a_limit_there_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path, groups="0::/job\n", mounts=V2_ALONE, limits={"job/cpu.max": "max 100000\n"}) is None


def test_version_1_limits_by_quota_and_period(tmp_path: Path) -> None:
    found = quota(
        tmp_path,
        groups="12:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        mounts=V1_MEMORY + V1_CPU,
        limits={
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/docker/cpu.cfs_quota_us": "300000\n",
            "cpu,cpuacct/docker/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            "memory/docker/abc/cpu.cfs_quota_us": "1\n",
            "memory/docker/abc/cpu.cfs_period_us": "100000\n",
        },
    )
    assert found == 3.0


def test_a_hybrid_system_is_limited_by_either(tmp_path: Path) -> None:
    found = quota(
        tmp_path,
        groups="4:cpuset:/\n3:cpu,cpuacct:/a\n1:name=systemd:/\n0::/b\n",
        mounts=V1_CPU + V2_BESIDE,
        limits={
            "cpu,cpuacct/a/cpu.cfs_quota_us": "800000\n",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            "unified/b/cpu.max": "200000 50000\n",
        },
    )
    assert found == 4.0


def test_a_container_whose_mount_shows_only_its_own_group_is_limited(tmp_path: Path) -> None:
    mounts = "31 30 0:29 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
    found = quota(
        tmp_path,
        groups="3:cpu:/docker/abc\n",
        mounts=mounts,
        limits={"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
    )
    assert found == 0.5


@pytest.mark.parametrize("path", ["/../../outside", "/docker/abc"])
def test_a_group_outside_the_namespace_is_limited_by_what_is_mounted(tmp_path: Path, path: str) -> None:
    assert quota(tmp_path, groups=f"0::{path}\n", mounts=V2_ALONE, limits={"cpu.max": "100000 100000\n"}) == 1.0


def test_a_mount_point_may_hold_a_space(tmp_path: Path) -> None:
    mounts = V2_ALONE.replace("/sys/fs/cgroup", "/sys/fs/cgroup/my\\040groups")
    assert quota(tmp_path, groups="0::/\n", mounts=mounts, limits={"my groups/cpu.max": "200000 100000\n"}) == 2.0


@pytest.mark.parametrize("text", ["", "garbage\n", "1000 0\n", "0.5 100000\n"])
def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert quota(tmp_path, groups="0::/\n", mounts=V2_ALONE, limits={"cpu.max": text}) is None


@pytest.mark.parametrize(("limit", "expected"), [(None, 4), (2.9, 2), (0.3, 1), (64.0, 4)])
def test_usable_cpus_are_the_affinity_cut_by_the_quota(limit: float | None, expected: int) -> None:
    assert Hardware(cpus=(0, 1, 2, 3), cpu_quota=limit).usable_cpus == expected


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two packages of four cores with two threads each: 0-7 and their siblings 8-15; two cores share a cache."""
    for cpu in range(16):
        core = cpu % 8
        pair = core // 2 * 2
        write_files(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}",
            {
                "topology/thread_siblings_list": f"{core},{core + 8}\n",
                "topology/physical_package_id": f"{core // 4}\n",
                "cache/index0/level": "1\n",
                "cache/index0/type": "Data\n",
                "cache/index0/shared_cpu_list": f"{core},{core + 8}\n",
                "cache/index1/level": "9\n",
                "cache/index1/type": "Instruction\n",
                "cache/index1/shared_cpu_list": "0-15\n",
                "cache/index3/level": "3\n",
                "cache/index3/type": "Unified\n",
                "cache/index3/shared_cpu_list": f"{pair}-{pair + 1},{pair + 8}-{pair + 9}\n",
            },
        )
    write_files(
        tmp_path / "sys/devices/system/node",
        {"node0/cpulist": "0-3,8-11\n", "node1/cpulist": "4-7,12-15\n", "node2/cpulist": "\n", "possible": "0-2\n"},
    )
    return tmp_path


def test_cores_hold_their_threads_and_know_their_place(two_sockets: Path) -> None:
    assert cores(two_sockets, range(16)) == tuple(
        Core(cpus=(core, core + 8), numa_node=core // 4, package=core // 4, cache=core // 2 * 2) for core in range(8)
    )


def test_cores_hold_only_the_allowed_cpus(two_sockets: Path) -> None:
    assert cores(two_sockets, {13, 1, 5, 15}) == (
        Core(cpus=(1,), numa_node=0, package=0, cache=0),
        Core(cpus=(5, 13), numa_node=1, package=1, cache=4),
        Core(cpus=(15,), numa_node=1, package=1, cache=6),
    )


def test_without_sysfs_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert cores(tmp_path, {2, 7}) == (
        Core(cpus=(2,), numa_node=0, package=0, cache=2),
        Core(cpus=(7,), numa_node=0, package=0, cache=2),
    )


def test_without_caches_a_package_is_one_core_complex(two_sockets: Path) -> None:
    for index in two_sockets.glob("sys/devices/system/cpu/cpu*/cache/index*/shared_cpu_list"):
        index.unlink()
    assert [core.cache for core in cores(two_sockets, range(16))] == [0, 0, 0, 0, 4, 4, 4, 4]
