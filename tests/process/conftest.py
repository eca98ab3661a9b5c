"""A job of several nodes, for the tests here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Nodes, several


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """One job of several nodes on this machine."""
    yield from several(tmp_path)
