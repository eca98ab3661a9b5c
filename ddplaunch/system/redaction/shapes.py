"""Finds secrets that need no name: tokens by their shape, text that only a machine can have chosen, passwords in URLs. Pure."""

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
# the user of a URL: with a password behind a colon, or alone, where it may be a token
_USER_IN_URL = (
    r"://(?:[^\s/?#@:\"'<>]{0,128}:([^\s@\"'<>]{1,256}(?:@[^\s/?#@\"'<>]{1,128}){0,3})|([^\s/?#@:\"'<>,;]{8,256}))@"
)
_AROUND = " \t\n\"'`=(,:[<"  # what may stand before a path
_LONG_RUN = r"[A-Za-z0-9+/_-]{24,}={0,2}"
_NEXT_LINE = r"\n[+\- ]?[ \t]*[\"']?([A-Za-z0-9+/]{4,}={0,2})(?=[\"'\\,; \t]*(?:\n|\Z))"
_SAMPLE = 4096  # characters from which a long text is judged


@cache  # to compile them takes milliseconds, and few commands have to
def compiled(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return a pattern compiled, once for all calls."""
    return re.compile(text, flags)


def tokens(text: str) -> Iterator[Span]:
    """Find tokens that are known by their beginnings, and webhooks."""
    for found in compiled(f"{_BEFORE}(?:{'|'.join(_TOKENS)})|{'|'.join(_WEBHOOKS)}").finditer(text):
        yield found.span()


def headers(text: str) -> Iterator[Span]:
    """Find what follows the scheme of a login: "Bearer ...", but no word of prose."""
    for found in compiled(_SCHEMES).finditer(text):
        if compiled(r"[A-Za-z]?[a-z]*(?:[/.-][A-Za-z]?[a-z]*)*").fullmatch(found[1]) is None:
            yield found.span(1)


def urls(text: str) -> Iterator[Span]:
    """Find passwords, tokens and signatures in URLs."""
    if "://" in text and "@" in text:
        for found in compiled(_USER_IN_URL).finditer(text):
            password, user = found[1], found[2]
            if password is not None:
                port, slash, _ = password.partition("/")
                is_path = slash and port.isdigit()  # HOST:PORT/...@..., where nothing is a password
                if not is_path and not _is_placeholder(password):
                    yield found.span(1)
            elif re.search(r"\d", user) and (len(user) >= 16 or re.search(r"[A-Z]", user)):  # TOKEN@HOST
                yield found.span(2)  # a token: people's names are shorter or have no digits
    if "=" in text:
        for found in compiled(_SIGNED, re.IGNORECASE).finditer(text):
            if not _is_placeholder(found[1]):
                yield found.span(1)


def _is_placeholder(text: str) -> bool:
    """Whether this is written in place of a value: $NAME, {name}, <name>."""
    return text.startswith(("$", "{", "<", "%(", "...", "*"))


def blobs(text: str) -> Iterator[Span]:
    """Find text that looks random, and the lines of base64 that continue it."""
    end = 0
    for found in compiled(_LONG_RUN).finditer(text):
        start = found.start()
        if start < end:  # in the lines that continue the last one
            continue
        if not is_random(found[0]) or _is_digest(text, start) or _is_path(text, start, found[0]):
            continue
        end = found.end()
        yield found.span()
        while (more := compiled(_NEXT_LINE).match(text, _line_end(text, end))) is not None:
            end = more.end(1)
            yield more.span(1)


def _line_end(text: str, at: int) -> int:
    """Return where a line ends that has but quotes and the like behind this place; else this place."""
    found = compiled(r"(?:\\n)?[\"'\\,; \t]*(?=\n)").match(text, at)
    return found.end() if found else at


def _is_digest(text: str, at: int) -> bool:
    """Whether what begins here is written as a digest: "sha256-..." of a lock file, "SHA256:..." of a public key."""
    return compiled(r"sha\d{1,3}[-:]?\Z", re.IGNORECASE).search(text[max(0, at - 8) : at]) is not None


def _is_path(text: str, at: int, found: str) -> bool:
    """Whether the text found here is a path, absolute or of a file: messages name paths, which are no secrets."""
    is_absolute = found.startswith("/") and not found.startswith("//") and found.count("/") > 1
    is_of_file = "/" in found and compiled(r"\.[a-z]\w{0,5}\b").match(text, at + len(found)) is not None
    before = text[at - 1 : at] if at else ""
    return (is_absolute and before in ("", *_AROUND, "~", ".")) or (is_of_file and before in ("", *_AROUND))


def is_random(text: str) -> bool:
    """Whether a text has letters of both cases and digits mixed as no name, path or number in hex has them.

    The shares and limits are such that they divide the tokens from the names, paths and numbers in the tests of redaction.
    """
    # without a place in a function, as traces of C have it
    text = re.sub(r"\+0x[0-9a-f]+\Z", "", text[:_SAMPLE].rstrip("="))
    if text.startswith("_Z") or compiled(r"sha\d{1,3}-", re.IGNORECASE).match(text):  # a name in C++, a digest
        return False
    kinds = ["a" if one.islower() else "A" if one.isupper() else "0" if one.isdigit() else "" for one in text]
    letters = [kind for kind in kinds if kind]  # and digits
    signs = len(kinds) - len(letters)
    if len(letters) < 20 or signs > max(2, len(kinds) // 9) or len(set(letters)) < 3:
        return False
    parts = re.split(r"[^A-Za-z0-9]+", text)
    in_words = sum(map(len, re.findall(r"[A-Z][a-z]{2,}|[a-z]{3,}", text)))  # characters
    is_plain = all(re.fullmatch(r"[0-9a-f]*|[0-9A-F]*|[A-Z]*|[A-Z]?[a-z]*", part) for part in parts)
    if in_words > 0.55 * len(letters) or is_plain:
        return False
    is_like_key_of_aws = len(text) == 40 and not set(text) & set("-_")  # these have slashes and no other signs
    least_changes = 0.48 if len(letters) < 32 else 0.34 if is_like_key_of_aws else 0.42
    changes = sum(one != other for one, other in pairwise(letters))  # from one kind to another
    return changes >= least_changes * len(letters) and _entropy(text) > 3.3


def _entropy(text: str) -> float:
    """Return the bits of a character, as often as each occurs here."""
    return -sum(number / len(text) * log2(number / len(text)) for number in Counter(text).values())


# --- keys in PEM

_KEY_MARK = r"-----(BEGIN|END) [A-Z0-9 ]{1,60}-----"
# a line of one: in a diff, a comment or a string of a program
_LONGEST_LINE_OF_KEY = 200  # characters; OpenSSL writes 64
_KEY_BODY = (
    r"(?:[+\- ]?[ \t]*(?:#|//|\*)?[ \t]*[\"'bru(]{0,4}(?:[A-Za-z0-9+/=]{1,100}|[A-Z][\w-]{0,40}: [^\n]{0,200})?"
    r"(?:\\[nr])*[\"'\\,;+) \t\r]{0,8})(?:\n|\Z)"
)


def keys(text: str) -> Iterator[Span]:
    """Find keys from their first line to the last, or as far as they go: a hunk of a diff may have only a part."""
    if "-----" not in text:
        return
    begin, last_end = None, 0  # the BEGIN whose END is yet to come; where the last key ended
    for mark in compiled(_KEY_MARK).finditer(text):
        if mark[1] == "BEGIN":
            if begin is not None:
                yield from _without_end(text, begin.start(), begin.end())
            begin = mark
            continue
        if begin is not None and "\n@@ " not in text[begin.end() : mark.start()]:  # in one hunk
            yield begin.start(), mark.end()
        else:
            if begin is not None:
                yield from _without_end(text, begin.start(), begin.end())
            yield _body_before(text, mark.start(), last_end), mark.end()
        begin, last_end = None, mark.end()
    if begin is not None:
        yield from _without_end(text, begin.start(), begin.end())


def _without_end(text: str, start: int, at: int) -> Iterator[Span]:
    """Find a key without its last line, whose first one reaches from `start` to `at`: as much as looks like its body.

    The body stands in the same line, with escapes for newlines, or in the lines below.
    """
    same_line = compiled(r"(?:\\[nr]|[A-Za-z0-9+/= ])+").match(text, at)
    at = end = same_line.end() if same_line else at
    rest = compiled(r"[\"'\\,;+) \t\r]*\n").match(text, at)
    if rest is not None:  # nothing else is in that line
        at = rest.end()
        while at < len(text) and (found := compiled(_KEY_BODY).match(text, at)) is not None and found[0].strip("+- \n"):
            at = end = found.end()
        if text[end - 1 : end] == "\n":
            end -= 1
    if end > start:
        yield start, end


def _body_before(text: str, at: int, low: int) -> int:
    """Return where the body of a key begins whose last line begins at `at`; at `low` at the earliest."""
    start = text.rfind("\n", low, at) + 1 or low  # `low`: there is no newline
    while start > low:
        line_start = text.rfind("\n", low, start - 1) + 1 or low
        line = text[line_start:start]
        may_be_word = len(line.strip("+- \n")) < 8
        if len(line) > _LONGEST_LINE_OF_KEY or may_be_word or compiled(_KEY_BODY).fullmatch(line) is None:
            break
        start = line_start
    return start
