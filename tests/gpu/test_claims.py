"""The table of claims: what it counts, and that the one in the pages knows each."""

import json
import os
import sys
from pathlib import Path
from subprocess import run

from tests.gpu.claims import Table, rows
from tests.gpu.machine import REPOSITORY

SEEN = REPOSITORY / "docs" / "reference" / "gpu-seen.json"


def test_the_worst_that_a_test_came_to_counts_and_a_skipped_one_only_where_none_ran():
    found = {
        ("a.md", "one"): [("seen", "3 s"), ("skipped", "needs two GPUs"), ("seen", "3 s")],
        ("a.md", "two"): [("seen", "all"), ("failed", "error: no")],
        ("a.md", "three"): [("skipped", "needs two GPUs")],
    }
    table = {row["claim"]: (row["outcome"], row["told"]) for row in rows(found)}
    assert table == {"one": ("seen", "3 s"), "two": ("failed", "error: no"), "three": ("skipped", "needs two GPUs")}


def test_a_claim_that_no_test_came_to_is_kept_as_not_run(tmp_path: Path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"claims": [{"page": "a.md", "claim": "one", "outcome": "seen", "told": "3 s"}]}))
    Table(path).pytest_sessionfinish()
    assert json.loads(path.read_text())["claims"] == [
        {"page": "a.md", "claim": "one", "outcome": "skipped", "told": "not run"}
    ]


def test_the_pages_list_each_claim(tmp_path: Path):
    table = tmp_path / "table.json"
    words = ["-q", "-m", "gpu", str(Path(__file__).parent), "--gpu-table", str(table)]
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = run(
        [sys.executable, "-m", "pytest", *words],
        cwd=REPOSITORY,
        env=no_gpu,
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    claimed = {(row["page"], row["claim"]) for row in json.loads(table.read_text())["claims"]}
    listed = {(row["page"], row["claim"]) for row in json.loads(SEEN.read_text())["claims"]}
    assert claimed == listed, "make test-gpu PYTEST_ARGS='--gpu-table docs/reference/gpu-seen.json'"
    for page, _ in claimed:
        assert (REPOSITORY / ("" if page == "README.md" else "docs") / page).exists(), page
