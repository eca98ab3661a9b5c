"""The interpreter of the workers, its torch, and the packages around that: what they say of each other's versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from ddplaunch.system.process.command import Ended, run
from ddplaunch.system.words import why_failed
from ddplaunch.tools.doctor import Check, Finding, Subject, Verdict, broken, note

_TIMEOUT = 5.0  # seconds
_OLDEST_TORCH = (2, 4)  # with which the tests run
_WRAPPERS = (
    "lightning", "pytorch-lightning", "accelerate", "transformers", "deepspeed", "torchvision", "torchaudio", "triton",
    "fairscale", "horovod", "megatron-core", "xformers", "flash-attn", "bitsandbytes", "torchtune", "peft", "numpy", "ddplaunch",
)  # fmt: skip
# reads metadata alone: to import torch takes seconds. An interpreter of the workers may be as old as 3.8
_PROGRAM = """
import json, platform, sys
from importlib import metadata
found = {}
for one in metadata.distributions():
    name = (one.metadata["Name"] or "").lower().replace("_", "-")
    if name in NAMES or name.startswith("nvidia-nccl-"):
        needs = [text for text in one.requires or () if text.lower().startswith("torch")]
        found.setdefault(name, {"version": one.version or "", "path": str(one.locate_file("")), "needs": needs})
print(json.dumps({"version": platform.python_version(), "prefix": sys.prefix, "packages": found}))
"""


class Package(Struct, frozen=True, kw_only=True):
    """An installed distribution."""

    version: str
    path: str  # the folder that holds it
    needs: tuple[str, ...] = ()  # its requirements that begin with "torch"


class Interpreter(Struct, frozen=True, kw_only=True):
    """What an interpreter says of itself."""

    version: str
    prefix: str
    packages: Mapping[str, Package]


class Inspection(Struct, frozen=True, kw_only=True):
    """The interpreter of the workers, or why it does not answer."""

    path: str
    found: Interpreter | None = None  # None: `problem` says why
    problem: str = ""
    is_late: bool = False  # it has not answered in time


def read(subject: Subject) -> Inspection:
    """Run the interpreter as a worker does: with the same variables."""
    program = _PROGRAM.replace("NAMES", repr({"torch", *_WRAPPERS}))
    try:
        ended = run([subject.python, "-c", program], subject.env, _TIMEOUT)
    except OSError as error:
        return Inspection(path=subject.python, problem=why_failed(error))
    return parse(subject.python, ended)


def parse(path: str, ended: Ended) -> Inspection:
    """Read what the interpreter has printed, or else why it has printed nothing of the kind."""
    if ended.status == 0:
        try:
            # a sitecustomize may print lines of its own
            return Inspection(
                path=path, found=msgspec.json.decode(ended.out.strip().rpartition("\n")[2], type=Interpreter)
            )
        except (msgspec.MsgspecError, RecursionError):
            return Inspection(path=path, problem="it prints something else than it was asked for")
    last = ended.err.strip().rpartition("\n")[2]
    is_late = ended.status is None
    how = f"no answer in {_TIMEOUT:g} s" if is_late else f"exit status {ended.status}"
    return Inspection(path=path, problem=f"{how}: {last}" if last else how, is_late=is_late)


def judge(inspection: Inspection) -> Verdict:
    """Judge the interpreter, its torch, and the packages that need a certain torch."""
    if inspection.found is None:
        finding = Finding(
            severity="slow" if inspection.is_late else "broken",
            title=f"the interpreter of the workers {'is slow to start' if inspection.is_late else 'does not run'}",
            evidence=f"{inspection.path}: {inspection.problem}",
            hint=f"`{inspection.path} -c 'import sys'` shows the same\n`--python` names another",
        )
        return Verdict(inspection.problem, (finding,))
    python = inspection.found
    torch = python.packages.get("torch")
    shown = [f"{name} {package.version}" for name, package in sorted(python.packages.items()) if name != "torch"]
    facts = f"Python {python.version}, torch {torch.version if torch else 'not found'}{', '.join(['', *shown])}"
    if torch is None:
        finding = broken(
            "the interpreter of the workers has no torch",
            f"{inspection.path} (Python {python.version})",
            f"`{inspection.path} -m pip install torch`, or name another: `ddplaunch --python ENV/bin/python train.py`",
        )
        return Verdict(facts, (finding,))
    return Verdict(facts, (*_torch_findings(python, torch), *_wrapper_findings(python, torch)))


def _torch_findings(python: Interpreter, torch: Package) -> Iterator[Finding]:
    """Yield that torch is old, or no part of the environment."""
    if release(torch.version)[:2] < _OLDEST_TORCH:
        yield note(
            f"torch {torch.version} is older than any that ddplaunch is tested with", hint="`pip install 'torch>=2.4'`"
        )
    if not f"{torch.path}/".startswith(f"{python.prefix.rstrip('/')}/"):
        yield note(
            "torch comes from outside of the interpreter's environment",
            f"{torch.path}, while the environment is {python.prefix}: by PYTHONPATH, or as a package of your user",
            "`unset PYTHONPATH`, or `export PYTHONNOUSERSITE=1`, if the torch of the environment is meant",
        )


def _wrapper_findings(python: Interpreter, torch: Package) -> Iterator[Finding]:
    """Yield which packages on top of torch require another version of it."""
    for name, package in sorted(python.packages.items()):
        for need in package.needs:
            # a requirement with a marker (";") is left out: most hold for an extra that may not be installed
            matched = re.fullmatch(r"torch\s*\(?([^;()]*)\)?\s*", need, re.IGNORECASE)
            if matched and not satisfies(torch.version, matched[1]):
                yield note(
                    f"{name} {package.version} is made for another torch than {torch.version}",
                    f"it requires torch{matched[1].strip()}\nscripts that import it may fail",
                    f"`pip install --upgrade {name}`, or `pip install 'torch{matched[1].strip()}'`",
                )


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: "2.13.0+cpu" gives 2, 13, 0; () if it begins with none."""
    matched = re.match(r"\d{1,9}(?:\.\d{1,9})*", version.strip())
    return tuple(map(int, matched[0].split("."))) if matched else ()


def satisfies(version: str, specifiers: str) -> bool:
    """Return whether a version fits specifiers as ">=2.1,<4"; a part that is not understood fits."""
    has = release(version)
    for part in specifiers.split(","):
        matched = re.fullmatch(r"\s*(>=|<=|==|!=|~=|<|>)\s*([\d.]+?)(\.\*)?(?:\+\w+)?\s*", part)
        if matched is None:
            continue
        operator, wanted, wildcard = matched[1], release(matched[2]), matched[3]
        length = len(wanted) if wildcard else max(len(has), len(wanted))  # "==2.*" compares one number
        left, right = _padded(has, length), _padded(wanted, length)
        fits = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
            "~=": left >= right and left[: len(wanted) - 1] == wanted[:-1],
        }
        if not fits[operator]:
            return False
    return True


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*numbers, *(0,) * length)[:length]


CHECKS = (Check(id="python", examine=lambda subject: judge(read(subject)), within=6.0),)
