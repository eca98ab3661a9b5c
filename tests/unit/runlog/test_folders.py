"""Where a user's runs are kept, by the variables that say it."""

import fcntl
import os
import pwd
import threading
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from ddplaunch.record.folders import first_that_goes_on, make, run_id_of, runs_folder, short
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.system.redaction import Redactor

OF_USER = f"{pwd.getpwuid(os.getuid()).pw_dir}/.local/state/ddplaunch/runs"


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"HOME": "/home/ada"}, "/home/ada/.local/state/ddplaunch/runs"),
        ({"HOME": ""}, OF_USER),  # not the root folder
        ({}, OF_USER),
        ({"HOME": "relative"}, None),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "/state"}, "/state/ddplaunch/runs"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "state"}, "/home/ada/.local/state/ddplaunch/runs"),
    ],
)
def test_the_folder_of_runs(env, folder):
    assert runs_folder(env) == folder


def test_no_short_name_of_a_run_hides_what_stands_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `h5pw: 4 workers` would be taken for a password."""
    spec = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"))
    for last in product(range(30), repeat=2):
        for second in (0, 25):  # a letter, a digit
            monkeypatch.setattr(os, "urandom", lambda _, drawn=bytes((0, second, *last)): drawn)
            line = f"ddplaunch: {short(run_id_of(spec))}: 4 workers"
            assert Redactor().text(line) == line


def test_the_node_that_answers_for_a_run_is_the_first_by_number(tmp_path: Path) -> None:
    with ExitStack() as held:
        for rank in (0, 2, 10):
            (tmp_path / f"node-{rank}").mkdir()
            events = held.enter_context((tmp_path / f"node-{rank}/events.jsonl").open("w"))
            if rank:  # node 0 is lost
                fcntl.flock(events, fcntl.LOCK_EX)
        assert first_that_goes_on(str(tmp_path)) == f"{tmp_path}/node-2"


def test_a_run_has_one_folder_whether_the_command_or_a_node_makes_it_first(tmp_path):
    for number in range(200):
        run, nodes = f"{tmp_path}/run-{number}", list[tuple[str, int, int]]()
        both = threading.Barrier(2)

        def make_part(
            run: str = run, both: threading.Barrier = both, nodes: list[tuple[str, int, int]] = nodes
        ) -> None:
            both.wait()
            nodes.append(make(run, "node-0"))

        node = threading.Thread(target=make_part)
        node.start()
        both.wait()
        made = make(str(tmp_path), f"run-{number}")
        node.join()
        for descriptor in (*made[1:], *nodes[0][1:]):
            os.close(descriptor)
        assert (made[0], nodes[0][0]) == (run, f"{run}/node-0")


def test_of_two_runs_of_one_name_that_begin_at_once_each_has_a_folder(tmp_path):
    for number in range(200):
        made = list[tuple[str, int, int]]()
        both = threading.Barrier(2)

        def make_one(number: int = number, both: threading.Barrier = both, made: list[tuple[str, int, int]] = made):
            both.wait()
            made.append(make(str(tmp_path), f"run-{number}"))

        threads = [threading.Thread(target=make_one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _, *descriptors in made:
            for descriptor in descriptors:
                os.close(descriptor)
        assert sorted(path for path, *_ in made) == [f"{tmp_path}/run-{number}", f"{tmp_path}/run-{number}.1"]


def test_what_has_the_name_and_is_no_folder_stays(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        path, *descriptors = make(str(tmp_path), name)
        for descriptor in descriptors:
            os.close(descriptor)
        assert path == f"{tmp_path}/{name}.1"
