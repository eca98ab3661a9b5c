"""Colours and links of a failure report, by a few codes of our own. Pure.

Not by rich: the report of a crash has no table to lay out, and rich takes 17 ms to import, from files that may be gone by then,
or lie on a disk that hangs.
"""

from __future__ import annotations

import os
import re

from msgspec import Struct

from ddplaunch.system.errors import coloured

# as `errors.visible` lets them pass
STRONG, WEAK, CODE = "1", "2", "36"
_RESET = "\x1b[0m"
_CODES = r"\x1b\[[0-9;]*m|\x1b\]8;;[!-~]*\x1b\\"


class Words(Struct, frozen=True):
    """A part of a line, with the way in which it is shown."""

    text: str
    style: str = ""
    file: str = ""  # that it leads to


Line = str | tuple[Words, ...]


class Paint(Struct, frozen=True):
    """What the terminal of stderr shows besides text; nothing, if it is none."""

    colour: bool = False
    links: bool = False

    def line(self, line: Line, host: str = "") -> str:
        """Write a line whose files are on this host; an escape sequence in its text is shown, not obeyed."""
        if isinstance(line, str):
            return line.replace("\x1b", "\\x1b")
        return "".join(self._words(words, host) for words in line)

    def _words(self, words: Words, host: str) -> str:
        text = words.text.replace("\x1b", "\\x1b")
        if self.colour and words.style and text:
            text = f"\x1b[{words.style}m{text}{_RESET}"
        if self.links and words.file.startswith("/"):
            path = re.sub(rb"[^\w./~-]", lambda found: b"%%%02X" % ord(found[0]), os.fsencode(words.file)).decode()
            text = f"\x1b]8;;file://{host}{path}\x1b\\{text}\x1b]8;;\x1b\\"
        return text

    def labels(self, text: str) -> str:
        """Colour the labels of a report that is made elsewhere."""
        return coloured(text) if self.colour else text


def plain(line: Line) -> str:
    """Return the text of a line, of one that was painted too."""
    return re.sub(_CODES, "", line) if isinstance(line, str) else "".join(words.text for words in line)
