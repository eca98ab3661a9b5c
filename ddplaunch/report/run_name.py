"""The names of runs: the one that was asked for, or date, time and a short name, which is what people see and type. Pure."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.spec import JobSpec

_BEGAN = "%Y%m%d-%H%M%S"
# no vowel, so that no name is a word; none of 0, 1, l, which look like others. The first is a letter: a number is a rank
_LETTERS, _LENGTH = "bcdfghjkmnpqrstvwxz", 4
_CHARACTERS = f"{_LETTERS}23456789"
_MADE = re.compile(r"\d{8}-\d{6}-(?P<short>[a-z0-9]{3,4}(?:\.\d+)?)")


def run_id_of(spec: JobSpec) -> str:
    """Return the name of this run: as was asked, or "20261123-194501-k7qx", in which one of 374,000 short names is drawn."""
    return spec.run_id or f"{time.strftime(_BEGAN)}-{_drawn()}"


def _drawn() -> str:
    first, *others = os.urandom(_LENGTH)
    return _LETTERS[first % len(_LETTERS)] + "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in others)


def short(run_id: str) -> str:
    """Return what people see and type of a name: "k7qx" of "20261123-194501-k7qx"; all of one that was asked for."""
    found = _MADE.fullmatch(run_id)
    return found["short"] if found else run_id
