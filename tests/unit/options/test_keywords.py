"""Options as keywords of a call in Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.spec import call as request
from ddplaunch.spec import order
from ddplaunch.spec.job import Fault, StreamChoice, Streams
from ddplaunch.spec.options.sources import from_keywords
from ddplaunch.spec.order import Order
from ddplaunch.system.errors import LaunchError


def spec(**keywords):
    return request.spec_of(request.given(keywords, {}, None), "train.py:main")


def test_variables_of_a_file_that_is_a_keyword_are_shown_nowhere(tmp_path):
    (tmp_path / "a.env").write_text("A=s3cret\n")
    assert spec(env_file=str(tmp_path / "a.env"), env={"B": "typed"}).origins_of_secrets.keys() == {"A"}


@pytest.mark.parametrize(
    ("keywords", "field", "value"),
    [
        ({"nproc_per_node": 4}, "nproc_per_node", 4),
        ({"nproc_per_node": "gpu"}, "nproc_per_node", "gpu"),
        ({"nproc_per_node": None}, "nproc_per_node", None),
        ({"timeout": 0.25}, "timeout", 0.25),
        ({"timeout": 1 / 3}, "timeout", 0.333),
        ({"timeout": "1h30m"}, "timeout", 5400),
        ({"grace_period": 0.0}, "grace_period", 0),
        ({"grace_period": 1e6}, "grace_period", 1e6),
        ({"env": {"A": "1", "B": 2}}, "env", (("A", "1"), ("B", "2"))),
        ({"env": ["A=1"]}, "env", (("A", "1"),)),
        ({"devices": [0, 2]}, "devices", ("0", "2")),
        ({"local_ranks_filter": {1}}, "local_ranks_filter", frozenset({1})),
        ({"log_dir": Path("/logs")}, "log_dir", "/logs"),
        ({"tee": 3}, "tee", StreamChoice(default=Streams.BOTH)),
        ({"virtual_local_rank": False}, "virtual_local_rank", False),
        ({"virtual_local_rank": True}, "virtual_local_rank", True),
        ({"simulate": True, "nnodes": 2}, "simulate", "divide"),
        ({"simulate": "share", "nnodes": 2}, "simulate", "share"),
        ({"simulate": True, "nnodes": 2, "chaos": ["node:1@3s"]}, "chaos", (Fault(kind="node", target=1, after=3.0),)),
        ({}, "verbosity", -1),
        ({"quiet": False}, "verbosity", 0),
        ({"verbose": True}, "verbosity", 1),
        ({}, "cluster", "local"),
    ],
)
def test_a_keyword_has_the_type_that_python_has_for_it(keywords, field, value):
    assert getattr(spec(**keywords), field) == value


def test_where_a_value_came_from_is_the_call():
    assert spec(nproc_per_node=4).typed("nproc_per_node", 4) == "nproc_per_node=4 in launch()"


@pytest.mark.parametrize("value", [True, 3 + 4j, object(), {"a": 1}, b"3"])
def test_a_value_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match=r"^f\(\): timeout=.*: expected a string or a number, not"):
        list(from_keywords({"timeout": value}, call="f()"))


def test_a_time_that_is_too_small_to_be_written_is_no_zero():
    with pytest.raises(LaunchError, match=r"^timeout='1e-05': expected"):
        spec(timeout=0.00001)


def test_another_process_of_ours_reads_the_same():
    collected = request.given({"env": {"A": "ä=\n"}, "timeout": 5, "quiet": False}, {"DDPLAUNCH_ROLE": "r"}, None)
    job = request.spec_of(collected, "train.py:main")
    assert order.decode(order.encode(Order.of(collected, replace(job, env=())))).spec() == job


def test_a_keyword_wins_over_a_variable():
    given = request.given(
        {"output": "raw"}, {"DDPLAUNCH_OUTPUT": "none", "PET_NNODES": "3", "DDPLAUNCH_HOSTS": "a"}, None
    )
    assert request.spec_of(given, "train.py:main").output == "raw"
