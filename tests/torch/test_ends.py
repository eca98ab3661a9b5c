"""A training ends, whatever ends first: the process group or what has used it."""

from importlib.util import find_spec

import pytest

from tests.torch.example import LIGHT

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def test_a_group_that_is_destroyed_before_its_models_ends_with_them_and_leaves_no_thread(job, program):
    """torch alone joins gloo's thread with the GIL, for which that thread waits."""
    job.run("--nproc-per-node", 1, "--timeout", "90", program("torch_ends"), env=LIGHT, timeout=120.0).expect(0)
    assert job.has_sign("threads-1")
