"""Hides secrets in what is written down or shown: variables, arguments, source text, messages. Nothing that must run passes here.

`names` knows the names of secrets, `assigned` finds secrets by what stands beside them, `shapes` finds secrets that need no
name. In a diff of git each file is read by its syntax, and all of a file that is a secret as a whole is hidden. No rule finds
everything: a word that is a secret, beside a name that says nothing, is missed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddplaunch.system.redaction import shapes
from ddplaunch.system.redaction.assigned import Syntax, arguments, values
from ddplaunch.system.redaction.names import HIDDEN, SECRET_PARTS, is_secret, is_value
from ddplaunch.system.redaction.shapes import Span

__all__ = ["HIDDEN", "Redactor", "Syntax", "is_secret", "literals"]

_SHORTEST, _SHORT, _WORD = 6, 8, 12  # characters of a value that is hidden wherever it stands: mixed, any, a word
_LONG = 16  # characters of a word that may be a token
# of secrets that may be in shorter words, besides the parts of names
_SIGNS = (
    "://", "-----", "bearer", "basic", "login", "curl", "wget", "mysql", "mariadb", "identified", "-cli", "mongo", "ldap", "zip",
)  # fmt: skip


def literals(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets among these variables, which are hidden in any text."""
    found = set()
    for name, value in env.items():
        if is_secret(name) and is_value(value, name):
            found |= {line for line in map(str.strip, (value, *value.split("\n"))) if _is_distinct(line)}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def _is_distinct(value: str) -> bool:
    """Whether a value stands nowhere by chance, as a short word may."""
    if value.isalpha() and value.islower():
        return len(value) >= _WORD
    is_mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return len(value) >= (_SHORTEST if is_mixed else _SHORT)


class Redactor:
    """Hides secrets in texts and values, and counts the secrets."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """`known` are secrets to be hidden in any text, as `literals` returns them."""
        self.hidden = 0  # values, so far
        self.known = tuple(known)
        self._literals: re.Pattern[str] | None = None

    def text(self, text: str, syntax: Syntax = Syntax.ANY) -> str:
        """Return a text with `...` in place of secrets: a message, a command line, source text."""
        if self._may_hide(text):
            spans = _merged(self._spans(text, syntax))
            self.hidden += len(spans)
            return _without(text, spans)
        return text

    def argv(self, words: Sequence[object]) -> list[str]:
        """Return a command line without secrets: values of options and variables, passwords that known programs take."""
        found, option = [], ""  # the option before, if it takes a secret
        texts = list(map(str, words))
        program = os.path.basename(texts[0]) if texts else ""
        for at, word in enumerate(texts):
            before = texts[at - 1] if at else ""
            name, equals, value = word.partition("=")
            user, colon, password = word.partition(":")
            if option and not word.startswith("-"):
                found.append(self._value(option, word))
            elif equals and is_secret(name) and re.fullmatch(r"[\w.+~/-]*", name):
                found.append(f"{name}={self._value(name, value)}")
            elif before in ("-u", "--user", "--proxy-user") and colon and not (user + password).isdigit():  # UID:GID
                found.append(f"{user}:{self._value('password', password)}")
            elif program == "sshpass" and before == "-p":
                found.append(self._value("password", word))
            elif program in ("mysql", "mysqldump", "mariadb", "sshpass") and word.startswith("-p") and len(word) > 2:
                found.append(f"-p{self._value('password', word[2:])}")
            else:
                found.append(self.text(word, Syntax.SETTINGS))
            takes_secret = word.startswith("-") and not equals and is_secret(name)
            option = name if takes_secret else ""
        return found

    def variables(self, variables: Mapping[str, object]) -> dict[str, str]:
        """Return variables without the values of those that are secrets."""
        return {name: self.variable(name, str(value)) for name, value in variables.items()}

    def variable(self, name: str, value: str) -> str:
        """Return the value of a variable, hidden if that is a secret."""
        return self._value(name, value) if is_secret(name) else self.text(value, Syntax.SETTINGS)

    def data(self, value: Any) -> Any:
        """Return plain data, as of JSON, with no secret in any text. Keys are kept, and do not count as names of secrets."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {key: self.data(each) for key, each in value.items()}
            case list() | tuple():
                return [self.data(each) for each in value]
        return value

    def _value(self, name: str, value: str) -> str:
        """Return the value of what has the name of a secret."""
        if not is_value(value, name):
            return self.text(value, Syntax.SETTINGS)
        self.hidden += 1
        return HIDDEN

    def _may_hide(self, text: str) -> bool:
        """Whether there may be a secret in a text; most messages are short, and need no closer look."""
        lowered = text.lower()
        return (
            any(part in lowered for part in SECRET_PARTS)
            or any(sign in lowered for sign in _SIGNS)
            or any(known in text for known in self.known)
            or any(len(word) >= _LONG for word in text.split())
        )

    def _spans(self, text: str, syntax: Syntax) -> Iterator[Span]:
        """Find all secrets in a text, by every rule; some are found by several."""
        yield from shapes.keys(text)
        yield from values(text, syntax)
        yield from arguments(text)
        yield from shapes.tokens(text)
        yield from shapes.headers(text)
        yield from shapes.urls(text)
        yield from shapes.blobs(text)
        if self.known:
            if self._literals is None:
                self._literals = re.compile("|".join(map(re.escape, self.known)))
            for found in self._literals.finditer(text):
                yield found.span()


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return places in their order, those that overlap in one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def _without(text: str, spans: Iterable[Span]) -> str:
    pieces, at = [], 0
    for start, end in spans:
        pieces += [text[at:start], HIDDEN]
        at = end
    return "".join([*pieces, text[at:]])


