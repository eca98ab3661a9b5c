"""What is refused on a node before anything is started there."""

import os
import signal

import pytest

from ddplaunch.launcher.start import node
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.system.errors import LaunchError

PROGRAM = Program(kind=ProgramKind.SCRIPT, target="train.py")


@pytest.mark.parametrize("name", ["notice", "stop"])
def test_a_folder_in_place_of_a_file_is_refused_with_the_name_of_a_file_in_it(tmp_path, name):
    field = f"{name}_file"
    spec = JobSpec(program=PROGRAM, origins={field: "DDPLAUNCH_X"}, **{field: str(tmp_path)})
    with pytest.raises(LaunchError) as caught:
        node.check_watched_files(spec)
    assert str(caught.value) == f"DDPLAUNCH_X={tmp_path} is a folder"
    assert caught.value.hint == f"name a file in it: `DDPLAUNCH_X={tmp_path}/{name}`"


def test_a_job_starts_whose_stop_file_is_not_there_or_on_a_disk_that_hangs(tmp_path, monkeypatch):
    node.check_watched_files(JobSpec(program=PROGRAM, stop_file=str(tmp_path / "stop")))
    monkeypatch.setattr(node, "_DISK_ANSWERS_WITHIN", 0.1)
    monkeypatch.setattr(os.path, "isdir", lambda _: signal.pause())
    node.check_watched_files(JobSpec(program=PROGRAM, stop_file=str(tmp_path)))
