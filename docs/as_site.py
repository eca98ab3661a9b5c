"""What mkdocs does not know of this documentation: files outside of docs/ that pages link to, and our marks at blocks of code.

On the code's own pages (GitHub and the like) both work as they are.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

FRONT = "README.md"  # the page with the ways in, before which the site has the beginning of the project's README
_FRONT_ENDS = "## Coming from torchrun"
ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)(?=[)#])")
_MARK = re.compile(r"^(```console) wrong$", re.MULTILINE)  # commands that a test is not to take for right ones
_COPIES = "files"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to."""
    from mkdocs.structure.files import File

    pages = files.documentation_pages()
    linked = {path for page in pages for path in _outside(_text(page.content_string, page.src_uri), page.src_uri)}
    for path in sorted(linked):
        text = (ROOT / path).read_text(encoding="utf-8")  # a page that links to no file is an error
        files.append(File.generated(config, _copy_of(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let the links lead to the copies, and leave the marks out."""
    here = page.file.src_uri
    markdown = _text(markdown, here)

    def lead(match: re.Match[str]) -> str:
        path = _target(match[1], here)
        return match[1] if path is None else os.path.relpath(_copy_of(path), os.path.dirname(here) or ".")

    return _MARK.sub(r"\1", _LINK.sub(lead, markdown))


def _text(markdown: str, page: str) -> str:
    """What stands on a page of the site."""
    if page != FRONT:
        return markdown
    front = (ROOT / "README.md").read_text(encoding="utf-8").partition(_FRONT_ENDS)[0]
    # links of the README begin at the repository, those of the page in docs/
    front = re.sub(r"(?<=\]\()(?!https?:)([^)#\s]+)", lambda link: os.path.relpath(link[1], "docs"), front)
    return f"{front}\n## Where to go on\n\n{markdown.partition('# Documentation')[2].strip()}\n"


def _outside(markdown: str, page: str) -> Iterator[str]:
    for match in _LINK.finditer(markdown):
        if (path := _target(match[1], page)) is not None:
            yield path


def _target(link: str, page: str) -> str | None:
    """The file outside of docs/ that a link on a page leads to, as a path in the repository."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), link))
    return None if path.startswith("docs/") else path


def _copy_of(path: str) -> str:
    return f"{_COPIES}/{path}.txt"  # a name that browsers show as text