_FILE_HEADER = "diff --git "
_READ_AHEAD = 4  # so many times the characters that are wanted are read of a file
_ENDS_IN_SECRET_FILE = re.compile(
    r"(?:^|[/ \"])(?:\.env[^/\"]*|[^/\"]*\.env|\.?_?netrc|\.npmrc|\.pypirc|\.pgpass|\.htpasswd|\.git-credentials|\.dockercfg"
    r"|\.s3cfg|\.boto|\.vault-token|\.my\.cnf|\.docker/config\.json|\.kube/config|kubeconfig[^/\"]*|id_[a-z0-9_]+"
    r"|[^/\"]*(?:credential|secret|password)[^/\"]*|[^/\"]*\.(?:pem|key|p12|pfx|jks|keystore|ppk|kdbx|asc|gpg|tfstate|tfvars)"
    r"|service[-_]account[^/\"]*\.json|\.?tokens?(?:\.txt)?)\"?$",
    re.IGNORECASE,
)
_SETTINGS_FILE = re.compile(
    r"(?:\.(?:ya?ml|toml|ini|cfg|conf|config|env|properties|json|jsonl|sh|bash|zsh|fish|sbatch|slurm|xml|tf|hcl)"
    r"|(?:^|/)(?:Dockerfile|Containerfile|Makefile|\.[\w-]*rc)[^/]*)\"?$",
    re.IGNORECASE,
)
_CODE_FILE = re.compile(
    r"\.(?:pyi?|pyx|c|cc|cpp|cu|cuh|h|hpp|js|jsx|ts|tsx|go|rs|java|kt|scala|rb|lua|jl|ipynb|swift|cs)\"?$",
    re.IGNORECASE,
)


def diff(text: str, redactor: Redactor, most: int) -> str:
    """Return the diff without secrets, of a long one at most the first `most` characters.

    What stands before the first file is left out: it is the rest of a file whose name is not known.
    """
    at = 0 if text.startswith(_FILE_HEADER) else text.find(f"\n{_FILE_HEADER}") + 1
    if at == 0 and not text.startswith(_FILE_HEADER):  # no file begins
        return ""
    pieces: list[str] = []
    length = 0
    while at < len(text) and length < most:
        following = text.find(f"\n{_FILE_HEADER}", at)
        end = len(text) if following < 0 else following + 1
        # more than is wanted, since secrets become shorter
        piece = _file(text[at : min(end, at + _READ_AHEAD * most)], redactor)
        pieces.append(piece)
        length += len(piece)
        at = end
    return "".join(pieces)[:most]


def _file(text: str, redactor: Redactor) -> str:
    """Return what is changed in one file, from the line `diff --git a/OLD b/NEW`, without secrets."""
    header, newline, changes = text.partition("\n")
    names = header.removeprefix(_FILE_HEADER)  # which end with the new one
    old_name = re.split(r"\"? \"?b/", names, maxsplit=1)[0]  # git puts a name in quotes if it has to
    if _ENDS_IN_SECRET_FILE.search(names) or _ENDS_IN_SECRET_FILE.search(old_name):
        redactor.hidden += 1
        return f"{header}\n{HIDDEN}\n"
    syntax = (
        Syntax.CODE if _CODE_FILE.search(names) else Syntax.SETTINGS if _SETTINGS_FILE.search(names) else Syntax.ANY
    )
    return f"{header}{newline}{redactor.text(changes, syntax)}"
