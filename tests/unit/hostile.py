"""Values that a hostile peer may put in the place of any field of a message."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from ddplaunch.system.fields import Malformed

HOSTILE: list[object] = [
    None, True, -1, 0, 7, 65, 256, 65536, 1 << 31, 1 << 40, 1 << 63, 10**400, -1e13, 1e300, 0.5,
    "", "..", "../../x", "/tmp/x", "a\0b", "a\nb", "\x1b[2J", "\u202e", "x" * 300, "x" * 2000, "x" * 300_000, "a b", "-x",
    [], [[]], {}, {"type": "kill"},
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each field of a message, and of all that lies below it."""
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def with_value(message: object, at: tuple[Any, ...], value: object) -> Any:
    """The message with another value at this place."""
    if not at:
        return value
    copy: Any = dict(message) if isinstance(message, dict) else list(message) if isinstance(message, list) else message
    copy[at[0]] = with_value(copy[at[0]], at[1:], value)
    return copy


def altered(message: object) -> Iterator[bytes]:
    """The message with each hostile value in the place of each field of it."""
    for at in places(message):
        for value in HOSTILE:
            yield json.dumps(with_value(message, at, value)).encode()
        yield json.dumps(with_value(message, at, "?")).encode().replace(b'"?"', b'"\xff"')


def taken(decode: Callable[[bytes], Any], payload: bytes) -> Any:
    """What is made of these bytes; None if they are refused, in words that can be shown."""
    try:
        return decode(payload)
    except Malformed as error:
        assert str(error).isprintable()
        return None
