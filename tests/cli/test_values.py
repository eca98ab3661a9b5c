"""What completes modules, devices and lists, whatever stands in the folder or in the word."""

import os

import pytest

from ddplaunch.cli import completion


def completed(items):
    return [item.value for item in items]


def test_modules_and_packages_of_the_folder_complete_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "tools.py", "no-module.py", "__init__.py", "text.txt", "two words.py", "lab/fit.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / os.fsdecode(b"t\xff.py")).touch()
    assert completed(completion.complete_module("")) == ["lab", "tools", "train"]
    assert completed(completion.complete_module("t")) == ["tools", "train"]
    assert completed(completion.complete_module("lab.")) == ["lab.fit"]


@pytest.mark.parametrize("typed", ["none.", "..", "lab..x", "a\0.", "x" * 100_000 + ".", "train.py.x"])
def test_what_is_no_folder_completes_nothing(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    assert completed(completion.complete_module(typed)) == []


def test_the_last_entry_of_a_list_completes_and_none_twice():
    assert completed(completion.complete_list(["0", "1", "10"], "")) == ["0", "1", "10"]
    assert completed(completion.complete_list(["0", "1", "10"], "0,1")) == ["0,1", "0,10"]
    assert completed(completion.complete_list(["0", "1"], "1,")) == ["1,0"]
    assert "cpu" in completed(completion.complete_devices(""))
    assert "0,cpu" not in completed(completion.complete_devices("0,"))
