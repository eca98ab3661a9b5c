"""Property tests without a clock: on a busy machine an example may take any time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
