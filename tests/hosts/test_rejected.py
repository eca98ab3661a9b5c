"""A firewall that rejects connections is no proof that nobody listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", ["4", "6"])
def test_a_firewall_that_rejects_is_told_from_a_host_where_nobody_listens(family: str) -> None:
    command = ["unshare", "--net", sys.executable, "-m", "tests.hosts.reject", family]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "rejected by a firewall\n"
