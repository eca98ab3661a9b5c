"""What a process has inherited that would serve a run, and how it is named where it differs."""

import os
import resource
import subprocess
import sys

import pytest

from ddplaunch.launcher.workers import warm
from ddplaunch.launcher.workers.servers import ServerLost


def test_what_differs_is_named_as_people_name_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waits = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft - 1}, {hard})); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as same:
        warm.check_same(same.pid)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-Sc", waits], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        with pytest.raises(ServerLost) as lost:
            warm.check_same(other.pid)
    assert str(lost.value) == "it has other resource limits (ulimit)"


def test_all_that_is_compared_has_words() -> None:
    names = warm.shown_by_proc(os.getpid())
    assert [name for name in names if " " not in warm.WORDS[name]] == []
    assert warm.WORDS["ns/pid_for_children"] == "another pid namespace"
    assert warm.WORDS["attr/current"] == "another security context (AppArmor profile, SELinux label)"
