"""A command of the user: what becomes of it, and that a Python of any kind can run it."""

import os

import pytest

from ddplaunch.system.process.command import run_in_shell

ENV = {"PATH": os.environ["PATH"]}


def test_a_command_gets_its_stdin_and_its_status_and_last_words_are_returned():
    assert run_in_shell("cat; exit 3", ENV, 10.0, b"told") == (3, "told")


def test_a_python_without_memfd_create_as_condas_runs_it_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "memfd_create")
    assert run_in_shell("cat", ENV, 10.0, b"told") == (0, "told")


def test_a_command_that_takes_too_long_is_killed_and_its_words_are_kept():
    assert run_in_shell("echo told; sleep 60", ENV, 0.3) == (None, "told\n")


def test_a_command_finds_ddplaunch_though_its_environment_is_not_activated():
    assert run_in_shell("command -v ddplaunch", ENV, 10.0)[0] == 0
    assert run_in_shell("exec true", {}, 10.0) == (0, "")
