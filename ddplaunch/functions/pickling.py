"""Pickles a function and its arguments for workers. Opens no socket, starts no thread and no process.

It is multiprocessing's own pickler, so what libraries registered with it counts: tensors on the CPU travel as descriptors of
shared memory, those on a GPU as handles, locks and queues by name. Descriptors are collected, to be sent beside the pickle.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from ddplaunch.functions import main_module

_MAIN = b"__main__"  # the name in a pickle that needs that module
_MOVE = "put it into a module that workers can import"


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
        self._whole = (function, tuple(args), dict(kwargs))
        self._main = main_module.imported_by(sys.modules["__main__"])
        self._by_value = False
        self._first: Payload | None = self._try()  # before any process is started

    def payload(self) -> Payload:
        """Pickle it for one more worker.

        Raises:
            CannotSend: it can no longer be pickled.
        """
        first, self._first = self._first, None
        return first or self._pickled(by_value=self._by_value)

    def close(self) -> None:
        """Close the descriptors of a payload that was not used."""
        if self._first is not None:
            close(self._first.descriptors)

    def _try(self) -> Payload:
        try:
            payload = self._pickled(by_value=False)
        except CannotSend:
            if not _cloudpickle():
                raise
        else:
            if not self._is_unimportable(payload):
                return payload
            close(payload.descriptors)
            if not _cloudpickle():
                name = getattr(self._whole[0], "__qualname__", repr(self._whole[0]))
                raise CannotSend(
                    f"{name} and its arguments use definitions of this session, which workers cannot import; "
                    f"`pip install cloudpickle`, or {_MOVE}"
                )
        self._by_value = True
        return self._pickled(by_value=True)

    def _is_unimportable(self, payload: Payload) -> bool:
        """Whether it needs something of the caller's `__main__` that workers cannot import."""
        return _MAIN in payload.pickle and (not self._main or main_module.is_interactive())

    def _pickled(self, *, by_value: bool) -> Payload:
        try:
            data, descriptors = dumps(self._whole, by_value=by_value)
        except Exception as error:
            raise CannotSend(self._reason(error, by_value=by_value)) from error
        main = self._main if not by_value and _MAIN in data else {}
        preparation = main_module.preparation(main)
        if by_value:
            preparation["sources"] = main_module.sources()
        return Payload(preparation=preparation, pickle=data, descriptors=descriptors)

    def _reason(self, error: Exception, *, by_value: bool) -> str:
        """Say which part cannot be pickled, and why."""
        function, args, kwargs = self._whole
        parts: list[tuple[str, Any]] = [
            ("the function", function),
            *((f"args[{number}]", value) for number, value in enumerate(args)),
            *((f"kwargs[{name!r}]", value) for name, value in kwargs.items()),
        ]
        for name, value in parts:
            try:
                close(dumps(value, by_value=by_value)[1])
            except Exception as own:  # noqa: BLE001 - as above
                remedy = "" if by_value or _cloudpickle() else f"; `pip install cloudpickle`, or {_MOVE}"
                return f"{name} cannot be sent to workers: {_one_line(own)}{remedy}{_advice(own)}"
        return f"the function and its arguments cannot be sent to workers: {_one_line(error)}{_advice(error)}"


def close(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


class _Descriptor:
    """A descriptor in a pickle, by its index."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Collector:
    """Collects descriptors, in place of the process that multiprocessing is starting."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    DupFd = _Descriptor

    def duplicate_for_child(self, descriptor: int) -> int:
        """Duplicate it, since its owner may close it; give its index."""
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1


def dumps(value: object, *, by_value: bool = False) -> tuple[bytes, tuple[int, ...]]:
    """Pickle a value; give its descriptors too, which the caller closes.

    Raises: whatever the objects' own code raises.
    """
    buffer = io.BytesIO()
    collector = _Collector()
    with _spawning(collector):
        try:
            _pickler(buffer, by_value=by_value).dump(value)
        except BaseException:
            close(collector.descriptors)
            raise
    return buffer.getvalue(), tuple(collector.descriptors)


def loads(data: bytes, descriptors: Sequence[Any]) -> Any:
    """Unpickle what `dumps` gave; each descriptor is as multiprocessing.reduction.DupFd gives it."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Any:
            return descriptors[index]

    return Unpickler(io.BytesIO(data)).load()


@contextmanager
def _spawning(collector: _Collector) -> Iterator[None]:
    """Make multiprocessing's objects take this for the pickling of a process that is being started."""
    from multiprocessing import context

    before = context.get_spawning_popen()
    context.set_spawning_popen(collector)  # type: ignore[arg-type]  # all that they use of it
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def _pickler(buffer: io.BytesIO, *, by_value: bool) -> pickle.Pickler:
    from multiprocessing.reduction import ForkingPickler

    base: Any = ForkingPickler
    names: dict[str, Any] = {"persistent_id": _persistent_id}
    if by_value:
        import cloudpickle

        base = cloudpickle.Pickler
        registered: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to know
        names["dispatch_table"] = ChainMap(registered, base.dispatch_table)
    made: pickle.Pickler = type("Pickler", (base,), names)(buffer, pickle.HIGHEST_PROTOCOL)
    return made


def _persistent_id(_: pickle.Pickler, value: object) -> int | None:
    return value.index if type(value) is _Descriptor else None


def _cloudpickle() -> bool:
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return False
    return True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _advice(error: Exception) -> str:
    if "Too many open files" in str(error):
        return "; torch.multiprocessing.set_sharing_strategy('file_system') needs no open file for each tensor"
    return ""
