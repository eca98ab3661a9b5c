"""The command line: parses arguments, calls the launcher, gives the exit status. No other folder imports click."""

from __future__ import annotations

import sys
from types import ModuleType


def _load(name: str) -> object:
    """Import the true module in place of the empty one, at the first use of a name of it."""
    del sys.modules["inspect"]
    import inspect

    return getattr(inspect, name)


# click imports it for its own help texts, which nobody sees here: with what it imports itself a fifth of click's import
if "inspect" not in sys.modules:
    sys.modules["inspect"] = ModuleType("inspect")
    sys.modules["inspect"].__getattr__ = _load  # type: ignore[method-assign]  # PEP 562
