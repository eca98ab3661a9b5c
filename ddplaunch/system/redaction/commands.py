"""Secrets that commands, calls and SQL take without a name: `sshpass -p`, `curl -u`, `wandb login`, IDENTIFIED BY. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from ddplaunch.system.redaction.names import is_value
from ddplaunch.system.redaction.shapes import Span

_BARE = r"(?P<secret>[^\s\"'|;&<>]+)"
_WORD = rf"[\"']?{_BARE}"
_BETWEEN = r"\b[^\n|;]{0,200}?[ \t]"
_QUOTED = r"[\"'](?P<secret>[^\"'\n]+)"
_TAKES = (
    rf"\bsshpass[ \t]+-p[ \t]*{_WORD}",
    rf"\b(?:mysql\w*|mariadb[\w-]*){_BETWEEN}-p{_WORD}",
    rf"\b(?:curl|wget|http){_BETWEEN}(?:-u|--user|--proxy-user)[ \t=]*[\"']?[^\s:\"'|;]{{0,99}}:{_BARE}",
    rf"\bcurl{_BETWEEN}(?:-b|--cookie)[ \t=]+[\"']?[\w.-]{{1,99}}={_BARE}",
    rf"\bldap\w+{_BETWEEN}-w[ \t]+{_WORD}",
    rf"\bzip{_BETWEEN}-P[ \t]+{_WORD}",
    rf"\b(?:redis-cli){_BETWEEN}-a[ \t]+{_WORD}",
    rf"\b(?:mongo\w*|(?:docker|podman|helm|az|oc)\b[^\n|;]{{0,80}}?[ \t]login){_BETWEEN}-p[ \t]+{_WORD}",
    rf"\bwandb[ \t]+login[ \t]+(?:--[\w-]+[ \t]+){{0,5}}(?!-){_WORD}",
    rf"\becho[ \t]+(?:-n[ \t]+)?{_WORD}[\"']?[ \t]*\|[^\n|;]{{0,200}}?--(?:password-stdin|with-token)",
    rf"\bssh-keygen{_BETWEEN}-N[ \t]+{_WORD}",
    rf"[ \t]-pass(?:in|out)?[ \t]+pass:{_WORD}",
    rf"\bconfigure[ \t]+set[ \t]+[\w.-]{{0,80}}(?:secret|token)[\w.-]{{0,80}}[ \t]+{_WORD}",
    rf"\b(?:IDENTIFIED[ \t]+BY|(?i:password))[ \t]+{_QUOTED}",
    rf"\blogin\([ \t]*(?:key[ \t]*=[ \t]*)?[rbfu]?{_QUOTED}",
    rf"\blogin\([ \t]*[^\n,()]{{1,200}},[ \t]*[rbfu]?{_QUOTED}",
    rf"[\"']wandb[\"'],[ \t]*[\"']login[\"'],[ \t]*{_QUOTED}",
)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


def arguments(text: str) -> Iterator[Span]:
    """Find what the commands here take as a secret."""
    for takes in _TAKES:
        for found in _pattern(takes).finditer(text):
            if is_value(found["secret"], "password"):
                yield found.span("secret")
