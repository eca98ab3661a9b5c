"""Files in memory into which the ranks write their stacks shortly before the timeout. Knows no connection."""

from __future__ import annotations

import os

from ddplaunch.process.linux import memory_file

_LONGEST = 1 << 16  # bytes of a file that are read


class StackFiles:
    """One file for each rank of the latest generation."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # descriptors, by rank

    def renew(self, rank: int) -> int:
        """Make a new file for a rank, in place of that of the generation before; give another descriptor of it, to be sent."""
        if (old := self._files.pop(rank, None)) is not None:
            os.close(old)
        self._files[rank] = memory_file(f"ddplaunch-stacks-{rank}")
        return os.dup(self._files[rank])

    def read(self) -> list[tuple[int, str]]:
        """Return the ranks that have written something, in order, and what."""
        texts = ((rank, os.pread(file, _LONGEST, 0)) for rank, file in sorted(self._files.items()))
        return [(rank, text.decode(errors="replace")) for rank, text in texts if text]

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            os.close(file)
