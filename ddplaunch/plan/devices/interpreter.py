"""Which interpreter runs the workers where nobody named one, and what the torch of an interpreter was built with.

Reads files alone: imports no torch and starts no interpreter.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.devices.sysfs import names, read
from ddplaunch.spec.job import Given, JobSpec, ProgramKind

# a file in the prefix of an environment that one of these made for a tool (uv 0.4 and later, pipx 0.14 and later)
_RECEIPTS_OF_TOOLS = {"uv-receipt.toml": "uv", "pipx_metadata.json": "pipx"}


def with_chosen_interpreter(
    spec: JobSpec, env: Mapping[str, str], *, own: str = sys.executable, prefix: str = sys.prefix
) -> JobSpec:
    """Return the job with the interpreter of its workers, and as its origin (shown by `ddplaunch plan`) the reason for that.

    `own` is ddplaunch's interpreter, `prefix` its environment. Where ddplaunch's own has torch and is no tool's, nothing changes.

    The order is: --python, PYTHON_EXEC, or a file; else the activated environment, if ddplaunch is installed as a tool
    of uv or pipx, or if ddplaunch's interpreter has no torch while the activated one has; else ddplaunch's interpreter.
    """
    if spec.program.python is not None or spec.program.kind is ProgramKind.COMMAND:
        return spec
    tool = next((tool for name, tool in _RECEIPTS_OF_TOOLS.items() if os.path.exists(os.path.join(prefix, name))), None)
    if tool is None and find_torch(own) is not None:
        return spec
    why_own = ""
    for python, where in _activated(env):
        if os.path.abspath(python) == os.path.abspath(own):
            break
        has_torch = find_torch(python) is not None
        # an activated environment is meant where ddplaunch is a tool of its own environment; any python on PATH is not
        is_meant = tool is not None and where != "PATH"
        if has_torch or is_meant:
            origin = f"{where}, since " + (f"ddplaunch is a tool of {tool}" if tool else f"{own} has no torch")
            return replace(
                spec,
                program=replace(spec.program, python=python),
                origins={**spec.origins, "python": origin},
                given=(*spec.given, Given.chosen("python", python, origin)),
            )
        why_own = why_own or f"ddplaunch's own; neither it nor {python} ({where}) has torch"
    return replace(spec, origins={**spec.origins, "python": why_own}) if why_own and tool is None else spec


def _activated(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the interpreters that the shell has activated, in the order in which they count, and where each was found."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if (prefix := env.get(variable)) and _is_program(python := os.path.join(prefix, "bin", "python")):
            yield python, variable
    for folder in env.get("PATH", "").split(os.pathsep):
        for name in ("python", "python3"):
            if folder and _is_program(python := os.path.join(folder, name)):
                yield os.path.abspath(python), "PATH"
                return


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


# --- its torch


class TorchBuild(Struct, frozen=True, kw_only=True):
    """One installed torch."""

    version: str  # "2.13.0+cu130"
    cuda: str | None  # CUDA's version; None: not a CUDA build
    hip: str | None  # ROCm's HIP version; None: not a ROCm build
    xpu: str | None  # the oneAPI version; None: not a build for Intel GPUs
    nccl: bool  # whether it has NCCL, or RCCL on ROCm


def find_torch(python: str) -> TorchBuild | None:
    """Return the build of the torch that the interpreter at this path would import, None if none is found.

    For another interpreter than ours its own site-packages are looked at, not PYTHONPATH, .pth files or the user's site.
    """
    if _is_ours(python):
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec("torch")  # imports nothing, since torch is a top-level package
        return _torch_build(os.path.dirname(spec.origin)) if spec is not None and spec.origin else None
    builds = (_torch_build(os.path.join(folder, "torch")) for folder in _site_folders(os.path.abspath(python)))
    return next(filter(None, builds), None)


def packages(python: str) -> dict[str, str]:
    """Return the versions of what is installed for the interpreter at this path, by name, as far as its own folders tell."""
    found: dict[str, str] = {}
    for folder in _site_folders(os.path.abspath(python)):
        for name in names("/", folder):
            if installed := re.fullmatch(r"([\w.]+)-([\w.+!]+)\.(?:dist|egg)-info", name):
                found.setdefault(installed[1].replace("_", "-"), installed[2])
    return found


def _is_ours(python: str) -> bool:
    # the link itself, not only what it leads to: a venv's python leads to that of every other venv
    here, there = os.path.abspath(python), os.path.abspath(sys.executable)
    return os.path.dirname(here) == os.path.dirname(there) and os.path.realpath(here) == os.path.realpath(there)


def _torch_build(package: str) -> TorchBuild | None:
    """Return what torch's version.py says about its build, read as text; None if there is no torch."""
    text = read("/", f"{package}/version.py") or ""
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
        nccl=bool(cuda or hip) and (_has_nccl_library(package) or _has_nccl_linked_in(package)),
    )


def _has_nccl_library(package: str) -> bool:
    """Whether the library lies where wheels (nvidia-nccl-cuNN), ROCm's wheels and conda put it."""
    site = os.path.dirname(package)
    folders = (
        os.path.join(site, "nvidia", "nccl", "lib"),
        os.path.join(package, "lib"),
        os.path.join(site, "..", ".."),
    )
    return any(name.startswith(("libnccl.so", "librccl.so")) for folder in folders for name in names("/", folder))


def _has_nccl_linked_in(package: str) -> bool:
    """Whether torch's own library has the NCCL back end, as where NCCL is linked in or belongs to the system."""
    import mmap

    for name in ("libtorch_cuda.so", "libtorch_hip.so"):
        with (
            suppress(OSError, ValueError),  # ValueError: it is empty
            open(os.path.join(package, "lib", name), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
        ):
            if library.find(b"ProcessGroupNCCL") >= 0:
                return True
    return False


def _site_folders(python: str) -> Iterator[str]:
    """Yield where this interpreter looks for packages, by the rules of the site module (and Debian's of dist-packages).

    A pyvenv.cfg beside the interpreter, or above it, makes a virtual environment. Else the packages are below the prefix of the
    interpreter, or, since its path may be a link, below that of the first path on the way which has a standard library.
    """
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
    """Yield the folders of packages of a virtual environment, from its pyvenv.cfg."""
    assigned = dict(re.findall(r"^\s*([\w-]+)\s*=\s*(.*?)\s*$", settings, re.MULTILINE))
    # uv writes version_info
    number = re.match(r"3\.\d+", assigned.get("version") or assigned.get("version_info", ""))
    for lib in ("lib", "lib64"):
        found = [f"python{number[0]}"] if number else names("/", f"{prefix}/{lib}")
        yield from (os.path.join(prefix, lib, name, "site-packages") for name in found if name.startswith("python3"))
    if number and assigned.get("include-system-site-packages", "").lower() == "true" and "home" in assigned:
        yield from _site_folders(os.path.join(assigned["home"], f"python{number[0]}"))


def _of_prefix(prefix: str, real_python: str) -> Iterator[str]:
    """Yield the folders of packages below an installation's prefix, for its interpreter (`real_python`, no link)."""
    number = re.search(r"python(3\.\d+)$", real_python)
    for lib in ("lib", "lib64"):
        for name in [f"python{number[1]}"] if number else names("/", f"{prefix}/{lib}"):
            # Python itself finds its prefix by os.py
            if name.startswith("python3.") and os.path.exists(os.path.join(prefix, lib, name, "os.py")):
                yield os.path.join(prefix, lib, name, "site-packages")
                yield os.path.join(prefix, "local", lib, name, "dist-packages")
                yield os.path.join(prefix, lib, "python3", "dist-packages")
