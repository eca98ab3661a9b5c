"""What the torch of an interpreter was built with, read from its files; imports no torch and starts no interpreter."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from msgspec import Struct

from ddplaunch.devices.sysfs import names, read


class TorchBuild(Struct, frozen=True, kw_only=True):
    """One installed torch."""

    version: str  # "2.13.0+cu130"
    cuda: str | None  # CUDA's version; None: not a CUDA build
    hip: str | None  # ROCm's HIP version; None: not a ROCm build
    xpu: str | None  # the oneAPI version; None: not a build for Intel GPUs
    nccl: bool  # whether it has NCCL, or RCCL on ROCm


def find(python: str) -> TorchBuild | None:
    """Return the build of the torch that the interpreter at this path would import, None if none is found.

    For another interpreter than ours its own site-packages are looked at, not PYTHONPATH, .pth files or the user's site.
    """
    if _is_ours(python):
        return _build(_ours())
    for folder in _site_folders(os.path.abspath(python)):
        if build := _build(os.path.join(folder, "torch")):
            return build
    return None


def _is_ours(python: str) -> bool:
    # the link itself, not only what it leads to: a venv's python leads to that of every other venv
    here, there = os.path.abspath(python), os.path.abspath(sys.executable)
    return os.path.dirname(here) == os.path.dirname(there) and os.path.realpath(here) == os.path.realpath(there)


def _ours() -> str | None:
    # finds without importing, since torch is a top-level package
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("torch")
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else None


def _build(package: str | None) -> TorchBuild | None:
    text = read("/", f"{package}/version.py") if package else None
    if package is None or text is None:
        return None
    # __version__ = '2.13.0+cpu'   cuda: Optional[str] = None
    assigned = dict(re.findall(r"""^(\w+)\s*(?::[^=\n]*)?=\s*['"]([^'"]*)['"]""", text, re.MULTILINE))
    if "__version__" not in assigned:
        return None
    cuda, hip = assigned.get("cuda"), assigned.get("hip")
    return TorchBuild(
        version=assigned["__version__"],
        cuda=cuda,
        hip=hip,
        xpu=assigned.get("xpu"),
        nccl=bool(cuda or hip) and (_nccl_beside(package) or _nccl_inside(package)),
    )


def _nccl_beside(package: str) -> bool:
    """Whether the library lies where wheels (nvidia-nccl-cuNN), ROCm's wheels and conda put it."""
    site = os.path.dirname(package)
    folders = (
        os.path.join(site, "nvidia", "nccl", "lib"),
        os.path.join(package, "lib"),
        os.path.join(site, "..", ".."),
    )
    return any(name.startswith(("libnccl.so", "librccl.so")) for folder in folders for name in names("/", folder))


def _nccl_inside(package: str) -> bool:
    """Whether torch's own library has the NCCL back end, as where NCCL is linked in or belongs to the system."""
    import mmap

    for name in ("libtorch_cuda.so", "libtorch_hip.so"):
        try:
            with (
                open(os.path.join(package, "lib", name), "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
            ):
                if library.find(b"ProcessGroupNCCL") >= 0:
                    return True
        except (OSError, ValueError):  # ValueError: it is empty
            continue
    return False


def _site_folders(python: str) -> Iterator[str]:
    """Where this interpreter looks for packages, by the rules of the site module (and Debian's of dist-packages)."""
    for folder in (os.path.dirname(python), os.path.dirname(os.path.dirname(python))):
        settings = read("/", f"{folder}/pyvenv.cfg")
        if settings is not None:
            yield from _of_venv(folder, settings)
            return
    seen = set()
    while python not in seen:
        seen.add(python)
        prefix = os.path.dirname(os.path.dirname(python))
        folders = list(_of_prefix(prefix, os.path.realpath(python)))
        if folders:
            yield from folders
            return
        if os.path.islink(python):
            python = os.path.join(os.path.dirname(python), os.readlink(python))


def _of_venv(prefix: str, settings: str) -> Iterator[str]:
    assigned = dict(re.findall(r"^\s*([\w-]+)\s*=\s*(.*?)\s*$", settings, re.MULTILINE))
    # uv writes version_info
    number = re.match(r"3\.\d+", assigned.get("version") or assigned.get("version_info", ""))
    for lib in ("lib", "lib64"):
        found = [f"python{number[0]}"] if number else names("/", f"{prefix}/{lib}")
        yield from (os.path.join(prefix, lib, name, "site-packages") for name in found if name.startswith("python3"))
    if number and assigned.get("include-system-site-packages", "").lower() == "true" and "home" in assigned:
        yield from _site_folders(os.path.join(assigned["home"], f"python{number[0]}"))


def _of_prefix(prefix: str, real_python: str) -> Iterator[str]:
    number = re.search(r"python(3\.\d+)$", real_python)
    for lib in ("lib", "lib64"):
        for name in [f"python{number[1]}"] if number else names("/", f"{prefix}/{lib}"):
            # Python itself finds its prefix by os.py
            if name.startswith("python3.") and os.path.exists(os.path.join(prefix, lib, name, "os.py")):
                yield os.path.join(prefix, lib, name, "site-packages")
                yield os.path.join(prefix, "local", lib, name, "dist-packages")
                yield os.path.join(prefix, lib, "python3", "dist-packages")
