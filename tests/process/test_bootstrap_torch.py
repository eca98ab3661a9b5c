"""What torch starts with in a worker, unless the program chooses itself: its own device, the way to share tensors."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "ddplaunch" / "worker" / "bootstrap.py"
PROGRAMS = ROOT / "tests" / "programs" / "bootstrap"
PYTHON = os.environ.get("DDP_TEST_PYTHON", sys.executable)  # the worker's interpreter; it may be older than ours


def run(script: Path, *args: str, device: str = "cuda:2", **env: str) -> list[str]:
    """The lines that a program printed as a worker that owns `device`; it succeeded."""
    kept = {
        name: value for name, value in os.environ.items() if not name.endswith(("VISIBLE_DEVICES", "AFFINITY_MASK"))
    }
    result = subprocess.run(
        [PYTHON, str(BOOTSTRAP), "script", str(script), *args],
        env={**kept, "DDPLAUNCH_PIN_DEVICE": device, **env},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return result.stdout.splitlines()


@pytest.mark.skipif(
    "DDP_TEST_PYTHON" in os.environ or importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
def test_torch_starts_on_the_workers_own_device() -> None:
    ways = {
        "uses none": "[]: 0",
        "uses it": "['init', 'set 2']: 2",
        "chooses": "['init', 'set 2', 'set 1']: 1",
        "chooses the first": "['init', 'set 2', 'set 0']: 0",
        "chooses for a while": "['init', 'set 2', 'set 1', 'set 2']: 2",
        "seeds first": "['init', 'set 2', 'seed 2']: 2",
        "narrows": "['init']: 0",
        "has fewer": "['init']: 0",
        "forks first": "['init', 'set 2']: 2",
    }
    lines = run(PROGRAMS / "pins.py", *ways)  # all in one process: the import of torch is slow
    assert lines == [*(f"{way}: {done}" for way, done in ways.items()), lines[-2]]


class Torch:
    """A package named torch that has as much of torch as the bootstrap knows of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("torch/__init__.py", "from . import cuda, xpu")
        for kind in ("cuda", "xpu"):
            self.write(
                f"torch/{kind}/__init__.py",
                """
                queued, chosen = [], []
                _lazy_call = queued.append
                set_device = chosen.append
                device_count = lambda: 4
                def init():
                    for call in queued: call()
                """,
            )

    def write(self, name: str, source: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return path

    def run(self, source: str, device: str = "cuda:2", **env: str) -> list[str]:
        return run(self.write("prog.py", source), device=device, PYTHONDONTWRITEBYTECODE="1", **env)


@pytest.fixture
def torch(tmp_path: Path) -> Torch:
    return Torch(tmp_path)


BOTH = "\nimport torch\ntorch.cuda.init(); torch.xpu.init()\nprint(torch.cuda.chosen, torch.xpu.chosen)\n"


def test_the_kind_of_the_device_decides_which_part_of_torch_is_told(torch: Torch) -> None:
    assert torch.run(BOTH, device="cuda:2") == ["[2] []"]
    assert torch.run(BOTH, device="xpu:1") == ["[] [1]"]


def test_a_torch_that_was_imported_before_the_program_is_told(torch: Torch) -> None:
    torch.write("site/sitecustomize.py", "import torch")
    assert torch.run(BOTH, PYTHONPATH=f"{torch.folder / 'site'}:{torch.folder}") == ["[2] []"]


def test_a_visible_set_that_was_given_from_outside_is_no_choice_of_the_program(torch: Torch) -> None:
    assert torch.run(BOTH, CUDA_VISIBLE_DEVICES="4,5,6,7") == ["[2] []"]


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]
)
def test_a_program_that_changes_what_is_visible_chooses_itself(name: str, torch: Torch) -> None:
    assert torch.run(f"import os\nos.environ['{name}'] = '0,1,2'" + BOTH) == ["[] []"]
    assert torch.run(f"import os\ndel os.environ['{name}']" + BOTH, **{name: "0,1,2"}) == ["[] []"]


