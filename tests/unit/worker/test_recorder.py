"""Which ranks a process group has, as a worker writes it down for the agent."""

from types import SimpleNamespace

import pytest

from ddplaunch.launcher.look.recorder import members_of
from ddplaunch.record.seen import Group as Seen
from ddplaunch.record.seen.recorder import parse_members
from ddplaunch.worker import distributed
from ddplaunch.worker.distributed import ranges_of, size_variable_of_recorder


class Group:
    """A process group by its name, as the key of a table."""

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        pytest.param({rank: rank for rank in range(10_000)}, "0-9999", id="all"),
        pytest.param([3, 1, 2, 7], "1-3,7", id="some"),
        pytest.param(range(0, 10_000, 8), ",".join(map(str, range(0, 10_000, 8))), id="one-of-each-of-1250-nodes"),
    ],
)
def test_the_ranks_of_a_group_of_any_size_are_read_as_they_were_written(ranks, text):
    assert ranges_of(ranks) == text
    assert parse_members(f"tp {text}\n") == {"tp": text}
    assert Seen(name="tp", members=text).ranks == sorted(ranks)


def test_a_group_that_does_not_fit_keeps_no_later_one_out(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "ROOM", 30)
    teller = distributed.GroupRanks({}, str(tmp_path / "0-0"), lambda: None)
    teller._noted = 1  # the first one starts torch's server
    for name, ranks in (("first", [0, 1]), ("odd", range(1, 99, 2)), ("small", [2, 3]), ("last", [4, 5])):
        teller._note(SimpleNamespace(group_name=name), {rank: rank for rank in ranks})
    assert members_of(str(tmp_path / "0-0")) == {"first": "0-1", "small": "2-3", "last": "4-5"}


@pytest.mark.parametrize(
    ("version", "variable"),
    [
        ("2.3.1", None),
        ("2.4.1+cu121", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.7.1", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.8.0", "TORCH_FR_BUFFER_SIZE"),
        ("2.11.0+cu130", "TORCH_FR_BUFFER_SIZE"),
        ("3.0.0a0+gitabc", "TORCH_FR_BUFFER_SIZE"),
    ],
)
def test_no_variable_is_set_of_which_torch_warns(version, variable):
    assert size_variable_of_recorder(version) == variable


def test_a_table_of_groups_that_somebody_else_watches_is_watched_by_both(tmp_path):
    class Theirs(dict):
        def __init__(self, seen):
            super().__init__()
            self.seen = seen

        def __setitem__(self, group, ranks):
            self.seen.append(group.group_name)
            super().__setitem__(group, ranks)

    seen: list[str] = []
    table = Theirs(seen)
    ours = distributed.class_in_place_of(table, distributed.GroupRanks)(table, str(tmp_path / "0-0"), lambda: None)
    ours._noted = 1
    group = Group("tp")
    ours[group] = {0: 0, 1: 1}
    assert (seen, dict(ours)) == (["tp"], {group: {0: 0, 1: 1}})
    assert members_of(str(tmp_path / "0-0")) == {"tp": "0-1"}
