"""Secrets that need no name: tokens by their shape, text that only a machine can have chosen, passwords in URLs. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import log2

Span = tuple[int, int]  # where something is to be hidden in a text

_BEFORE = r"(?<![A-Za-z0-9])"
# the beginning of each, then what is long enough to be no word
_TOKENS = (
    r"hf_[A-Za-z0-9]{16,}", r"api_org_[A-Za-z0-9]{16,}", r"sk-(?:[A-Za-z0-9]+-){0,3}[A-Za-z0-9_]{16,}[\w-]*",
    r"sk-(?:ant|proj|svcacct|admin|or-v1)-[\w-]{16,}",
    r"[spr]k_(?:live|test)_[A-Za-z0-9]{12,}", r"gh[opusr]_[A-Za-z0-9]{12,}", r"github_pat_\w{12,}",
    r"gl(?:pat|dt|rt|cbt|ptt|soat|ft)-[\w-]{12,}", r"xox[a-z]-[\w-]{8,}", r"xapp-[\w-]{12,}",
    r"A(?:KI|SI|RO|ID)A[A-Z0-9]{12,}", r"AIza[\w-]{20,}", r"ya29\.[\w-]{12,}", r"GOCSPX-[\w-]{12,}",
    r"npm_[A-Za-z0-9]{20,}", r"pypi-[\w-]{20,}", r"dckr_pat_[\w-]{12,}", r"SG\.[\w-]{12,}\.[\w-]{12,}",
    r"shp(?:at|ca|pa|ss)_[A-Za-z0-9]{16,}", r"r8_[A-Za-z0-9]{16,}", r"nvapi-[\w-]{16,}", r"gsk_[A-Za-z0-9]{16,}",
    r"pplx-[A-Za-z0-9]{16,}", r"xai-[A-Za-z0-9]{16,}", r"tgp_v1_[\w-]{16,}", r"do[opr]_v1_[a-f0-9]{16,}",
    r"lin_api_[A-Za-z0-9]{16,}", r"ATATT[\w=-]{16,}", r"PMAK-[\w-]{16,}", r"hv[sbr]\.[\w-]{12,}", r"tskey-[\w-]{12,}",
    r"AGE-SECRET-KEY-[A-Z0-9]{12,}", r"wandb_v1_\w{12,}", r"dapi[a-f0-9]{32}", r"eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?",
    r"(?:bot)?\d{8,10}:AA[\w-]{30,}", r"ntn_[A-Za-z0-9]{20,}", r"secret_[A-Za-z0-9]{40,}", r"GR1348941[\w-]{12,}",
    r"EAA[A-Za-z0-9]{40,}", r"sq0[a-z]{3}-[\w-]{16,}", r"key-[a-f0-9]{32}",
)  # fmt: skip
# addresses to which whoever knows them may write
_WEBHOOKS = (
    r"(?<=hooks\.slack\.com/)[\w/-]{8,}", r"(?<=/webhooks/)\d{3,}/[\w-]{4,}", r"(?<=\.webhook\.office\.com/)[\w/@-]{8,}",
    r"(?<=hooks\.zapier\.com/)[\w/-]{8,}",
)  # fmt: skip
_SIGNED = r"(?<=[?&;])(?:sig|signature|key|code|x-(?:amz|goog)-(?:signature|credential|security-token))=([^\s&#\"'<>]+)"
_SCHEMES = r"\b(?:Bearer|Basic|ApiKey)\s+([A-Za-z0-9._~+/=-]{8,})"
_USER = r"://(?:[^\s/?#@:\"'<>]{0,128}:([^\s@\"'<>]{1,256}(?:@[^\s/?#@\"'<>]{1,128}){0,3})|([^\s/?#@:\"'<>,;]{8,256}))@"
_AROUND = " \t\n\"'`=(,:[<"  # what may stand before a path
_RUN = r"[A-Za-z0-9+/_-]{24,}={0,2}"
_NEXT_LINE = r"\n[+\- ]?[ \t]*[\"']?([A-Za-z0-9+/]{4,}={0,2})(?=[\"'\\,; \t]*(?:\n|\Z))"
_SAMPLE = 4096  # characters from which a long text is judged


@cache  # to compile them takes milliseconds, and few commands have to
def _pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(text, flags)


def tokens(text: str) -> Iterator[Span]:
    """Find tokens that are known by their beginnings, and webhooks."""
    for found in _pattern(f"{_BEFORE}(?:{'|'.join(_TOKENS)})|{'|'.join(_WEBHOOKS)}").finditer(text):
        yield found.span()


def headers(text: str) -> Iterator[Span]:
    """Find what follows the scheme of a login: "Bearer ...", but no word of prose."""
    for found in _pattern(_SCHEMES).finditer(text):
        if _pattern(r"[A-Za-z]?[a-z]*(?:[/.-][A-Za-z]?[a-z]*)*").fullmatch(found[1]) is None:
            yield found.span(1)


def urls(text: str) -> Iterator[Span]:
    """Find passwords, tokens and signatures in URLs."""
    if "://" in text and "@" in text:
        for found in _pattern(_USER).finditer(text):
            group = 1 if found[1] is not None else 2
            if group == 1:
                port, slash, _ = found[1].partition("/")
                if not (slash and port.isdigit()) and not _stands_for(found[1]):
                    yield found.span(1)
            elif re.search(r"\d", found[2]) and (len(found[2]) >= 16 or re.search(r"[A-Z]", found[2])):
                yield found.span(2)
    if "=" in text:
        for found in _pattern(_SIGNED, re.IGNORECASE).finditer(text):
            if not _stands_for(found[1]):
                yield found.span(1)


def _stands_for(text: str) -> bool:
    """Whether this is written in place of a value: $NAME, {name}, <name>."""
    return text.startswith(("$", "{", "<", "%(", "...", "*"))


def blobs(text: str) -> Iterator[Span]:
    """Find text that looks random, and the lines of base64 that continue it."""
    end = 0
    for found in _pattern(_RUN).finditer(text):
        start = found.start()
        if start < end or not is_random(found[0]) or _is_digest(text, start) or _is_path(text, start, found[0]):
            continue
        end = found.end()
        yield found.span()
        while (more := _pattern(_NEXT_LINE).match(text, _line_end(text, end))) is not None:
            end = more.end(1)
            yield more.span(1)


def _line_end(text: str, at: int) -> int:
    """Return where a line ends that has but quotes and the like behind this place; else this place."""
    found = _pattern(r"(?:\\n)?[\"'\\,; \t]*(?=\n)").match(text, at)
    return found.end() if found else at


def _is_digest(text: str, at: int) -> bool:
    """Whether what begins here is written as a digest: "sha256-..." of a lock file, "SHA256:..." of a public key."""
    return _pattern(r"sha\d{1,3}[-:]?\Z", re.IGNORECASE).search(text[max(0, at - 8) : at]) is not None


def _is_path(text: str, at: int, found: str) -> bool:
    """Whether the text found here is a path, absolute or of a file: messages name paths, which are no secrets."""
    is_absolute = found.startswith("/") and not found.startswith("//") and found.count("/") > 1
    is_of_file = "/" in found and _pattern(r"\.[a-z]\w{0,5}\b").match(text, at + len(found)) is not None
    before = text[at - 1 : at] if at else ""
    return (is_absolute and before in ("", *_AROUND, "~", ".")) or (is_of_file and before in ("", *_AROUND))


def is_random(text: str) -> bool:
    """Whether a text has letters of both cases and digits mixed as no name, path or number in hex has them."""
    text = re.sub(r"\+0x[0-9a-f]+\Z", "", text[:_SAMPLE].rstrip("="))  # the place in a function
    if text.startswith("_Z") or _pattern(r"sha\d{1,3}-", re.IGNORECASE).match(text):  # a name in C++, a digest
        return False
    kinds = ["a" if one.islower() else "A" if one.isupper() else "0" if one.isdigit() else "" for one in text]
    letters = [kind for kind in kinds if kind]
    if len(letters) < 20 or len(kinds) - len(letters) > max(2, len(kinds) // 9) or len(set(letters)) < 3:
        return False
    changes = sum(one != other for one, other in pairwise(letters))
    parts = re.split(r"[^A-Za-z0-9]+", text)
    words = sum(map(len, re.findall(r"[A-Z][a-z]{2,}|[a-z]{3,}", text)))
    if words > 0.55 * len(letters) or all(
        re.fullmatch(r"[0-9a-f]*|[0-9A-F]*|[A-Z]*|[A-Z]?[a-z]*", part) for part in parts
    ):
        return False
    # of 40 characters are the keys of AWS, which have slashes and no other signs
    least = 0.48 if len(letters) < 32 else 0.34 if len(text) == 40 and not set(text) & set("-_") else 0.42
    return changes >= least * len(letters) and _entropy(text) > 3.3


def _entropy(text: str) -> float:
    """Return the bits of a character, as often as each occurs here."""
    return -sum(number / len(text) * log2(number / len(text)) for number in Counter(text).values())


# --- keys in PEM

_MARK = r"-----(BEGIN|END) [A-Z0-9 ]{1,60}-----"
# a line of one: in a diff, a comment or a string of a program
_BODY = (
    r"(?:[+\- ]?[ \t]*(?:#|//|\*)?[ \t]*[\"'bru(]{0,4}(?:[A-Za-z0-9+/=]{1,100}|[A-Z][\w-]{0,40}: [^\n]{0,200})?"
    r"(?:\\[nr])*[\"'\\,;+) \t\r]{0,8})(?:\n|\Z)"
)


def keys(text: str) -> Iterator[Span]:
    """Find keys from their first line to the last, or as far as they go: a hunk of a diff may have only a part."""
    if "-----" not in text:
        return
    begun, before = None, 0
    for mark in _pattern(_MARK).finditer(text):
        if mark[1] == "BEGIN":
            if begun is not None:
                yield from _part(text, begun.start(), begun.end())
            begun = mark
            continue
        if begun is not None and "\n@@ " not in text[begun.end() : mark.start()]:
            yield begun.start(), mark.end()
        else:
            if begun is not None:
                yield from _part(text, begun.start(), begun.end())
            yield _body_before(text, mark.start(), before), mark.end()
        begun, before = None, mark.end()
    if begun is not None:
        yield from _part(text, begun.start(), begun.end())


def _part(text: str, start: int, at: int) -> Iterator[Span]:
    """Find a key without its end: the lines that look like one, or, in one line, what looks like one."""
    same_line = _pattern(r"(?:\\[nr]|[A-Za-z0-9+/= ])+").match(text, at)
    at = end = same_line.end() if same_line else at
    rest = _pattern(r"[\"'\\,;+) \t\r]*\n").match(text, at)
    if rest is not None:
        at = rest.end()
        while at < len(text) and (found := _pattern(_BODY).match(text, at)) is not None and found[0].strip("+- \n"):
            at = end = found.end()
        end = end - 1 if text[end - 1 : end] == "\n" else end
    if end > start:
        yield start, end


def _body_before(text: str, at: int, low: int) -> int:
    """Return where the body of a key begins whose end is here."""
    start = text.rfind("\n", low, at) + 1 or low
    while start > low:
        above = text.rfind("\n", low, start - 1) + 1 or low
        line = text[above:start]
        if len(line) > 200 or len(line.strip("+- \n")) < 8 or _pattern(_BODY).fullmatch(line) is None:
            break
        start = above
    return start
