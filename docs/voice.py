"""Counts habits that make prose hard to read: `python docs/voice.py`; `python docs/voice.py docs/faq.md` shows those of a file.

It reads the pages, whose reference holds the help of the options and the docstrings of the public functions, and the
texts of the messages in the code. A habit may not occur more often than BUDGET allows.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

# how often each habit may occur: lower a figure when you have removed some, never raise one
BUDGET = {
    "pages": {"semicolon": 228, "colon": 409, "long": 38, "what": 88, "word": 58},
    "changelog": {"semicolon": 21, "colon": 3, "long": 2, "what": 5, "word": 2},
    "messages": {"semicolon": 97, "long": 4, "what": 15, "word": 8},
}
MEANS = {
    "semicolon": "make two sentences",
    "colon": "a colon introduces a list or an example: make two sentences",
    "long": "a sentence has at most 30 words",
    "what": "say which thing: `the output`, not `what is printed`",
    "word": "a plainer word",
}
LONGEST = 30  # words of a sentence

# the label of an item: `- **name**: text`, `- [page](x.md) and [other](y.md): text`, `**Note:** text`
_LABEL = re.compile(r"(?:[-*>]|\d+\.)?\s*\*\*.*?\*\*:?\s|(?:[-*]|\d+\.)\s+[^\s:]+(?: [^\s:]+){0,4}:\s")
# an indirect question is no noun: "shows what failed"; nor is a question, nor "what to do"
_ASKS = "say|says|said|show|shows|see|sees|know|knows|learn|tell|tells|told|ask|asks|explain|explains|decide|decides|you|and"
_WHAT = re.compile(r"(?<!\w)(?:(?P<before>[\w']+) )?(?P<what>what)\b(?! to\b)(?![^.!?]*\?)", re.IGNORECASE)
_WORDS = re.compile(
    r"\b(?:who|what|which)ever\b|\banew\b|\balike\b|\bbut for\b|\bst(?:ands?|ood)\b|\bbesides\b|\bbe it\b|\bthat which\b"
    r"|\b(?:of|from|with|at|to|through) which\b|\bthose (?:that|which|who|of|in)\b|\bfor ever\b|\bhim\b|\bas it were\b",
    re.IGNORECASE,
)


class Finding(NamedTuple):
    """A habit at a place."""

    habit: str
    place: str  # file:line
    text: str


def habits(text: str, place: str = "") -> Iterator[Finding]:
    """Find the habits in a paragraph, whose code is replaced by CODE and whose links by their text."""
    plain = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    for match in re.finditer(r";(?=\s)", plain):
        yield Finding("semicolon", place, _around(plain, match))
    for match in re.finditer(r"(?<=[\w)]):(?= (?!CODE)\S)", plain):
        yield Finding("colon", place, _around(plain, match))
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\[(`*])|:$", plain):
        if len(re.findall(r"[\w'./-]*\w", sentence)) > LONGEST:
            yield Finding("long", place, sentence)
    for match in _WHAT.finditer(plain):
        if not re.fullmatch(_ASKS, match["before"] or "", re.IGNORECASE):
            yield Finding("what", place, _around(plain, match))
    for match in _WORDS.finditer(plain):
        yield Finding("word", place, _around(plain, match))


def _around(text: str, match: re.Match[str]) -> str:
    return text[max(match.start() - 40, 0) : match.end() + 40]


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Give each paragraph, item and cell of a page with the number of its first line, without code and addresses."""
    first, lines, code = 0, list[str](), False
    for number, line in enumerate([*markdown.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        begins = not line.strip() or fence or re.match(r"\s*([-*>|#]|\d+\.) ?", line)
        if (begins or code) and lines:
            yield first, _plain(" ".join(lines))
            lines = []
        code ^= fence
        if code or fence or not line.strip() or line.startswith(("    ", "#", "<!--")):
            continue
        if line.startswith("|"):
            yield from ((number, _plain(cell)) for cell in re.split(r"(?<!\\)\|", line))
            continue
        first = first if lines else number
        lines.append(line.strip())


def _plain(text: str) -> str:
    text = re.sub(r"`[^`]+`", "CODE", text.strip())
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Give each text of at least four words in a module, without its docstrings; `X` is for each part that is filled in."""
    tree = ast.parse(source)
    skipped = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if "(?" not in text and len(re.findall(r"(?<![\w-])[a-z]+(?![\w-])", text)) >= 4:  # no regular expression
            yield node.lineno, _plain(text)


@cache
def findings() -> list[tuple[str, Finding]]:
    """Return everything that is found, each with the kind of text."""
    found = []
    pages = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
    modules = sorted(path for path in ROOT.glob("ddplaunch/**/*.py") if path.parts[-2] != "options")
    for kind, files, split in (
        ("pages", pages, paragraphs),
        ("changelog", [ROOT / "CHANGELOG.md"], paragraphs),
        ("messages", modules, messages),
    ):
        for file in files:
            for line, text in split(file.read_text(encoding="utf-8")):
                found += [(kind, finding) for finding in habits(text, f"{file.relative_to(ROOT)}:{line}")]
    return found


def main(arguments: Sequence[str]) -> int:
    """Compare all with the budget, or show the habits of the files that are named; give the exit status."""
    found = findings()
    if arguments:
        for kind, (habit, place, text) in found:
            if place.startswith(tuple(arguments)) and habit in BUDGET[kind]:
                print(f"{place}: {habit}: {text}")
        return 0
    counts = Counter((kind, finding.habit) for kind, finding in found)
    over = False
    for kind, budget in BUDGET.items():
        for habit, allowed in budget.items():
            if (count := counts[kind, habit]) > allowed:
                over = True
                print(
                    f"{kind}: {count} of {habit!r}, {allowed} at most: {MEANS[habit]}; `python docs/voice.py FILE` shows where"
                )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
