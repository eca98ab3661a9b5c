import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.assign import MPS_SHARE, check_mps, mps_shares
from ddplaunch.plan.devices import Device
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.system.errors import LaunchError

GPUS = [Device(kind="cuda", index=n, visible_as=str(n)) for n in range(3)]
SPEC = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="a.py"), mps=True, origins={"mps": "DDPLAUNCH_MPS"})


def test_each_worker_has_an_equal_part_of_the_gpu_that_it_shares():
    owned = ((GPUS[0],), (GPUS[0],), (GPUS[0],), (GPUS[1],), (GPUS[1],), (GPUS[2],))
    assert [share[MPS_SHARE] for share in mps_shares(owned, {})] == ["33", "33", "33", "50", "50", "100"]


def test_a_share_that_is_set_stays():
    assert mps_shares(((GPUS[0],),) * 2, {MPS_SHARE: "70"}) == [{}, {}]


@given(st.lists(st.sampled_from(GPUS), min_size=1, max_size=300))
def test_the_parts_of_a_gpu_are_never_more_than_the_whole_unless_each_is_the_least(owners):
    given = [int(share[MPS_SHARE]) for share in mps_shares(tuple((device,) for device in owners), {})]
    for gpu in set(owners):
        of_this = [share for share, owner in zip(given, owners, strict=True) if owner == gpu]
        assert sum(of_this) <= 100 or set(of_this) == {1}


WRONG = [
    (((),), "/mps", False, "DDPLAUNCH_MPS: the workers have no NVIDIA GPU to share"),
    (((Device(kind="xpu", index=0, visible_as="0"),),), "/mps", False, "DDPLAUNCH_MPS: the workers have no NVIDIA GPU"),
    (((GPUS[0],),), None, False, "DDPLAUNCH_MPS: nvidia-cuda-mps-control was not found on PATH"),
    (((GPUS[0],),), "/mps", True, "DDPLAUNCH_MPS: a command was started for each rank"),
]


@pytest.mark.parametrize(("owned", "control", "per_rank", "message"), WRONG)
def test_what_cannot_work_is_refused(owned, control, per_rank, message):
    with pytest.raises(LaunchError) as raised:
        check_mps(SPEC, owned, control, started_per_rank=per_rank)
    assert raised.value.message.startswith(message)
    assert raised.value.hint


def test_what_can_work_is_not():
    check_mps(SPEC, ((GPUS[0],), (GPUS[0],)), "/usr/bin/mps", started_per_rank=False)
