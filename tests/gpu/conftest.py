"""The GPUs that these tests need, the reason why they are skipped without, and the table of what was seen."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ddplaunch.plan.devices import Hardware
from ddplaunch.plan.devices.interpreter import find_torch
from ddplaunch.plan.devices.node import probe
from tests.conftest import Job, left_after
from tests.fake_nvml import made_up
from tests.gpu.claims import OPTION, Table
from tests.gpu.machine import PATIENCE, Machine, made_up_gpu, real_gpu, room

HERE = Path(__file__).parent
PLAYED = "made-up"
LONGEST_TOLD = 110  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have the table written where it is wanted."""
    parser.addoption(OPTION, metavar="FILE", help="write what was seen of each claim about GPUs into this file")


def pytest_configure(config: pytest.Config) -> None:
    """Collect the table in the process that has the reports of all others."""
    if (path := config.getoption(OPTION)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(Path(path).absolute()))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put last what wants the GPU alone; have each test on a real one tell the claim that it is about."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    for item in items:
        if item.get_closest_marker("gpu") is not None and (claim := item.get_closest_marker("claim")) is not None:
            item.user_properties += [("claim", claim.args[0]), ("page", claim.kwargs["page"])]


def missing() -> str | None:
    """Why nothing here can be tested; None: it can."""
    hardware = probe(os.environ)
    if hardware.visible_variable != "CUDA_VISIBLE_DEVICES" or not hardware.devices:
        return f"needs an NVIDIA GPU ({hardware.device_source})"
    if any(device.is_mig or device.uuid is None for device in hardware.devices):
        return "needs whole GPUs that NVML knows"
    build = find_torch(sys.executable)
    if build is None or build.cuda is None:
        return f"needs a torch with CUDA ({build.version if build else 'torch is not installed'})"
    return None


@pytest.fixture
def hardware() -> Hardware:
    if reason := missing():
        pytest.skip(reason)
    return probe(os.environ)


@pytest.fixture
def uuids(hardware: Hardware) -> list[str]:
    """The GPUs that CUDA shows here, in its order."""
    return [device.uuid or "" for device in hardware.devices]


@pytest.fixture(autouse=True)
def has_room(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the GPU alone where the test is marked so; one that is made up is the test's own."""
    if request.node.get_closest_marker("gpu") is None or missing():
        yield
        return
    with room(alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Machine:
    """The real machine."""
    request.getfixturevalue("hardware")
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    return Machine(env={"PYTHONPATH": path}, is_real=True, ask=real_gpu)


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.gpu), PLAYED])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The real machine, and one that is made up, for what needs no more of torch than tests/gpu/played has."""
    if request.param != PLAYED:
        return request.getfixturevalue("gpu")  # type: ignore[no-any-return]
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    library = made_up.library(tmp_path)
    users = tmp_path / "users"
    users.mkdir()
    env = {**made_up.machine(library, "H100"), "FAKE_GPU_USERS": str(users)}
    path = os.pathsep.join([str(HERE / "played"), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path}
    return Machine(env=env, is_real=False, ask=partial(made_up_gpu, env))


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    """Gives jobs in homes of their own; the command of one that still runs is killed, and of none of them is a process left."""
    made: list[Job] = []

    def make(name: str) -> Job:
        (tmp_path / name).mkdir()
        made.append(Job(tmp_path / name))
        return made[-1]

    yield make
    try:
        for job in filter(lambda job: job.process is not None, made):
            assert job.process is not None
            job.process.kill()
            job.process.communicate(timeout=PATIENCE)
            left = left_after(10.0, job.left)
            assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    finally:
        for job in made:
            job.kill_all()
            for run in (job.home / "state" / "ddplaunch" / "runs").glob("*"):  # where command and agent were killed
                for folder in Path("/dev/shm").glob(f"ddplaunch-errors-{run.name}-*"):
                    shutil.rmtree(folder)


@pytest.fixture
def job(jobs: Callable[[str], Job]) -> Job:
    """One invocation of the command; what torch and CUDA leave in TMPDIR is theirs."""
    return jobs("home")


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Notes down for the table what was seen, in words, as many as a cell has room for."""
    return lambda text: request.node.user_properties.append(
        ("told", textwrap.shorten(text, LONGEST_TOLD, placeholder=" ..."))
    )
