"""A host as the user or the cluster names it, and the grammar of its name. Decides nothing about what runs there."""

from __future__ import annotations

import re
import socket

from msgspec import Struct

from ddplaunch.errors import LaunchError
from ddplaunch.options.parsers import MOST, digits

MAX_HOSTS = MAX_SLOTS = MOST
MAX_NAME = 512  # characters of a name with a user; DNS allows 253, and 65536 long ones would fill the memory

# no leading "-": ssh would take the name for an option
_USER = r"(?:[A-Za-z0-9_][\w.+-]*@)?"
_NAME = rf"{_USER}[A-Za-z0-9_][\w.-]*"
_IPV6 = rf"{_USER}([0-9A-Fa-f:.]+)(?:%[\w.-]+)?"


class Host(Struct, frozen=True, kw_only=True):
    """A host of the job."""

    name: str  # as ssh takes it: "gpu01", "user@gpu01", "10.0.0.2", "fe80::1"
    slots: int | None = None  # workers; None: not given
    devices: tuple[str, ...] | None = None  # indices or UUIDs to use there; None: not given

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def checked(name: str, piece: str, origin: str) -> str:
    """Return the name.

    Raises:
        LaunchError: it is not valid.
    """
    if re.fullmatch(_NAME, name, re.ASCII) or ((found := re.fullmatch(_IPV6, name, re.ASCII)) and _is_ipv6(found[1])):
        return name
    raise wrong(piece, origin, f"{shown(name)} is not the name of a host", hint="type names such as gpu01,gpu02")


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except OSError:
        return False
    return True


def number(text: str, limit: int) -> int | None:
    """Return the number from 0 to `limit`, None if the text is none."""
    value = digits(text)
    return None if value is None or value > limit else value


def wrong(piece: str, origin: str, what: str, *, hint: str | None = None) -> LaunchError:
    """Make the error that something is wrong with this part of a text."""
    return LaunchError(f"{shown(piece)} in {origin}: {what}", hint=hint)


def too_many(piece: str, origin: str) -> LaunchError:
    """Make the error that a text names more hosts than any job has."""
    return wrong(piece, origin, f"these are more than {MAX_HOSTS} hosts")


def shown(text: str) -> str:
    """Write a text as messages show it."""
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f'"{short}"' if short.isprintable() else ascii(short)
