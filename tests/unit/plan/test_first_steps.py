"""Whether a script imports torch before it does anything that torch could notice, as its text says."""

from __future__ import annotations

import pytest

from ddplaunch.plan.start_method import imports_torch_first

TRAINS = """#!/usr/bin/env python
'''Trains.'''
from __future__ import annotations
import argparse, os
from pathlib import Path

import numpy as np
try:
    import tqdm
except ImportError:
    tqdm = None
if os.environ.get is None or "TORCHELASTIC_RUN_ID" not in os.environ:
    RATE = None
import torch.nn as nn
os.environ["OMP_NUM_THREADS"] = "3"
"""


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "from torch.nn import Linear",
        "import os, torch",
        "LIMIT = 3 * 4\nLEVELS = [1, -2, {'a': os.sep}]\nimport torch",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "import torch\nimport anything\nanything.at_all()",
        "x = '\\d'\nimport torch",
        "if a:\n    import torch\nelse:\n    from torch import nn\nanything()",
        "if TYPE_CHECKING:\n    from torch import Tensor\nimport torch",
        "if DISTRIBUTED:\n    import torch.distributed\nelse:\n    import torch",
    ],
)
def test_torch_comes_first(text: str) -> None:
    assert imports_torch_first(text.encode())


@pytest.mark.parametrize(
    "before",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'",
        "import os\nos.environ.setdefault('MKL_NUM_THREADS', '1')",
        "import os\nfor name in ('A', 'B'): os.environ[name] = '1'",
        "from os import environ\nenviron |= {'A': '1'}",
        "import os\nA = os.putenv('A', '1')",
        "import os\nif os.environ.setdefault('A', '1'): pass",
        "import sys\nsys.path.insert(0, 'vendored')",
        "import sys\nsys.path += ['vendored']",
        "import sys\nsys.path = []",
        "import warnings\nwarnings.filterwarnings('ignore')",
        "import logging\nlogging.basicConfig()",
        "import signal\nsignal.signal(15, print)",
        "import atexit\natexit.register(print)",
        "import multiprocessing\nmultiprocessing.set_start_method('spawn')",
        "import threading\nthreading.Thread(target=print).start()",
        "import builtins\nbuiltins.__import__ = print",
        "import time\nbegan = time.perf_counter()",
        "import unsloth",
        "from . import settings",
        "import os\ntry:\n    os.environ['A'] = '1'\nfinally:\n    pass",
        "def settings(): pass",
        "class Settings: pass",
        "with open('a'): pass",
        "import os\nif TYPE_CHECKING:\n    import torch\nos.environ['A'] = '1'",
        "import os\nif DISTRIBUTED:\n    import torch\nelse:\n    os.environ['A'] = '1'",
        "a = lambda: 1",
        "a, b = 1, 2",
        "(a := 1)",
        "@print\ndef f(): pass",
        "if TYPE_CHECKING:\n    import torch\nprint()",
        "try:\n    import tqdm\nexcept ImportError:\n    import torch\nprint()",
    ],
)
def test_something_else_comes_first(before: str) -> None:
    assert not imports_torch_first(f"{before}\nimport torch\n".encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print('torch')",
        "# import torch",
        "def main():\n    import torch\nmain()",
        "if TYPE_CHECKING:\n    import torch",
        "import torch\nos.environ['TORCHDYNAMO_DISABLE'] = '1'",
        "import torch\nsys.modules['triton'] = None",
        "import torch\nx = (",
        "import torch\nx = " + "(" * 5000 + ")" * 5000,
        "import torch\nx = " + "-" * 200_000 + "1",
        "x = a" + ".b" * 2000 + "\nimport torch",
        "import torch\0",
    ],
)
def test_it_is_not_certain(text: str) -> None:
    assert not imports_torch_first(text.encode())


def test_bytes_that_are_no_text_are_no_script() -> None:
    assert not imports_torch_first(b"import torch\nname = '\xff\xfe'")


def test_what_a_training_script_does_first_is_harmless() -> None:
    assert imports_torch_first(TRAINS.encode())


def test_nothing_is_printed_or_run(capsys: pytest.CaptureFixture[str]) -> None:
    imports_torch_first(b"import torch\nprint('runs')\nx = '\\d' is 'a'")
    assert capsys.readouterr() == ("", "")
