"""Folders and jobs of several nodes for the tests here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Nodes, several


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """One job of several nodes on this machine."""
    yield from several(tmp_path)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path: multiprocessing makes sockets below it, whose paths may have 107 bytes."""
    return tmp_path_factory.mktemp("t")
