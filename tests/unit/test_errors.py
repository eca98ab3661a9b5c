"""What others have written, in messages of ours: a terminal shows it, and obeys none of it."""

import importlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.system.errors import LaunchError, indented, not_imported, visible

OBEYED = {
    "clipboard (OSC 52)": "\x1b]52;c;cm0gLXJmIH4K\x07",
    "reset (RIS)": "\x1bc",
    "C1": "\x9b2J",
    "C1 in a name that is not UTF-8": b"a\x9b2J".decode(errors="surrogateescape"),
    "hidden": "\x1b[8mhidden\x1b[28m",
    "carriage return": "\rerror: something else",
    "reordered": "\u202egpj.exe\u202c \u2066a\u2069",
    "line ends": "a\u2028b\u2029c\x0b\x0c\x85",
    "half a character": "\ud83d",
}


@pytest.mark.parametrize("text", OBEYED.values(), ids=OBEYED)
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text: str) -> None:
    assert LaunchError(text, hint=text).render().replace("\n", "").isprintable()


BROKEN = {  # what the module contains that is imported, the error's text behind the folder
    "gone": (None, "imports.py, line 2: ModuleNotFoundError: No module named 'broken'"),
    "half a file": ("def f(:", "imports.py, line 2: SyntaxError: invalid syntax (broken.py, line 1)"),
    "of another version": (
        "\nimport os\nos.absent",
        "broken.py, line 3: AttributeError: module 'os' has no attribute 'absent'",
    ),
    "unreadable": (Path("/proc/self/mem"), "broken.py: input/output error"),
    "lacks a library": ("\nraise OSError('libx.so: no such file')", "broken.py, line 2: libx.so: no such file"),
    "lacks a file": ("import os\nos.stat(__file__ + '.x')", "broken.py.x: no such file or directory"),
}


@pytest.mark.parametrize(("content", "text"), BROKEN.values(), ids=BROKEN)
def test_a_module_that_cannot_be_imported_is_named_with_its_file(tmp_path, monkeypatch, content, text) -> None:
    (tmp_path / "imports.py").write_text("\nimport broken")
    if isinstance(content, Path):
        (tmp_path / "broken.py").symlink_to(content)
    elif content is not None:
        (tmp_path / "broken.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((ImportError, SyntaxError, AttributeError, OSError)) as caught:
        importlib.import_module("imports")
    error = not_imported(caught.value)
    assert error.message == f"ddplaunch cannot import its modules: {tmp_path}/{text}"
    assert error.hint is not None
    typed = [] if ", line " in text else [f"cat {tmp_path}/{text.partition(': ')[0]}"]
    assert re.findall("`(.*)`", error.hint) == typed


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_can_be_shown_and_written(text: str) -> None:
    shown = visible(text)
    assert not any(ord(each) < 32 or 126 < ord(each) < 160 for each in shown.replace("\n", "").replace("\t", ""))
    assert shown.encode(errors="surrogateescape").decode(errors="surrogateescape") == shown
    assert visible(shown) == shown


@pytest.mark.parametrize(
    "text", ["Zoë\tdéjà vu\n", "模型 שלום 🙂", "\udce9t\udce9.py", "\x1b[1;31merror\x1b[0m\x1b[1m:\x1b[0m x"]
)
def test_plain_text_of_all_languages_and_our_own_colours_stay(text: str) -> None:
    assert visible(text) == text


def test_only_what_is_ours_begins_at_the_left_edge() -> None:
    name = "train.py\nerror: rank 3 failed\n\nhint: curl x | sh\n"
    shown = LaunchError(f"{name} does not exist", hint=f"looked in {name}").render()
    assert [line for line in shown.splitlines() if line and not line.startswith(" ")] == [
        "error: train.py",
        "hint: looked in train.py",
    ]
    assert indented("lost: ssh ended\n  its words") == "lost: ssh ended\n  its words"
