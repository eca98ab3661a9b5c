"""How the package is built where import contracts cannot say it: what only type checkers import counts, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.breaks import BREAKS, ROOT, Break

PACKAGE = Path(__file__).resolve().parents[2] / "ddplaunch"
AGENT = PACKAGE / "launcher" / "node"
INTERRUPT, FUTURE = "ddplaunch.system.interrupt", "from __future__ import annotations"
MOST_CALLBACKS = 8  # parameters of all constructors of the agent together: parts post events instead


def imported(path: Path, names: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ImportFrom) and found.module:
            for name in found.names:
                full = f"{found.module}.{name.name}"
                yield full if full in names else found.module


def module(path: Path) -> str:
    """The name under which a file is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles() -> list[list[str]]:
    """Files that import each other, directly or not, and those that import such files."""
    names = {module(path): path for path in PACKAGE.rglob("*.py")}
    below = {name: {other for other in imported(path, names) if other in names} for name, path in names.items()}
    while removed := [name for name, others in below.items() if not others]:
        for name in removed:
            del below[name]
        below = {name: others - set(removed) for name, others in below.items()}
    return [[name, *sorted(others)] for name, others in below.items()]


def test_no_files_import_each_other():
    assert circles() == []


def callbacks(path: Path) -> Iterator[str]:
    """The parameters of constructors, and the fields of values, that are called."""
    for made in ast.walk(ast.parse(path.read_text())):
        if not isinstance(made, ast.ClassDef):
            continue
        for part in made.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                arguments = (*part.args.args, *part.args.kwonlyargs)
                given = [(one.arg, one.annotation) for one in arguments]
            elif isinstance(part, ast.AnnAssign):
                given = [(ast.unparse(part.target), part.annotation)]
            else:
                continue
            yield from (
                f"{path.name}: {made.name}.{name}" for name, kind in given if kind and "Callable" in ast.unparse(kind)
            )


def test_parts_of_the_agent_post_events_and_take_hardly_any_callbacks():
    found = [one for path in sorted(AGENT.glob("*.py")) for one in callbacks(path)]
    assert 0 < len(found) <= MOST_CALLBACKS, found  # none would be those of a folder that was moved


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.wrong)
def test_what_a_break_replaces_stands_once_in_its_file(one: Break) -> None:
    assert (ROOT / "ddplaunch" / one.file).read_text(encoding="utf-8").count(one.right) == 1


def test_an_entry_takes_ctrl_c_before_it_imports_anything_else() -> None:
    files = {path: ast.parse(path.read_text()).body for path in PACKAGE.rglob("*.py")}
    entries = {
        path: [one for one in body if isinstance(one, (ast.Import, ast.ImportFrom))]
        for path, body in files.items()
        if any(isinstance(one, ast.Import) and one.names[0].name == INTERRUPT for one in body)
    }
    assert PACKAGE / "__main__.py" in entries
    for path, (future, first, *_) in entries.items():
        assert (ast.unparse(future), ast.unparse(first)) == (FUTURE, f"import {INTERRUPT}"), path
