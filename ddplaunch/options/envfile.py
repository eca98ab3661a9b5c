"""Variables as --env and the files of --env-file write them. Pure; a file's content comes in as text, nothing is expanded."""

from __future__ import annotations

import re

from ddplaunch.options.parsers import VARIABLE, BadValue

_ESCAPED = r'\\(["\\$`n])'
_DOUBLE = r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?'
_SINGLE = r"'([^']*)'\s*(?:#.*)?"


def variables(content: str, place: str) -> list[tuple[str, str]]:
    """Read lines of NAME=VALUE as a shell would: `#` comments, `export `, single and double quotes.

    Raises:
        BadValue: a line is not one; the text names `place` and the line.
    """
    found = []
    for count, line in enumerate(content.split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, rest = re.sub(r"^export\s+", "", stripped).partition("=")
        if not equals or not re.fullmatch(VARIABLE, name) or "\0" in rest:
            raise BadValue(f"{place}:{count}: expected NAME=VALUE")
        found.append((name, _unquoted(rest, f"{place}:{count}")))
    return found


def _unquoted(text: str, place: str) -> str:
    mark = text[:1]
    if mark not in ("'", '"'):
        return re.sub(r"(?:^|\s)#.*", "", text).strip()
    found = re.fullmatch(_DOUBLE if mark == '"' else _SINGLE, text)
    if not found:
        raise BadValue(f"{place}: the quote {mark} is not closed, or something follows it")
    if mark == "'":
        return found[1]
    return re.sub(_ESCAPED, lambda escape: "\n" if escape[1] == "n" else escape[1], found[1])