@pytest.mark.parametrize(
    "damage",
    [
        "del _lazy_call",
        "def set_device(index): raise RuntimeError('invalid device ordinal')",
        "def device_count(): raise RuntimeError('no driver')",
        "del device_count",
    ],
)
def test_a_torch_that_is_not_as_expected_is_left_alone(damage: str, torch: Torch) -> None:
    with (torch.folder / "torch" / "cuda" / "__init__.py").open("a") as file:
        file.write(f"{damage}\n")
    assert torch.run(BOTH) == ["[] []"]


def test_a_loader_that_takes_no_attributes_is_as_good_as_any(torch: Torch) -> None:
    finder = """
        import importlib.machinery, sys
        class Loader(importlib.machinery.SourceFileLoader):
            def __setattr__(self, name, value):
                if name == "exec_module": raise AttributeError(name)
                super().__setattr__(name, value)
        class Finder:
            def find_module(self, name, path=None): return None
        class Slotted:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "torch.cuda":
                    file = path[0] + "/cuda/__init__.py"
                    return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))
        import importlib.util
        sys.meta_path[:0] = [Slotted]
        """
    torch.write("site/sitecustomize.py", finder)
    assert torch.run(BOTH, PYTHONPATH=f"{torch.folder / 'site'}:{torch.folder}") == ["[2] []"]


def test_a_program_without_torch_sees_no_error_of_ours(torch: Torch) -> None:
    source = """
        try:
            import torch.cuda.no_such_part
        except ImportError as error:
            print(error)
        import sys
        sys.modules.pop("torch.cuda")
        print(type(__import__("torch.cuda").cuda).__name__)
        """
    assert torch.run(source) == ["No module named 'torch.cuda.no_such_part'", "module"]
    (torch.folder / "torch" / "cuda" / "__init__.py").write_text("1 / 0")
    assert torch.run("try: import torch\nexcept ZeroDivisionError: print('theirs')") == ["theirs"]


def test_nothing_of_it_stays_once_torch_is_imported_but_what_waits_for_a_trainer(torch: Torch) -> None:
    source = """
        import os, sys, torch
        print([[*finder.after] for finder in sys.meta_path if type(finder).__module__ == "imports"])
        print(sorted(vars(torch.cuda.__loader__)), torch.cuda.__spec__.loader is torch.cuda.__loader__)
        print(os.environ.get("DDPLAUNCH_PIN_DEVICE"))
        print(os.popen('echo "${DDPLAUNCH_PIN_DEVICE-unset}"').read().strip())
        """
    assert torch.run(source) == ["[['transformers.trainer']]", "['name', 'path'] True", "None", "unset"]


SHARING = """
    import torch.multiprocessing
    print(torch.multiprocessing.asked)
    """


def sharing(torch: Torch, source: str) -> list[str]:
    """What a program prints whose worker was told to share by names."""
    torch.write("torch/multiprocessing.py", "asked = []; set_sharing_strategy = asked.append")
    return torch.run(dedent(source), device="", DDPLAUNCH_SHARING_STRATEGY="file_system")


def test_the_way_to_share_tensors_is_set_when_torch_is_imported(torch: Torch) -> None:
    assert sharing(torch, SHARING) == ["['file_system']"]


def test_a_program_that_chooses_how_to_share_chooses_last(torch: Torch) -> None:
    own = "import torch.multiprocessing as mp; mp.set_sharing_strategy('file_descriptor')"
    assert sharing(torch, own + dedent(SHARING)) == ["['file_system', 'file_descriptor']"]


def test_a_torch_that_cannot_share_is_left_alone(torch: Torch) -> None:
    torch.write("torch/multiprocessing.py", "def set_sharing_strategy(name): raise AssertionError(name)")
    source = "import torch.multiprocessing; print('goes on')"
    assert torch.run(source, device="", DDPLAUNCH_SHARING_STRATEGY="file_system") == ["goes on"]
