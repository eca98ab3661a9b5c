"""Pickles a function and its arguments for workers, with what a worker needs to import them. Opens no socket, starts no process.

The pickler is multiprocessing's own, with all that libraries registered with it: tensors on the CPU travel as descriptors of
shared memory, tensors on a GPU as handles, locks and queues by name. Descriptors are collected, to be sent beside the pickle.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from msgspec import Struct

from ddplaunch.spec.program import working_directory
from ddplaunch.system.fields import line

_NAME_OF_MAIN = b"__main__"  # the name in a pickle that needs that module
_MAX_SOURCES = 4 << 20  # characters
_NOT_FILES = ("<stdin>", "<string>")  # the names of code from stdin and of `python -c`
_HINT_TO_MOVE = "put it into a module that workers can import"


def name_of(function: Callable[..., Any]) -> str:
    """Return what people are to see of a function: "train.py:main"; its name alone where its code is in no file."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    file = os.path.basename(code.co_filename) if code is not None else ""
    # it becomes an argument of a command, and code may give any name to a function
    return line(name if not file.endswith(".py") else f"{file}:{name}")


class CannotSend(Exception):
    """An object cannot be sent to the workers; the text says which, why, and what to do."""


class Payload(Struct, frozen=True, kw_only=True):
    """A pickled call for one worker. Its holder closes the descriptors."""

    preparation: dict[str, Any]  # for multiprocessing.spawn.prepare
    pickle: bytes
    descriptors: tuple[int, ...]


class Function:
    """A function and its arguments, pickled again for each worker: shared memory counts its readers."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Pickle the call for the first worker, before any process is started.

        Raises:
            CannotSend: the function or an argument cannot be pickled.
        """
        self._call = (function, tuple(args), dict(kwargs))
        self._main_import = imported_by(sys.modules["__main__"])  # {} if workers cannot import the caller's main module
        self._by_value = False
        self._first: Payload | None = self._pickle_first()

    def payload(self) -> Payload:
        """Pickle the call for one more worker.

        Raises:
            CannotSend: an argument can no longer be pickled.
        """
        first, self._first = self._first, None
        return first or self._pickle(by_value=self._by_value)

    def close(self) -> None:
        """Close the descriptors of a payload that was not used."""
        if self._first is not None:
            close(self._first.descriptors)

    def _pickle_first(self) -> Payload:
        """Pickle the call by reference, or by value, with cloudpickle, if workers could not import what it names.

        What is typed into an interpreter is in no file from which they could import it.
        """
        try:
            payload = self._pickle(by_value=False)
        except CannotSend:
            if not _has_cloudpickle():
                raise
        else:
            needs_main = _NAME_OF_MAIN in payload.pickle
            workers_import_main = bool(self._main_import) and not is_interactive()
            if not needs_main or workers_import_main:
                return payload
            close(payload.descriptors)
            if not _has_cloudpickle():
                name = getattr(self._call[0], "__qualname__", repr(self._call[0]))
                raise CannotSend(
                    f"{name} and its arguments use definitions of this session, which workers cannot import; "
                    f"`pip install cloudpickle`, or {_HINT_TO_MOVE}"
                )
        self._by_value = True
        return self._pickle(by_value=True)

    def _pickle(self, *, by_value: bool) -> Payload:
        """Return the function and its arguments as bytes; with `by_value`, functions travel as code, not as names."""
        try:
            data, descriptors = dumps(self._call, by_value=by_value)
        except Exception as error:
            raise CannotSend(self._why_unsendable(error, by_value=by_value)) from error
        needs_main = not by_value and _NAME_OF_MAIN in data
        prepared = preparation(self._main_import if needs_main else {})
        if by_value:
            prepared["sources"] = typed_sources()
        return Payload(preparation=prepared, pickle=data, descriptors=descriptors)

    def _why_unsendable(self, error: Exception, *, by_value: bool) -> str:
        """Return which part of the call cannot be pickled, found by trying each alone, and why."""
        function, args, kwargs = self._call
        parts: list[tuple[str, Any]] = [
            ("the function", function),
            *((f"args[{number}]", value) for number, value in enumerate(args)),
            *((f"kwargs[{name!r}]", value) for name, value in kwargs.items()),
        ]
        for name, value in parts:
            try:
                _, descriptors = dumps(value, by_value=by_value)
                close(descriptors)
            except Exception as own:  # noqa: BLE001 - whatever the object's own code raises
                remedy = "" if by_value or _has_cloudpickle() else f"; `pip install cloudpickle`, or {_HINT_TO_MOVE}"
                return f"{name} cannot be sent to workers: {_why(own, remedy)}"
        return f"the function and its arguments cannot be sent to workers: {_why(error)}"


