"""Hides secrets in a diff of git: each file by its syntax, and all of a file that is a secret as a whole. Pure."""

from __future__ import annotations

import re

from ddplaunch.system.redaction import HIDDEN, Redactor, Syntax

_HEADER = "diff --git "
_READ_AHEAD = 4  # so many times the characters that are wanted are read of a file
_SECRET_FILES = re.compile(
    r"(?:^|[/ \"])(?:\.env[^/\"]*|[^/\"]*\.env|\.?_?netrc|\.npmrc|\.pypirc|\.pgpass|\.htpasswd|\.git-credentials|\.dockercfg"
    r"|\.s3cfg|\.boto|\.vault-token|\.my\.cnf|\.docker/config\.json|\.kube/config|kubeconfig[^/\"]*|id_[a-z0-9_]+"
    r"|[^/\"]*(?:credential|secret|password)[^/\"]*|[^/\"]*\.(?:pem|key|p12|pfx|jks|keystore|ppk|kdbx|asc|gpg|tfstate|tfvars)"
    r"|service[-_]account[^/\"]*\.json|\.?tokens?(?:\.txt)?)\"?$",
    re.IGNORECASE,
)
_SETTINGS = re.compile(
    r"(?:\.(?:ya?ml|toml|ini|cfg|conf|config|env|properties|json|jsonl|sh|bash|zsh|fish|sbatch|slurm|xml|tf|hcl)"
    r"|(?:^|/)(?:Dockerfile|Containerfile|Makefile|\.[\w-]*rc)[^/]*)\"?$",
    re.IGNORECASE,
)
_CODE = re.compile(
    r"\.(?:pyi?|pyx|c|cc|cpp|cu|cuh|h|hpp|js|jsx|ts|tsx|go|rs|java|kt|scala|rb|lua|jl|ipynb|swift|cs)\"?$",
    re.IGNORECASE,
)


def diff(text: str, redactor: Redactor, most: int) -> str:
    """Return the diff without secrets, of a long one at most the first `most` characters.

    What stands before the first file is left out: it is the rest of a file whose name is not known.
    """
    at = 0 if text.startswith(_HEADER) else text.find(f"\n{_HEADER}") + 1
    if at == 0 and not text.startswith(_HEADER):  # no file begins
        return ""
    pieces: list[str] = []
    length = 0
    while at < len(text) and length < most:
        following = text.find(f"\n{_HEADER}", at)
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
    names = header.removeprefix(_HEADER)  # which end with the new one
    old_name = re.split(r"\"? \"?b/", names, maxsplit=1)[0]
    if _SECRET_FILES.search(names) or _SECRET_FILES.search(old_name):
        redactor.hidden += 1
        return f"{header}\n{HIDDEN}\n"
    syntax = Syntax.CODE if _CODE.search(names) else Syntax.SETTINGS if _SETTINGS.search(names) else Syntax.ANY
    return f"{header}{newline}{redactor.text(changes, syntax)}"
