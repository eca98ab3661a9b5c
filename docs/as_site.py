"""What mkdocs does not know of this documentation: files outside of docs/ that pages link to, and our marks at blocks of code.

On the code's own pages (GitHub and the like) both work as they are.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

FRONT = "README.md"  # the page with the ways in, before which the site has the beginning of the project's README
_FRONT_ENDS = "## Coming from torchrun"
ROOT = Path(__file__).resolve().parents[1]
# pages of the site that are elsewhere in the repository; any other file is shown as text
PAGES = {
    "project/benchmarks.md": "benchmarks/README.md",
    "project/changes.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
}
_PLACES = {path: page for page, path in PAGES.items()}
DESIGN = "docs/design/"  # about the code: shown as text, like any other file that CONTRIBUTING links to
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[)#])")
_EXAMPLE = re.compile(r"examples/\w+\.py")  # a program that the page of an example shows
_MARK = re.compile(r"^(```console) wrong$", re.MULTILINE)  # commands that a test is not to take for right ones


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files that pages link to."""
    from mkdocs.structure.files import File

    texts = {page.src_uri: page.content_string for page in files.documentation_pages()}
    texts |= {page: (ROOT / path).read_text(encoding="utf-8") for page, path in PAGES.items()}
    for page in PAGES:
        files.append(File.generated(config, page, content=texts[page]))
    targets = {_target(link, page) for page, text in texts.items() for link in _LINK.findall(_text(text, page))}
    for path in sorted(path for path in targets - _PLACES.keys() if not _is_of_site(path)):
        text = (ROOT / path).read_text(encoding="utf-8")  # a page that links to no file is an error
        files.append(File.generated(config, _place_of(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let the links lead to the places of the site, leave the marks out, and show the programs of an example."""
    here = page.file.src_uri

    def lead(link: re.Match[str]) -> str:
        return os.path.relpath(_place_of(_target(link[1], here)), os.path.dirname(here) or ".")

    programs = (
        dict.fromkeys(_target(link, here) for link in _LINK.findall(markdown)) if here.startswith("examples/") else ()
    )
    listings = map(_listing, filter(_EXAMPLE.fullmatch, programs))
    return "".join([_MARK.sub(r"\1", _LINK.sub(lead, _text(markdown, here))), *listings])


def _text(markdown: str, page: str) -> str:
    """What stands on a page of the site."""
    if page != FRONT:
        return markdown
    front = (ROOT / "README.md").read_text(encoding="utf-8").partition(_FRONT_ENDS)[0]
    # links of the README begin at the repository, those of the page in docs/
    front = re.sub(r"(?<=\]\()(?!https?:)([^)#\s]+)", lambda link: os.path.relpath(link[1], "docs"), front)
    return f"{front}\n## Where to go on\n\n{markdown.partition('# Documentation')[2].strip()}\n"


def _listing(program: str) -> str:
    """Return the section that shows a program of the repository."""
    text = (ROOT / program).read_text(encoding="utf-8").strip()
    return f"\n\n## {os.path.basename(program)}\n\n```python\n{text}\n```\n"


def _target(link: str, page: str) -> str:
    """The file that a link on a page leads to, as a path in the repository."""
    return os.path.normpath(os.path.join(os.path.dirname(PAGES.get(page, f"docs/{page}")), link))


def _place_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if _is_of_site(path):
        return path.removeprefix("docs/")
    return _PLACES.get(path, f"files/{path}.txt")  # a name that browsers show as text


def _is_of_site(path: str) -> bool:
    """Whether the site has this file of the repository where docs/ has it."""
    return path.startswith("docs/") and not path.startswith(DESIGN)
