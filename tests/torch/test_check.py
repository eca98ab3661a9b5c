"""`ddplaunch check` of scripts with torch: what ranks ask of their groups is recorded, and compared."""

import json
from importlib.metadata import version
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

OLD = find_spec("torch") is not None and tuple(map(int, version("torch").split(".")[:2])) < (2, 6)
light = pytest.mark.usefixtures("light_torch")  # not with FSDP


@pytest.fixture
def check(job, program):
    """Check ranks 0 and 511 of 512 doing one of the things that torch_checked.py does."""

    def run(doing, *options):
        job.start("check", "--world-size", 512, "--ranks", "0,511", *options, program("torch_checked"), doing)
        return job.wait()

    return run


@light
def test_a_branch_of_one_rank_is_named_with_step_operation_and_line(check):
    result = check("branch").expect(1)
    assert "mismatch: step 2: rank 0 calls all_reduce (float32 [8]) at " in result.out
    assert "rank 511 calls broadcast (float32 [8], rank 0) at " in result.out
    assert "torch_checked.py:" in result.out


@pytest.mark.skipif(OLD, reason="before torch 2.6 fully_shard is elsewhere, and needs CUDA")
def test_ranks_of_a_mesh_with_fsdp_agree_for_as_many_steps_as_asked(check):
    report = json.loads(check("fsdp", "--steps", "2", "--json").expect(0).out)
    assert report["agree"]
    assert [(rank["end"], rank["steps"]) for rank in report["ranks"]] == [("steps", 2)] * 2
    assert report["collectives"] >= 72  # every rank makes all groups of the mesh


@light
def test_a_rank_with_fewer_batches_is_named(check):
    assert "rank 511 ends after step 1" in check("uneven").expect(1).out


@light
def test_a_script_that_joins_by_ddplaunch_meets_nobody(job):
    script = job.home / "joins.py"
    script.write_text(
        "import ddplaunch, torch\n"
        "with ddplaunch.init_process_group():\n"
        "    torch.distributed.all_reduce(torch.ones(1))\n"
    )
    job.start("check", "--world-size", 512, "--ranks", "0,511", script)
    assert "agree in 1 collective of 1 group" in job.wait(60).expect(0).out


@light
def test_another_order_of_new_groups_is_named(check):
    result = check("groups").expect(1)
    assert "rank 0 calls new_group (ranks 0,511), rank 511 calls new_group (ranks 1-2): " in result.out


@light
def test_sends_and_objects_pass_through_fake_groups(check):
    assert "rank 511 receives no more from rank 0" in check("pairs").expect(1).out
    check("objects").expect(0)


@light
def test_the_check_of_a_rank_ends_where_it_would_save(check, job):
    result = check("saves").expect(0)
    assert "note: rank 0 would save after step 1: " in result.out.replace("\n      ", " ")
    assert not list(job.home.rglob("checkpoint.pt"))
