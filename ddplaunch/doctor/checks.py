"""All checks of one machine, in the order in which -v shows them."""

from __future__ import annotations

from ddplaunch.doctor import Check, limits

ALL: tuple[Check, ...] = (*limits.CHECKS,)
