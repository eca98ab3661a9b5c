"""Acts in a worker on what its program imports: sets torch's defaults when it imports torch, and measures slow imports.

The script's own choice wins. A device becomes the current one when torch first uses its kind, and no earlier: our
call waits in the queue that torch runs when it starts CUDA. Calls of the script that start CUDA, such as
`torch.cuda.set_device`, `with torch.cuda.device(...)` or a seed, take effect after ours. If the script has changed which devices
are visible, indices mean other devices, and nothing is done.
"""

import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

    Execute = Callable[[ModuleType], None]

# the variables that say which devices torch sees
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
WORTH_NAMING = 0.5  # seconds
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def pin_device(device: str) -> None:
    """Make `device`, such as "cuda:2", the current device when torch first uses a device of that kind."""
    kind, _, number = device.partition(":")
    index = int(number)
    visibility = [os.environ.get(name) for name in VISIBILITY]

    def make_current() -> None:
        """Make `device` the current one, unless the program has changed which are visible. torch calls this as it starts CUDA."""
        module = sys.modules[f"torch.{kind}"]
        try:
            # the program may have changed which devices are visible, so that the index means another one
            is_unchanged = [os.environ.get(name) for name in VISIBILITY] == visibility
            if is_unchanged and index < module.device_count():
                module.set_device(index)
        except Exception:  # noqa: BLE001, S110 - torch would report it as a failure of CUDA
            pass

    def queue(module: "Any") -> None:
        module._lazy_call(make_current)

    when_imported(f"torch.{kind}", queue)


def set_sharing_strategy(strategy: str) -> None:
    """Make `strategy` the way in which torch.multiprocessing shares CPU tensors, unless the program names another."""

    def choose(module: "Any") -> None:
        module.set_sharing_strategy(strategy)

    when_imported("torch.multiprocessing", choose)


def when_imported(name: str, then: "Callable[[ModuleType], None]") -> None:
    """Call `then` with the module of this name once the program has imported it; errors of `then` are dropped."""

    def safely(module: "ModuleType") -> None:
        try:
            then(module)
        except Exception:  # noqa: BLE001, S110 - a version that we do not know: the program does without it
            pass

    if name in sys.modules:  # a .pth file or sitecustomize imported it
        safely(sys.modules[name])
    else:
        _awaiting().after.setdefault(name, []).append(safely)


def when_importing(name: str, then: "Callable[[], None]") -> None:
    """Call `then` once the program begins to import that module."""
    if name not in sys.modules:
        _awaiting().before.setdefault(name, []).append(then)


class Watching:
    """A finder that leaves the search to all others, and has `execute` called where a module that it `watches` is executed.

    Others do the same: profilers, tracers, another one of ours. So it keeps its place, since the finder behind one that takes
    itself away is left out of the import that is under way; and it acts when a module is executed, since programs look for
    modules that they never import.
    """

    def __init__(self) -> None:
        self._searching: set[tuple[int, str]] = set()  # thread and name of each search that goes on below `find_spec`

    def watches(self, name: str) -> bool:
        """Return whether a module of this name is to be looked for."""
        raise NotImplementedError

    def watches_found(self, spec: "Any") -> bool:
        """Return whether the module that was found is watched."""
        return True

    def execute(self, execute: "Execute", module: "ModuleType") -> None:
        """Execute a module, by a call of `execute`."""
        raise NotImplementedError

    def find_spec(self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None) -> "Any":
        """Return the spec that the other finders find, with a loader in front of its own; None if they find none.

        Python's import calls this, and so does `search_with_all_finders`: then this returns None, so that only the others search.
        """
        this_search = _thread.get_ident(), name
        if this_search in self._searching or not self.watches(name):
            return None
        self._searching.add(this_search)
        try:
            spec = search_with_all_finders(name, path, target)
        finally:
            self._searching.discard(this_search)
        is_executed = spec is not None and hasattr(spec.loader, "exec_module")  # a folder without `__init__.py` is not
        if is_executed and self.watches_found(spec):
            spec.loader = Loader(spec.loader, self)
        return spec


class Loader:
    """A loader that stands in front of another until the module is executed, and is the other in all else."""

    def __init__(self, loader: "Any", watching: Watching) -> None:
        """Have `watching` execute modules with the function of `loader`."""
        self._loader = loader
        self._watching = watching

    @property  # type: ignore[misc]  # the attribute of any object may be set
    def __class__(self) -> "Any":
        """The class of the other: finders ask of which kind a loader is."""
        return self._loader.__class__

    def __getattr__(self, name: str) -> "Any":
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute a module, which finds its own loader in `__loader__` and in its spec."""
        spec: Any = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is self:  # else another stands in front of us
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        self._watching.execute(self._loader.exec_module, module)


def search_with_all_finders(name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "Any":
    """Return the spec that the finders of the interpreter find for a module; None if they find none."""
    for finder in [*sys.meta_path]:
        spec = getattr(finder, "find_spec", lambda *_: None)(name, path, target)
        if spec is not None:
            return spec
    return None


class Awaiting(Watching):
    """Calls functions before a module is executed for the first time, and with the module once that has succeeded."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, list[Callable[[], None]]] = {}  # by the name of the module
        self.after: dict[str, list[Callable[[ModuleType], None]]] = {}

    def watches(self, name: str) -> bool:
        """Return whether the module is awaited still."""
        return name in self.before or name in self.after

    def execute(self, execute: "Execute", module: "ModuleType") -> None:
        """Execute a module between the calls for it."""
        for call in self.before.pop(module.__name__, ()):
            call()
        execute(module)
        for then in self.after.pop(module.__name__, ()):
            then(module)


AWAITING = Awaiting()


def _awaiting() -> Awaiting:
    """Return the finder, in front of all that are there when it is first wanted."""
    if AWAITING not in sys.meta_path:
        sys.meta_path.insert(0, AWAITING)
    return AWAITING


def measure(path: str) -> None:
    """Write a line to the file at `path` for each import of an installed module that takes long: its name and the seconds."""
    sys.meta_path.insert(0, Timing(path))


class Timing(Watching):
    """Times how long installed modules are executed; imports within imports count as one."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._is_busy = False  # a module is being executed

    def watches(self, name: str) -> bool:
        """Return whether no module is being executed."""
        return not self._is_busy

    def watches_found(self, spec: "Any") -> bool:
        """Return whether the module is an installed one."""
        return any(part in (spec.origin or "") for part in INSTALLED)

    def execute(self, execute: "Execute", module: "ModuleType") -> None:
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
