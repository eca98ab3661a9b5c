"""The timeouts of process groups in a job that is debugged; `distributed` is made up, since torch takes seconds to import."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from ddplaunch.worker import distributed


@pytest.mark.parametrize(
    ("given", "passed"),
    [({"timeout": timedelta(seconds=3)}, {"timeout": distributed.LONG}), ({"timeout": None}, {"timeout": None})],
)
def test_each_group_gets_a_long_one_whatever_the_program_gives_it(given, passed):
    made = []
    c10d = SimpleNamespace(_new_process_group_helper=lambda *args, **keywords: made.append((args, keywords)))
    distributed.raise_timeouts(SimpleNamespace(distributed_c10d=c10d))
    c10d._new_process_group_helper(2, backend="gloo", **given)
    assert made == [((2,), {"backend": "gloo", **passed})]
