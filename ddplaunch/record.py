"""Frozen values with named fields, as frozen dataclasses are, but made without generating code.

`dataclass` compiles six functions for each class: 0.3 to 0.5 ms a class on a current machine, and the start of the command
needs fifty classes, which would be half of the time that it may take in all. Here all classes share the same six functions.
Type checkers see dataclasses (PEP 681). It refuses mutable defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar, dataclass_transform, overload

    T = TypeVar("T")

NOTHING: Mapping[Any, Any] = MappingProxyType({})  # a default for mappings

_REQUIRED = object()


if TYPE_CHECKING:

    @overload
    def record(cls: type[T], /) -> type[T]: ...
    @overload
    @dataclass_transform(frozen_default=True)
    def record(*, kw_only: bool) -> Callable[[type[T]], type[T]]: ...


def record(cls: type[T] | None = None, /, *, kw_only: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a class with annotated fields a frozen record; equal if of one class with equal fields."""

    def make(cls: type[T]) -> type[T]:
        _make(cls, kw_only)
        return cls

    return make if cls is None else make(cls)


def replace(old: T, /, **changes: Any) -> T:
    """Give a record like `old` with some fields changed."""
    new = object.__new__(type(old))
    fields = vars(new)
    fields.update(vars(old))
    fields.update(changes)
    if len(fields) > len(vars(old)):
        _refuse_unknown(type(old), changes)
    return new


def fields_of(cls: Any) -> Mapping[str, Any]:
    """Give the names of a record's fields and their defaults, None for a field that has none."""
    return {name: None if value is _REQUIRED else value for name, value in cls._fields.items()}


def _make(cls: Any, kw_only: bool) -> None:
    names = tuple(cls.__annotations__)
    setattr(cls, "__match_args__", () if kw_only else names)  # noqa: B010 - mypy takes the assignment for a declaration
    cls._fields = {name: cls.__dict__.get(name, _REQUIRED) for name in names}
    if shared := [name for name, value in cls._fields.items() if isinstance(value, (list, dict, set))]:
        raise TypeError(f"{cls.__name__}.{shared[0]}: every record would share this default")
    cls.__init__ = _init
    cls.__setattr__ = cls.__delattr__ = _refuse
    cls.__eq__ = _equal
    cls.__hash__ = _hash
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = _repr


def _init(self: Any, *args: Any, **given: Any) -> None:
    cls = type(self)
    if args:
        if len(args) > len(cls.__match_args__):
            raise TypeError(
                f"{cls.__name__} takes {len(cls.__match_args__)} fields without their names, not {len(args)}"
            )
        given.update(zip(cls.__match_args__, args, strict=False))
    fields = {**cls._fields, **given}
    if len(fields) > len(cls._fields):
        _refuse_unknown(cls, given)
    if len(given) < len(fields):
        for name, value in fields.items():
            if value is _REQUIRED:
                raise TypeError(f"{cls.__name__} needs {name}")
    self.__dict__.update(fields)


def _refuse_unknown(cls: Any, given: Mapping[str, Any]) -> None:
    raise TypeError(f"{cls.__name__} has no field {next(name for name in given if name not in cls._fields)}")


def _refuse(self: Any, name: str, value: object = None) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be changed")


def _equal(self: Any, other: Any) -> bool:
    return bool(self.__dict__ == other.__dict__) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(tuple(self.__dict__.values()))


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"
