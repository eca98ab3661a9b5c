"""Acts on what the program imports: sets torch's defaults when it imports torch, and measures slow imports. Imports no torch.

The script's own choice wins. A device becomes the current one when torch first uses its kind, and no earlier: our
call waits in the queue that torch runs when it starts CUDA. Calls of the script that start CUDA, such as
`torch.cuda.set_device`, `with torch.cuda.device(...)` or a seed, take effect after ours. If the script has changed which devices
are visible, indices mean other devices, and nothing is done.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

    Execute = Callable[[ModuleType], None]

VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
WORTH_NAMING = 0.5  # seconds
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def pin(device: str) -> None:
    """Make `device`, such as "cuda:2", the current device when torch first uses a device of that kind."""
    kind, _, number = device.partition(":")
    index = int(number)
    visible = [os.environ.get(name) for name in VISIBILITY]

    def choose() -> None:
        module = sys.modules[f"torch.{kind}"]
        try:
            if [os.environ.get(name) for name in VISIBILITY] == visible and index < module.device_count():
                module.set_device(index)
        except Exception:  # noqa: BLE001, S110 - torch would report it as a failure of CUDA
            pass

    def queue(module: "Any") -> None:
        module._lazy_call(choose)

    when_imported(f"torch.{kind}", queue)


def share(strategy: str) -> None:
    """Make `strategy` the way in which torch.multiprocessing shares CPU tensors, unless the program names another."""

    def choose(module: "Any") -> None:
        module.set_sharing_strategy(strategy)

    when_imported("torch.multiprocessing", choose)


def when_imported(name: str, then: "Callable[[ModuleType], None]") -> None:
    """Call `then` with the module once the program has imported it; where `then` fails, the module is not one that we know."""

    def safely(module: "ModuleType") -> None:
        try:
            then(module)
        except Exception:  # noqa: BLE001, S110 - the program does without it
            pass

    if name in sys.modules:  # a .pth file or sitecustomize imported it
        safely(sys.modules[name])
    else:
        sys.meta_path.insert(0, Awaited(name, after=safely))


def when_importing(name: str, then: "Callable[[], None]") -> None:
    """Call `then` once the program begins to import that module."""
    if name not in sys.modules:
        sys.meta_path.insert(0, Awaited(name, before=then))


class Awaited:
    """A finder that waits for one module and removes itself: it calls `before` then, and `after` with the imported module."""

    def __init__(
        self,
        name: str,
        before: "Callable[[], None] | None" = None,
        after: "Callable[[ModuleType], None] | None" = None,
    ) -> None:
        self.name = name
        self.before = before
        self.after = after

    def find_spec(self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None) -> "Any":
        """Find the awaited module, and have its loader call `after` with the module; without `after`, let others search."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        if self.before is not None:
            self.before()
        after = self.after
        if after is None:
            return None

        def execute_then(execute: "Execute", module: "ModuleType") -> None:
            execute(module)
            after(module)

        spec = search(name, path, target)
        if spec is not None:
            execute_by(spec.loader, execute_then)
        return spec


def search(name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "Any":
    """Return the spec that the finders of the interpreter find for a module; None if they find none."""
    for finder in sys.meta_path:
        spec = getattr(finder, "find_spec", lambda *_: None)(name, path, target)
        if spec is not None:
            return spec
    return None


def execute_by(loader: "Any", call: "Callable[[Execute, ModuleType], None]") -> None:
    """Have `call` execute the next module of this loader, with the loader's own function; a loader with slots stays as it is."""
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        del loader.exec_module
        call(execute, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:
        pass


def measure(path: str) -> None:
    """Write a line to the file at `path` for each import of an installed module that takes long: its name and the seconds."""
    sys.meta_path.insert(0, Timed(path))


class Timed:
    """A finder that leaves the search to the others, and times their loaders; imports within imports count as one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_busy = False  # it searches, or a module is being executed

    def find_spec(self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None) -> "Any":
        """Return what the other finders find."""
        if self._is_busy:
            return None
        self._is_busy = True
        try:
            spec = search(name, path, target)
        finally:
            self._is_busy = False
        if spec is not None and any(part in (spec.origin or "") for part in INSTALLED):
            execute_by(spec.loader, self._execute)
        return spec

    def _execute(self, execute: "Execute", module: "ModuleType") -> None:
        """Execute a module, and note how long that took if that is worth naming; nested imports count for the outermost."""
        import time

        if self._is_busy:
            execute(module)
            return
        self._is_busy, began = True, time.monotonic()
        try:
            execute(module)
        finally:
            self._is_busy = False
            seconds = time.monotonic() - began
            if seconds >= WORTH_NAMING:
                try:
                    with open(self._path, "a", encoding="utf-8") as file:
                        file.write(f"{module.__name__} {seconds:.1f}\n")
                except OSError:  # no room, or removed
                    pass
