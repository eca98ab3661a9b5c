"""Run an example through the real command, or with plain python, or take its functions."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import zipfile
from array import array
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import LIGHT_TORCH, Job, Result

EXAMPLES = Path(__file__).parents[2] / "examples"
LIGHT = {"PYTHONPATH": LIGHT_TORCH}  # two thirds of what an example computes is else imports
QUICK = {**LIGHT, "DDPLAUNCH_START_METHOD": "forkserver"}  # and torch is imported once for all workers of a node
LONG = 180.0  # seconds; four imports of torch and scikit-learn on two busy cores

TENSORS = 4  # of the model of train_ddp.py: of two linear layers, each with its bias

# of a worker that raised: torch 2.13 sometimes aborts as it ends with a group that is still alive, whatever has launched it
AFTER_EXCEPTION = (1, 128 + signal.SIGABRT)

needs_torch_and_digits = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "sklearn")), reason="needs torch and scikit-learn"
)


def launched(job: Job, *words: object) -> Result:
    """Run the command to its end, and prove that nothing of it is left."""
    result = job.run(*words, env=QUICK, timeout=LONG)
    job.nothing_left()
    # torch 2.9 prints how gloo has connected
    result.out = re.sub(r"^.*\[Gloo\] Rank .*\n", "", result.out, flags=re.MULTILINE)
    return result


def plain(name: str, home: Path, *words: object) -> str:
    """What an example prints as one process of plain python that ends well and says nothing on stderr."""
    argv = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    env = {**Job(home).env, **LIGHT, "OMP_NUM_THREADS": "1"}  # so small a step is no faster with more
    one = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert (one.returncode, one.stderr) == (0, "")
    return one.stdout


def weights(checkpoint: Path, tensors: int = TENSORS, type_: str = "f") -> list[array[float]]:
    """Those of the model, which is the first thing in a file of torch.save; torch takes seconds to import."""
    with zipfile.ZipFile(checkpoint) as file:
        (root,) = {name.partition("/")[0] for name in file.namelist()}
        return [array(type_, file.read(f"{root}/data/{number}")) for number in range(tensors)]


def newest(folder: Path) -> Path:
    """The checkpoint of the greatest term and step in a folder, in which no file is unfinished."""
    assert not list(folder.glob("*.tmp"))
    return max(folder.iterdir(), key=lambda path: [int(number) for number in path.stem.split("-")[1:]])


def refused(name: str, home: Path, *words: object, term: int) -> str:
    """What an example prints on stderr as one process that is started in this term and ends by itself."""
    argv = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    env = {**Job(home).env, **LIGHT, "DDPLAUNCH_TERM": str(term)}
    one = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert (one.returncode, one.stdout) == (1, "")
    return one.stderr


def module(name: str) -> ModuleType:
    """An example as a module, to call its functions."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
