"""A program that calls `ddplaunch.launch()`, as a test runs it: in a home of its own, and proven to leave nothing behind."""

import os
import sys
from pathlib import Path
from textwrap import dedent

from tests.conftest import Job

PACKAGE = Path(__file__).resolve().parents[2]


class Program(Job):
    """A python program in place of the command; what it starts has its mark."""

    def argv(self, *args: object) -> list[str]:
        """The interpreter with these arguments."""
        return [sys.executable, *map(str, args)]

    @property
    def env(self) -> dict[str, str]:
        """The tests' programs can be imported, and a home that is not the developer's."""
        path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
        return {**super().env, "PYTHONPATH": path, "HOME": str(self.home), "PYTHONUNBUFFERED": "1"}

    def write(self, text: str, name: str = "script.py") -> Path:
        """Write a script."""
        path = self.home / name
        path.write_text(dedent(text))
        return path
