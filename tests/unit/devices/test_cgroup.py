"""OOM kills are counted where they are those of the job, by either version of cgroups, in containers too."""

from pathlib import Path

import pytest

from ddplaunch.plan.devices.sysfs import OomKills, oom_kills

V1 = "32 30 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_OF_CONTAINER = V1.replace("0:30 / ", "0:30 /docker/abc ")
V2 = "30 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_BESIDE = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")


@pytest.mark.parametrize(
    ("mounts", "groups", "counts", "expected"),
    [
        (V2, "0::/job\n", {"job/memory.events": "oom 3\noom_kill 2\n"}, OomKills(2, of_machine=False)),
        (V1, "4:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill 1\n"}, OomKills(1, of_machine=False)),
        (
            V2_BESIDE + V1,
            "4:memory:/job\n0::/\n",
            {"memory/job/memory.oom_control": "under_oom 0\noom_kill 1\n", "unified/cgroup.procs": ""},
            OomKills(1, of_machine=False),
        ),
        (
            V1_OF_CONTAINER,
            "4:memory:/docker/abc\n",
            {"memory/memory.oom_control": "oom_kill 1\n"},
            OomKills(1, of_machine=False),
        ),
        (V2, "0::/\n", {"cgroup.procs": ""}, OomKills(9, of_machine=True)),
        (V1, "4:memory:/job\n", {"memory/job/memory.oom_control": "under_oom 0\n"}, OomKills(9, of_machine=True)),
    ],
    ids=["version 2", "version 1", "both", "container", "top of version 2", "old kernel"],
)
def test_the_kills_of_our_group_count_and_only_without_them_those_of_the_machine(
    tmp_path: Path, mounts: str, groups: str, counts: dict[str, str], expected: OomKills
) -> None:
    files = {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, "proc/vmstat": "pgfault 7\noom_kill 9\n"}
    for path, text in {**files, **{f"sys/fs/cgroup/{name}": text for name, text in counts.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert oom_kills(tmp_path) == expected


def test_kills_from_before_the_job_do_not_count() -> None:
    assert OomKills(3, of_machine=False).since(OomKills(1, of_machine=False)).number == 2
    assert OomKills(0, of_machine=True).since(OomKills(1, of_machine=False)).number == 0
