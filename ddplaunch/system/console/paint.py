"""Shows text to people where rich is not loaded: colours, links and line breaks by a few codes of our own. Pure.

For failure summaries, errors and help. None has a table to lay out, and rich takes 17 ms to import, from files that may be gone
once a job has crashed, or lie on a disk that hangs.
"""

from __future__ import annotations

import os
import re

from msgspec import Struct

# SGR codes, as `errors.visible` lets them pass
STRONG, WEAK, CODE, ERROR, HINT = "1", "2", "36", "1;31", "1;36"
_RESET = "\x1b[0m"
_CODES = r"\x1b\[[0-9;]*m|\x1b\]8;;[!-~]*\x1b\\"
_LABELS = {"error": ERROR, "hint": HINT}  # of sentences: what else a report holds is indented
# what is to be typed, and how a worker ended behind the reason, are not broken
_WORD = r" *(?:`[^`\n]+`|(?<=   )\([^()\n]*\)|[^ `]|`)+"


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
    columns: int = 0  # 0: not known

    def line(self, line: Line, host: str = "") -> str:
        """Write a line whose files are on this host; an escape sequence in its text is shown, not obeyed."""
        if isinstance(line, str):
            return line.replace("\x1b", "\\x1b")
        return "".join(self._words(words, host) for words in line)

    def _words(self, words: Words, host: str) -> str:
        text = words.text.replace("\x1b", "\\x1b")
        if self.colour and words.style and text:
            text = styled(text, words.style)
        if self.links and words.file.startswith("/"):
            path = re.sub(rb"[^\w./~-]", lambda found: b"%%%02X" % ord(found[0]), os.fsencode(words.file)).decode()
            text = f"\x1b]8;;file://{host}{path}\x1b\\{text}\x1b]8;;\x1b\\"
        return text

    def report(self, text: str) -> str:
        """Colour "error:" and "hint:" where they begin a line, and break such a line between words to the terminal's columns."""
        return re.sub(rf"(?m)^(?:{_CODES})?(?:error|hint):.*$", lambda found: self._sentence(found[0]), text)

    def _sentence(self, text: str) -> str:
        """Break a line "error: ..." between words, with further rows indented, and colour its first word."""
        rows = [""]
        for word in re.findall(_WORD, text) if self.columns else [text]:
            if rows[-1] and len(plain(rows[-1] + word)) > self.columns:
                rows.append(f"  {word.lstrip(' ')}")
            else:
                rows[-1] += word
        label = rows[0].partition(":")[0]
        if self.colour and label in _LABELS:
            rows[0] = styled(f"{label}:", _LABELS[label]) + rows[0].removeprefix(f"{label}:")
        return "\n".join(rows)


def styled(text: str, style: str) -> str:
    """Return a text between the codes of a style."""
    return f"\x1b[{style}m{text}{_RESET}"


def plain(line: Line) -> str:
    """Return the text of a line, of one that was painted too."""
    return re.sub(_CODES, "", line) if isinstance(line, str) else "".join(words.text for words in line)
