"""The code, packages and machine of a run, from a real git: no secret is written, and a git that hangs is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.record import about as about_module
from ddplaunch.record.about import about
from ddplaunch.system.process.ask import ask
from ddplaunch.system.redaction import literals
from tests.conftest import PATIENCE

ENV = {
    "PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_DIR": "/no/such/repository",
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    env = {name: value for name, value in ENV.items() if name != "GIT_DIR"}
    return subprocess.run(
        ["git", *words], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def code(folder: Path) -> Any:
    return about(str(folder), None, (), ENV)["code"]


def test_the_commit_and_the_changes_since_are_known(repository: Path) -> None:
    (repository / "models").mkdir()
    head = git(repository, "rev-parse", "HEAD")
    clean: dict[str, Any] = {"folder": str(repository), "commit": head, "branch": "trunk", "changed": [], "diff": None,
                             "hidden": 0}  # fmt: skip
    assert code(repository / "models") == clean
    (repository / "train.py").write_text("lr = 0.2\n")
    (repository / "new.py").touch()
    changed = code(repository)
    assert changed["changed"] == [" M train.py", "?? new.py"]
    assert "-lr = 0.1\n+lr = 0.2" in changed["diff"]


def test_without_a_repository_a_commit_or_git_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert code(tmp_path) is None
    monkeypatch.setitem(ENV, "PATH", "/no/such/folder")
    assert code(tmp_path) is None


def test_the_programs_that_a_repository_names_are_not_run(repository: Path) -> None:
    for name in ("core.fsmonitor", "diff.external", "diff.x.textconv", "core.pager"):
        git(repository, "config", name, f"touch {repository}/owned; cat")
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "train.py").write_text("lr = 0.2\n")
    assert "+lr = 0.2" in code(repository)["diff"]
    assert not (repository / "owned").exists()


def test_a_git_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setitem(ENV, "PATH", f"{tmp_path}:{ENV['PATH']}")
    monkeypatch.setattr(about_module, "_GIT_TIMEOUT", 0.2)
    assert ask(lambda: code(tmp_path), PATIENCE) is None


@pytest.mark.parametrize(
    "secret",
    [
        'password = "hush"', "  'api_key': 'hush',", "export HF_TOKEN=hush", "wandb_token: hush", 'login(token="hush")',
        "hf_hushhushhushhush", "url = https://me:hush@host/", "-----BEGIN RSA PRIVATE KEY----- hush",
    ],
)  # fmt: skip
def test_a_secret_in_the_changes_is_hidden_before_they_are_written(repository: Path, secret: str) -> None:
    (repository / "train.py").write_text(f"{secret}\nlr = 0.2\n")
    (repository / "conf.yaml").write_text("")
    found = code(repository)
    assert "hush" not in found["diff"]
    assert "+lr = 0.2" in found["diff"]
    assert found["hidden"] == 1


def test_a_secret_of_the_environment_is_hidden_in_the_changes(repository: Path) -> None:
    (repository / "train.py").write_text("lr = 'plain-words'\n")
    found = about(str(repository), None, (), ENV, literals({"MY_TOKEN": "plain-words"}))["code"]
    assert "+lr = '...'" in found["diff"]
    assert found["hidden"] == 1


def test_changes_without_a_secret_are_whole(repository: Path) -> None:
    text = 'tokens = model(tokens)\ndef f(token: str) -> None:\n    author = get("x")\n    auth: bool = True\n    token = of(f)\n'
    (repository / "train.py").write_text(text)
    found = code(repository)
    assert all(f"+{line}" in found["diff"] for line in text.splitlines())
    assert found["hidden"] == 0


def test_of_a_long_diff_the_beginning_is_kept_and_no_secret(repository: Path) -> None:
    (repository / "a.env").write_text("")
    git(repository, "add", ".")
    (repository / "a.env").write_text("hush\n" * 300_000)
    (repository / "train.py").write_bytes(b"token = 'hush\xff'\n" + b"lr = 0.2\n" * 1_000_000)
    found = code(repository)
    assert found["diff"].startswith("diff --git a/a.env b/a.env\n...\n")
    assert "hush" not in found["diff"]
    (repository / "a.env").write_text("")
    found = code(repository)
    assert "+token = '...'\n+lr = 0.2\n" in found["diff"]
    assert len(found["diff"]) == 64_000


def test_the_machine_and_the_packages_of_the_workers_are_known(tmp_path: Path) -> None:
    found = about(str(tmp_path), sys.executable, (), ENV)
    assert found["python"] == sys.version.split()[0]
    assert found["packages"]["msgspec"]
    machine = found["machine"]
    assert machine["host"] == os.uname().nodename
    assert machine["memory"] > 1 << 28
    assert machine["cpus"] >= 1