def close(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


class _IndexOfDescriptor:
    """A descriptor in a pickle, by its index among those that are sent beside the pickle."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Collector:
    """Collects descriptors, in place of the process that multiprocessing is starting."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    DupFd = _IndexOfDescriptor

    def duplicate_for_child(self, descriptor: int) -> int:
        """Duplicate a descriptor, which its owner may close; return its index."""
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1


def dumps(value: object, *, by_value: bool = False) -> tuple[bytes, tuple[int, ...]]:
    """Return the pickle of a value, and descriptors of its shared memory, which the caller closes. `by_value`: functions as code.

    Raises: whatever the objects' own code raises.
    """
    buffer = io.BytesIO()
    collector = _Collector()
    with _collecting(collector):
        try:
            _pickler(buffer, by_value=by_value).dump(value)
        except BaseException:
            close(collector.descriptors)
            raise
    return buffer.getvalue(), tuple(collector.descriptors)


def loads(data: bytes, descriptors: Sequence[Any]) -> Any:
    """Return the value that `dumps` pickled; `descriptors` are of multiprocessing.reduction.DupFd."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Any:
            return descriptors[index]

    return Unpickler(io.BytesIO(data)).load()


@contextmanager
def _collecting(collector: _Collector) -> Iterator[None]:
    """Have multiprocessing's objects pickle themselves as for a process that is being started; collect their descriptors."""
    from multiprocessing import context

    before = context.get_spawning_popen()
    context.set_spawning_popen(collector)  # type: ignore[arg-type]  # it has what such objects call
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def _pickler(buffer: io.BytesIO, *, by_value: bool) -> pickle.Pickler:
    """Return a pickler that knows multiprocessing's types; with `by_value`, functions travel as code, not as names."""
    from multiprocessing.reduction import ForkingPickler

    def persistent_id(_pickler: object, value: object) -> int | None:  # None: the value is pickled as usual
        return value.index if type(value) is _IndexOfDescriptor else None

    base: Any = ForkingPickler
    attributes: dict[str, Any] = {"persistent_id": persistent_id}  # of its class
    if by_value:
        import cloudpickle

        base = cloudpickle.Pickler
        registered: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to know
        attributes["dispatch_table"] = ChainMap(registered, base.dispatch_table)
    pickler: pickle.Pickler = type("Pickler", (base,), attributes)(buffer, pickle.HIGHEST_PROTOCOL)
    return pickler


def _has_cloudpickle() -> bool:
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return False
    return True


def _why(error: Exception, remedy: str = "") -> str:
    """Return why something cannot be pickled, in one line, and what to do about it."""
    if "Too many open files" in str(error):
        remedy += "; torch.multiprocessing.set_sharing_strategy('file_system') needs no open file for each tensor"
    return (" ".join(str(error).split()) or type(error).__name__) + remedy


# --- the caller's `__main__`, which workers import to find the function


def imported_by(main: ModuleType) -> dict[str, str]:
    """Return how a worker imports this `__main__`, as keys for multiprocessing.spawn.prepare; {} if no worker can."""
    spec = getattr(main, "__spec__", None)
    if name := getattr(spec, "name", None):
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if not isinstance(path, str) or os.path.basename(path) in _NOT_FILES or not os.path.isfile(path):
        return {}
    return {"init_main_from_path": os.path.abspath(path)}


def is_interactive() -> bool:
    """Whether code is typed into this interpreter: its definitions are in no file."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "get_ipython" in vars(sys.modules["__main__"])


def import_path() -> list[str]:
    """Return the folders and files from which this process imports, wherever a worker may be."""
    return [folder or working_directory() or "." for folder in sys.path if isinstance(folder, str)]


def preparation(main: dict[str, str]) -> dict[str, Any]:
    """Return the data for multiprocessing.spawn.prepare in a worker; `main` says how to import `__main__`: {} for not at all.

    multiprocessing's own get_preparation_data would fix the start method of this process for good.
    """
    import multiprocessing
    from multiprocessing import process

    data: dict[str, Any] = {
        "authkey": bytes(process.current_process().authkey),  # for managers of the caller
        "sys_path": import_path(),
        "sys_argv": list(sys.argv) if hasattr(sys, "argv") else [""],
        **main,
    }
    if method := multiprocessing.get_start_method(allow_none=True):
        data["start_method"] = method
    return data


def typed_sources() -> dict[str, Any]:
    """Return the source lines that were typed, for tracebacks: a notebook keeps its cells in linecache, without files."""
    import linecache

    # an entry is size, time of the file, lines and name; what was typed has no time
    typed = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    size = sum(entry[0] for entry in typed.values())
    return typed if size <= _MAX_SOURCES else {}
