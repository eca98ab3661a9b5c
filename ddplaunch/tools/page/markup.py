"""HTML and SVG in which every text is escaped: only what `tag` and `styles` return is taken as markup. Pure.

Workers write log lines, exceptions, names and paths. So each text is taken for hostile: `<script>`, `</pre>`, quotes, terminal
escapes, characters that change the direction of a line.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from ddplaunch.system.fields import clean

_EMPTY = ("meta", "link", "br")


Content: TypeAlias = "str | Iterable[Content]"


class Html(str):
    """Markup in which all texts are escaped."""

    __slots__ = ()


def tag(name: str, /, *content: Content, **attributes: str | float) -> Html:
    """Return an element; of an attribute's name `class_` gives class, and `aria_label` aria-label."""
    words = [name]
    for key, value in attributes.items():
        words.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(clean(str(value)))}"')
    opened = f"<{' '.join(words)}>"
    return Html(opened if name in _EMPTY else f"{opened}{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """Return the pieces of `content` in one: markup as it is, texts escaped."""
    pieces = []
    for piece in content:
        if isinstance(piece, Html):
            pieces.append(str(piece))
        elif isinstance(piece, str):
            pieces.append(html.escape(clean(piece)))
        else:
            pieces.append(join(*piece))
    return Html("".join(pieces))


def styles(css: str) -> Html:
    """Return a style element; `css` is ours."""
    return Html(f"<style>{css}</style>")


def table(caption: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Html:
    """Return a table with a caption and headers for its columns and rows, which scrolls within the page's width."""
    lines = []
    for first, *others in rows:
        lines.append(tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in others]))
    top = tag("tr", [tag("th", name, scope="col") for name in head])
    return scrolling(caption, tag("table", tag("caption", caption), tag("thead", top), tag("tbody", lines)))


def scrolling(label: str, content: Html) -> Html:
    """Return what may be wider than the page, which the keyboard scrolls."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def unfolding(title: str, text: str, room: int, **attributes: str) -> Html:
    """Return a title that unfolds a text. Of a long text, show only the end: at most `room` bytes of markup."""
    text = clean(text)
    shown = tag("code", text)
    while len(shown.encode()) > room and text:
        # a quarter goes, up to the end of a line; of one long line, half of it
        text = text[len(text) // 4 + 1 :].partition("\n")[2] or text[len(text) // 2 + 1 :]
        shown = tag("code", text)
    return tag(
        "details", tag("summary", title), tag("pre", shown, tabindex=0, role="region", aria_label=title), **attributes
    )
