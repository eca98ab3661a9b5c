"""Every example says what it takes, has a page that leads to it, and the page's commands are what it takes."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from tests.torch.example import EXAMPLES, module

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
DOCS = EXAMPLES.parent / "docs"

each_example = pytest.mark.parametrize("name", NAMES)


@pytest.mark.skipif(
    any(importlib.util.find_spec(needed) is None for needed in ("torch", "sklearn")), reason="needs torch, scikit-learn"
)
@each_example
def test_an_example_says_what_it_takes_and_its_page_says_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = module(f"{name}.py")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    said = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert said.startswith(f"usage: {name}.py")
    page = (DOCS / "examples" / f"{name}.md").read_text(encoding="utf-8")
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for command in re.findall(rf"^(?:\$ |    ).*examples/{name}\.py(.*)$", page + source, re.MULTILINE):
        for flag in re.findall(r" (--[\w-]+)", command):
            assert flag in said, f"{name}.py {command}"


@each_example
def test_the_page_of_an_example_leads_to_it_and_is_found(name: str) -> None:
    page = (DOCS / "examples" / f"{name}.md").read_text(encoding="utf-8")
    assert f"](../../examples/{name}.py)" in page
    assert f"](examples/{name}.md)" in (DOCS / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\$ ddplaunch .*examples/{name}\.py", page, re.MULTILINE), "what to type"
