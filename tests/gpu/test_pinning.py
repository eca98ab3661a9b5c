"""Where workers end up on real GPUs: every way of binding with every way in which scripts choose a device."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).parent / "programs"
REPOSITORY = Path(__file__).parents[2]


class Place(NamedTuple):
    """What a worker wrote down."""

    uuid: str  # of the GPU that "cuda" meant
    contexts: list[str]  # UUIDs of the GPUs on which it has a context
    current: int
    device: str  # DDPLAUNCH_DEVICE


Launch = Callable[..., list[Place]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Runs the real command and gives the place of each rank."""

    def command(script: str, *flags: str, **variables: str) -> list[Place]:
        if script == "hides_the_others.py" and "CUDA_VISIBLE_DEVICES" in os.environ:
            pytest.skip(
                "such a script counts all GPUs of the machine, but CUDA_VISIBLE_DEVICES gave these tests a part"
            )
        path = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "PYTHONPATH": path, "PLACES": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), **variables}
        argv = [sys.executable, "-m", "ddplaunch", *flags, str(PROGRAMS / script)]
        ended = run(argv, env=env, text=True, capture_output=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        written = sorted(tmp_path.glob("[0-9]*.json"), key=lambda file: int(file.stem))
        return [Place(**_read(file)) for file in written]

    return command


def _read(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def on(*uuids: str) -> list[tuple[str, list[str]]]:
    """Each worker on its GPU, with no context on another one."""
    return [(uuid, [uuid]) for uuid in uuids]


def found(places: list[Place]) -> list[tuple[str, list[str]]]:
    return [(place.uuid, place.contexts) for place in places]


@pytest.mark.claim(
    "with --pin device, each script lands on its worker's GPU, with no context elsewhere; it may fork before it uses CUDA",
    page="guides/devices.md",
)
@pytest.mark.parametrize("script", ["says_cuda.py", "sets_device.py", "hides_the_others.py", "forks_before_cuda.py"])
def test_by_default_every_script_lands_on_the_gpu_of_its_local_rank(launch, uuids, script):
    assert found(launch(script, "--nproc-per-node", str(len(uuids)))) == on(*uuids)


@pytest.mark.claim("DDPLAUNCH_DEVICE names the worker's device as torch counts it", page="guides/devices.md")
def test_a_pinned_worker_is_told_its_device_as_torch_counts_it(launch: Launch, uuids: list[str]) -> None:
    places = launch("says_cuda.py", "--pin", "device")
    assert [(place.current, place.device) for place in places] == [(n, f"cuda:{n}") for n in range(len(uuids))]


@pytest.mark.claim("with --pin visible the worker's own GPU is cuda:0", page="guides/devices.md")
@pytest.mark.parametrize("script", ["says_cuda.py", "hides_the_others.py"])
def test_a_worker_that_sees_only_its_own_gpu_lands_there(launch: Launch, uuids: list[str], script: str) -> None:
    places = launch(script, "--nproc-per-node", str(len(uuids)), "--pin", "visible")
    assert found(places) == on(*uuids)
    assert {(place.current, place.device) for place in places} == {(0, "cuda:0")}


@pytest.mark.claim("--virtual-local-rank suits set_device(LOCAL_RANK)", page="guides/devices.md")
def test_a_virtual_local_rank_suits_scripts_that_set_their_device(launch: Launch, uuids: list[str]) -> None:
    places = launch("sets_device.py", "--nproc-per-node", str(len(uuids)), "--virtual-local-rank")
    assert found(places) == on(*uuids)


@pytest.mark.claim("with --pin none the script chooses, and cuda is GPU 0", page="guides/devices.md")
@pytest.mark.parametrize("script", ["sets_device.py", "hides_the_others.py"])
def test_without_pinning_a_script_chooses_for_itself(launch: Launch, uuids: list[str], script: str) -> None:
    assert found(launch(script, "--nproc-per-node", str(len(uuids)), "--pin", "none")) == on(*uuids)


@pytest.mark.claim("with --pin none the script chooses, and cuda is GPU 0", page="guides/devices.md")
def test_without_pinning_cuda_means_the_first_gpu(launch: Launch, uuids: list[str]) -> None:
    places = launch("says_cuda.py", "--nproc-per-node", str(len(uuids)), "--pin", "none")
    assert found(places) == on(*[uuids[0]] * len(uuids))


@pytest.mark.claim("two workers on one GPU are both on cuda:0, by any --pin", page="guides/devices.md")
@pytest.mark.parametrize("pin", ["device", "visible", "none"])
def test_two_workers_share_one_gpu(launch: Launch, uuids: list[str], pin: str) -> None:
    places = launch("says_cuda.py", "--nproc-per-node", "2", "--pin", pin, CUDA_VISIBLE_DEVICES=uuids[0])
    assert found(places) == on(uuids[0], uuids[0])
    assert {place.device for place in places} == {"cuda:0"}


@pytest.mark.claim("CUDA_VISIBLE_DEVICES of the shell holds", page="guides/devices.md")
@pytest.mark.parametrize("pin", ["device", "visible"])
def test_the_outer_list_of_visible_gpus_holds(launch: Launch, uuids: list[str], pin: str) -> None:
    backwards = uuids[::-1]
    places = launch("says_cuda.py", "--pin", pin, CUDA_VISIBLE_DEVICES=",".join(backwards))
    assert found(places) == on(*backwards)


@pytest.mark.claim("--devices chooses GPUs by UUID", page="guides/devices.md")
@pytest.mark.parametrize("pin", ["device", "visible"])
def test_chosen_devices_are_the_ones_used(launch: Launch, uuids: list[str], pin: str) -> None:
    assert found(launch("says_cuda.py", "--pin", pin, "--devices", uuids[-1])) == on(uuids[-1])
