"""What is said of the folders that a job writes to; each is tried with real files, and nothing is left in it."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.plan.devices.sysfs import Mount
from ddplaunch.tools.doctor import Subject
from ddplaunch.tools.doctor.files import Place, judge, kind_of, read_place
from tests.verdicts import found

GIB = 1 << 30
PLACE = Place(
    name="your home",
    path="/home/ada",
    kind="nfs4",
    free=9 * GIB,
    size=99 * GIB,
    bytes_per_second=2e8,
    fsync_seconds=0.01,
)
HERE = Subject(env={}, python="python")


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, ""),
        ({"write_problem": "permission denied"}, "nothing can be written to your home: permission denied"),
        ({"free": 1 << 20}, "1 MiB of 99 GiB are free in your home"),
        ({"free_inodes": 7}, "7 inodes are free in your home, so that few files can be made"),
        ({"free_inodes": 70_000}, ""),
        ({"lock_problem": "no locks available"}, "files in your home cannot be locked: no locks available"),
        (
            {"bytes_per_second": 1e6, "fsync_seconds": 4.0},
            "your home is slow: 976.6 KiB/s to disk, one fsync takes 4 s",
        ),
        ({"socket_problem": "operation not supported"}, ""),  # a run has its socket in /tmp then
    ],
)
def test_a_folder_is_slow_if_it_fails_and_a_job_goes_on_without_it(changes, title):
    assert found(judge("home", replace(PLACE, **changes))) == ([("slow", title)] if title else [])


def test_a_folder_that_is_yet_to_be_made_is_tried_above_it_and_nothing_is_left(tmp_path: Path):
    found = read_place("the folder of runs", str(tmp_path / "a/b"), HERE)
    assert (found.write_problem, found.lock_problem, found.socket_problem) == ("", "", "")
    assert found.bytes_per_second > 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_takes_no_file_says_why():
    assert read_place("x", "/proc/self", HERE).write_problem  # root may write anywhere else


def test_the_file_system_is_that_of_the_longest_mount_point_above():
    mounted = [Mount("/", "/", "ext4", ()), Mount("/", "/home", "nfs4", ()), Mount("/", "/home/adam", "tmpfs", ())]
    assert [kind_of(path, mounted) for path in ("/home/ada", "/home", "/homes", "/")] == [
        "nfs4",
        "nfs4",
        "ext4",
        "ext4",
    ]
    assert kind_of("/x", []) == ""
