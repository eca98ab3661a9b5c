"""The texts of `ddplaunch help TOPIC`: marked parts of the pages, in Markdown without links. Reads pages, and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

# around each part of a page that the help shows, too
_PART = re.compile(r"<!-- help: (\S+) -->\n(.*?)<!-- end of help -->\n", re.DOTALL)
_MARK = re.compile(r"<!-- (?:help: |end of help )")
# a sentence that begins with a link says only what is on the other page
_ABOUT_OTHER_PAGE = re.compile(r"(?:(?<=\n\n)|(?<=\. )|(?<=\.\n))\[[A-Z`][^]]*\]\([^)]*\)[^.|]*\.\s")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def marked(name: str, text: str) -> str:
    """Return a part of a page that the help shows as this topic, with its marks."""
    return f"<!-- help: {name} -->\n\n{text}\n\n<!-- end of help -->"


def read(pages: Mapping[Path, str]) -> dict[str, str]:
    """Return the text of each topic that these pages have, page by page, by their paths.

    The title of a page stands above its parts, except for the first page of a topic.

    Raises:
        ValueError: a mark lacks its begin or its end, as after a merge.
    """
    texts = dict[str, list[str]]()
    for path in sorted(pages, key=lambda path: path.with_suffix("")):
        parts = _PART.findall(pages[path])
        if len(_MARK.findall(pages[path])) != 2 * len(parts):
            raise ValueError(f"{path}: a part for `ddplaunch help` lacks its begin or its end")
        title = re.findall(r"^# .+", pages[path], re.MULTILINE)[:1]
        for number, (name, text) in enumerate(parts):
            before = title if name in texts and not number else []
            texts.setdefault(name, []).extend([*before, _without_links(text).strip()])
    return {name: "\n\n".join(parts) + "\n" for name, parts in texts.items()}


def _without_links(text: str) -> str:
    """Return a text in Markdown with the words of its links alone: a terminal cannot follow them."""
    return _LINK.sub(r"\1", _ABOUT_OTHER_PAGE.sub("", text))
