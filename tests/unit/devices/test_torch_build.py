import sys
from pathlib import Path

import pytest

from ddplaunch.plan.devices.interpreter import TorchBuild, find_torch

VERSION = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda!r}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip!r}
xpu: Optional[str] = {xpu!r}
"""


def install(
    site: Path, version: str = "2.13.0", *, cuda: str | None = None, hip: str | None = None, xpu: str | None = None
) -> Path:
    package = site / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    (package / "version.py").write_text(VERSION.format(version=version, cuda=cuda, hip=hip, xpu=xpu))
    return package


def put_on_path(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    standard = [folder for folder in sys.path if not Path(folder, "torch").exists()]
    monkeypatch.setattr(sys, "path", [str(site), *standard])


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this interpreter finds packages."""
    put_on_path(monkeypatch, tmp_path)
    return tmp_path


def test_our_own_torch_is_read_without_importing_it(ours: Path) -> None:
    install(ours, "2.13.0+cpu")
    assert find_torch(sys.executable) == TorchBuild(version="2.13.0+cpu", cuda=None, hip=None, xpu=None, nccl=False)


def test_no_torch_is_none(ours: Path) -> None:
    assert find_torch(sys.executable) is None


def test_a_folder_of_that_name_is_no_torch(ours: Path) -> None:
    (ours / "torch").mkdir()
    assert find_torch(sys.executable) is None


def test_a_version_file_without_a_version_is_no_torch(ours: Path) -> None:
    (install(ours) / "version.py").write_text("# written by the build\n")
    assert find_torch(sys.executable) is None


@pytest.mark.parametrize(
    "library",
    ["torch/lib/libnccl.so.2", "nvidia/nccl/lib/libnccl.so.2", "../../libnccl.so.2"],
    ids=["bundled", "wheel of its own", "conda"],
)
def test_nccl_is_found_beside_a_cuda_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    put_on_path(monkeypatch, site)
    install(site, "2.13.0+cu130", cuda="13.0")
    (site / library).parent.mkdir(parents=True, exist_ok=True)
    (site / library).touch()
    found = find_torch(sys.executable)
    assert found == TorchBuild(version="2.13.0+cu130", cuda="13.0", hip=None, xpu=None, nccl=True)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"..c10d16ProcessGroupNCCL..", True), (b"..gloo..", False), (b"", False)]
)
def test_nccl_is_found_inside_a_cuda_build(ours: Path, content: bytes, expected: bool) -> None:
    (install(ours, cuda="13.0") / "lib/libtorch_cuda.so").write_bytes(content)
    found = find_torch(sys.executable)
    assert found is not None
    assert found.nccl is expected


def test_nccl_beside_a_cpu_build_is_of_no_use_to_it(ours: Path) -> None:
    (install(ours, "2.13.0+cpu") / "lib/libnccl.so.2").touch()
    found = find_torch(sys.executable)
    assert found is not None
    assert not found.nccl


def test_a_rocm_build_has_rccl(ours: Path) -> None:
    (install(ours, "2.13.0+rocm7.1", hip="7.1.25") / "lib/librccl.so").touch()
    found = find_torch(sys.executable)
    assert found == TorchBuild(version="2.13.0+rocm7.1", cuda=None, hip="7.1.25", xpu=None, nccl=True)


def test_a_build_for_intel_gpus_is_known(ours: Path) -> None:
    install(ours, "2.13.0+xpu", xpu="20250301")
    found = find_torch(sys.executable)
    assert found == TorchBuild(version="2.13.0+xpu", cuda=None, hip=None, xpu="20250301", nccl=False)


def interpreter(path: Path, target: Path | None = None) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if target is None:
        path.touch()
    else:
        path.symlink_to(target)
    return str(path)


def version_for(python: str) -> str | None:
    found = find_torch(python)
    return found.version if found else None


@pytest.mark.parametrize("key", ["version = 3.12.4", "version_info = 3.12.4.final.0"], ids=["venv", "uv"])
def test_a_venv_has_its_own_torch(tmp_path: Path, key: str) -> None:
    base = interpreter(tmp_path / "usr/bin/python3.12")
    python = interpreter(tmp_path / "venv/bin/python", Path(base))
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {tmp_path}/usr/bin\n{key}\n")
    install(tmp_path / "usr/lib/python3.12/site-packages", "1.0")
    assert version_for(python) is None
    install(tmp_path / "venv/lib/python3.12/site-packages", "2.0")
    assert version_for(python) == "2.0"


def test_a_venv_may_show_the_torch_below_it(tmp_path: Path) -> None:
    base = interpreter(tmp_path / "usr/bin/python3.12")
    python = interpreter(tmp_path / "venv/bin/python", Path(base))
    (tmp_path / "venv/pyvenv.cfg").write_text(
        f"home = {tmp_path}/usr/bin\ninclude-system-site-packages = true\nversion = 3.12.4\n"
    )
    install(tmp_path / "usr/lib/python3.12/site-packages", "1.0")
    (tmp_path / "usr/lib/python3.12/os.py").touch()
    assert version_for(python) == "1.0"


@pytest.mark.parametrize(
    "site", ["lib/python3.12/site-packages", "lib64/python3.12/site-packages", "local/lib/python3.12/dist-packages"]
)
def test_an_installed_python_has_its_own_torch(tmp_path: Path, site: str) -> None:
    interpreter(tmp_path / "usr/bin/python3.12")
    python = interpreter(tmp_path / "usr/bin/python3", Path("python3.12"))
    for lib in ("lib", "lib64"):
        (tmp_path / f"usr/{lib}/python3.12").mkdir(parents=True)
        (tmp_path / f"usr/{lib}/python3.12/os.py").touch()
    install(tmp_path / "usr" / site, "2.0")
    assert version_for(python) == "2.0"


def test_a_link_from_elsewhere_is_followed(tmp_path: Path) -> None:
    base = interpreter(tmp_path / "opt/python/bin/python3.12")
    python = interpreter(tmp_path / "home/bin/python", Path(base))
    install(tmp_path / "opt/python/lib/python3.12/site-packages", "2.0")
    (tmp_path / "opt/python/lib/python3.12/os.py").touch()
    assert version_for(python) == "2.0"


def test_two_venvs_of_one_python_are_told_apart(tmp_path: Path, ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(ours, "1.0")
    base = interpreter(tmp_path / "usr/bin/python3.12")
    here = interpreter(tmp_path / "here/bin/python", Path(base))
    there = interpreter(tmp_path / "there/bin/python", Path(base))
    (tmp_path / "there/pyvenv.cfg").write_text("version = 3.12.4\n")
    install(tmp_path / "there/lib/python3.12/site-packages", "2.0")
    monkeypatch.setattr(sys, "executable", here)
    assert [version_for(python) for python in (here, there)] == ["1.0", "2.0"]


@pytest.mark.parametrize("name", ["missing", "wrapper", "loop"])
def test_an_interpreter_that_says_nothing_has_no_torch_that_we_know(tmp_path: Path, name: str) -> None:
    (tmp_path / "wrapper").write_text("#!/bin/sh\n")
    (tmp_path / "loop").symlink_to("loop")
    assert version_for(str(tmp_path / name)) is None
