"""The map of the code: every folder and loose module of the package, by the layer that the import contract gives it.

Reads docstrings and `pyproject.toml`; imports nothing of the package and writes nothing (`generate.py` does).
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_WIDTH = 760  # pixels
_LEFT = 34  # pixels, for the arrow
_GAP = 8  # pixels between boxes
_LINE = 14  # pixels from one line of text to the next
_LETTER = 5.8  # pixels: a letter of the small text, on the average
_NAME = 120  # pixels for the name in a box that has its layer to itself

_STYLE = """\
  <style>
    text { font: 13px system-ui, sans-serif; fill: #24292f; }
    .small { font-size: 11px; }
    .strong { font-weight: 600; }
    .folder { fill: #eef2f7; stroke: #8c96a3; }
    .module { fill: #ffffff; stroke: #8c96a3; }
    .apart { stroke-dasharray: 4 3; }
    .line { stroke: #57606a; fill: none; }
    @media (prefers-color-scheme: dark) {
      text { fill: #d8dee6; }
      .folder { fill: #23292f; stroke: #6b7580; }
      .module { fill: #14181c; stroke: #6b7580; }
      .line { stroke: #9aa4af; }
    }
  </style>"""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A folder or a loose module of the package."""

    name: str  # a folder's ends with a slash
    sentence: str  # the first one of its docstring
    stands_apart: bool = False  # nobody may import it, whatever its layer
    folders: tuple[Module, ...] = ()  # in it


Layers = Sequence[Sequence[Module]]  # the topmost first


def read(package: Path, pyproject: Path) -> Layers:
    """Return the modules of the package by the layers of its import contract.

    Raises:
        ValueError: a module has no layer, or a layer names what is not there.
    """
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [re.split(r"\s*\|\s*", layer) for layer in next(_of_type(contracts, "layers"))["layers"]]
    apart = {name for contract in _of_type(contracts, "protected") for name in contract["protected_modules"]}
    there = {path.stem: path for path in package.iterdir() if _is_module(path) and path.stem != "__init__"}
    named = {name for layer in layers for name in layer}
    if missing := there.keys() - named:
        raise ValueError(f"no layer in [tool.importlinter] of pyproject.toml: {', '.join(sorted(missing))}")
    if gone := named - there.keys():
        raise ValueError(
            f"has a layer in [tool.importlinter] of pyproject.toml, but is gone: {', '.join(sorted(gone))}"
        )
    return [[_module(there[name], f"{package.name}.{name}" in apart) for name in layer] for layer in layers]


def _of_type(contracts: Sequence[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (contract for contract in contracts if contract["type"] == kind)


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").exists()


def _module(path: Path, stands_apart: bool = False) -> Module:
    docstring = ast.get_docstring(ast.parse(_source(path).read_text(encoding="utf-8"))) or ""
    folders = [below for below in path.iterdir() if (below / "__init__.py").exists()] if path.is_dir() else []
    return Module(
        name=f"{path.name}/" if path.is_dir() else path.stem,
        sentence=" ".join(re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0].split()),
        stands_apart=stands_apart,
        folders=tuple(_module(below) for below in sorted(folders)),
    )


def _source(path: Path) -> Path:
    return path / "__init__.py" if path.is_dir() else path


# --- as text


def as_text(layers: Layers) -> str:
    """Draw the map for a terminal: a line for each module, and between two layers a rule."""
    rows = [[row for module in layer for row in _rows(module, 0)] for layer in layers]
    width = max(len(name) for layer in rows for name, _ in layer) + 2
    drawn = ("\n".join(f"{name:{width}}{sentence}" for name, sentence in layer) for layer in rows)
    return f"\n{'-' * (width - 2)}\n".join(drawn)


def _rows(module: Module, depth: int) -> Iterator[tuple[str, str]]:
    yield f"{'  ' * depth}{module.name}", module.sentence
    for folder in module.folders:
        yield from _rows(folder, depth + 1)


# --- as a picture


def as_picture(layers: Layers) -> str:
    """Draw the map as SVG: a row of boxes for each layer."""
    boxes: list[str] = []
    top = 34
    for layer in layers:
        drawn, height = _row(layer, top)
        boxes += drawn
        top += height + _GAP
    height = top + 2
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
            'role="img">',
            "  <title>Every folder and loose module of the package, by layer</title>",
            _STYLE,
            f'  <text class="strong" x="{_LEFT}" y="20">a module imports only from below</text>',
            f'  <path class="line" d="M14 34 V{top - 10} M9 {top - 20} L14 {top - 10} L19 {top - 20}"/>',
            *boxes,
            "</svg>",
        )
    )


def _text(module: Module, width: int) -> list[str]:
    """Return the lines in the box of a module: its sentence, then the names of the folders in it."""
    folders = "  ".join(folder.name for folder in module.folders)
    return [*textwrap.wrap(module.sentence.replace("`", ""), width), *textwrap.wrap(folders, width)]


def _row(layer: Sequence[Module], top: int) -> tuple[list[str], int]:
    """Draw the boxes of a layer; give them and their height."""
    alone = len(layer) == 1
    width = (_WIDTH - _LEFT - 2 - _GAP * (len(layer) - 1)) // len(layer)
    room = width - 20 - (_NAME if alone else 0)
    texts = [_text(module, int(room / _LETTER)) for module in layer]
    lines = max(map(len, texts)) + (0 if alone else 1)
    height = _LINE * lines + 13
    drawn: list[str] = []
    for place, (module, text) in enumerate(zip(layer, texts, strict=True)):
        left = _LEFT + place * (width + _GAP)
        kind = "folder" if module.name.endswith("/") else "module"
        if module.stands_apart:
            kind += " apart"
        x, first = (left + 10 + _NAME, top + 18) if alone else (left + 10, top + 18 + _LINE)
        drawn += [
            f'  <rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="3"/>',
            f'  <text class="strong" x="{left + 10}" y="{top + 18}">{escape(module.name)}</text>',
        ]
        drawn += [
            f'  <text class="small" x="{x}" y="{first + _LINE * number}">{escape(line, quote=False)}</text>'
            for number, line in enumerate(text)
        ]
    return drawn, height
