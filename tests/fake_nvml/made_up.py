"""A machine with GPUs that do not exist, for the real command: a library in place of NVML, files in place of torch."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvml.c"


def library(folder: Path) -> Path:
    """Compile the stand-in for NVML into this folder, beside a torch of each kind; skip the test if there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the stand-in for NVML needs a C compiler, and there is no gcc here")
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True)
    for cuda in ("13.0", None):
        torch(folder / f"torch-{cuda}", cuda)
    return folder


def machine(library: Path, gpus: str, cuda: str | None = "13.0") -> dict[str, str]:
    """The variables by which a command sees these GPUs, and a torch with that CUDA, or a CPU build."""
    site = library / f"torch-{cuda}"
    path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"FAKE_GPUS": gpus, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": os.pathsep.join(path)}


def torch(folder: Path, cuda: str | None) -> None:
    """Lay out all that is ever read of a torch: it cannot be imported."""
    version = f"2.13.0+{'cu' + cuda.replace('.', '') if cuda else 'cpu'}"
    package = folder / "torch"
    (package / "lib").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ImportError('nobody should import this')\n")
    (package / "version.py").write_text(f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n")
    if cuda:
        (package / "lib" / "libnccl.so.2").touch()


def gpu(number: int) -> str:
    """The UUID of a made-up GPU."""
    return f"GPU-{number:x}0000000-1111-2222-3333-444444444444"


def mig(number: int, instance: int) -> str:
    """The UUID of an instance of a made-up GPU in MIG mode."""
    return f"MIG-{number:x}000000{instance:x}-1111-2222-3333-444444444444"
