"""Finds secrets by what stands beside them: their names, in any syntax, or the commands and calls that take them. Pure.

The names stand in assignments, options, fields of JSON, YAML and INI, headers and defaults; the commands are `sshpass -p`,
`curl -u`, `wandb login`, IDENTIFIED BY and the like. Each finder goes through a text once, and looks from a name no farther
than to the end of its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ddplaunch.system.redaction.names import BEFORE_TEXT_TOKEN, LONGEST_NAME, SECRET_PARTS, is_secret, is_value
from ddplaunch.system.redaction.shapes import Span, compiled


class Syntax(Enum):
    """What a text is written in, as far as that is known."""

    CODE = "code"  # a word without quotes is a name
    SETTINGS = "settings"  # a word without quotes is a value, to the end of its line
    ANY = "any"


class _Named(NamedTuple):
    """A place in a text where the name of a secret stands, which a value may follow."""

    text: str
    start: int
    end: int
    name: str
    syntax: Syntax

    @property
    def before(self) -> str:
        """What stands before the name in its line, as far as it is looked at."""
        low = max(0, self.start - _LOOK_BACK)
        return self.text[max(self.text.rfind("\n", low, self.start) + 1, low) : self.start]

    @property
    def character_before(self) -> str:
        """The character before the name, "" at the beginning of the text."""
        return self.text[self.start - 1 : self.start]


_LONGEST_OPEN_QUOTE = 4096  # characters in which a quote is closed that is not closed in its line
_SHORTEST_ARGUMENT = 4  # characters of an argument of a call: shorter ones are formats and modes
_LONGEST_EXPRESSION = 250  # characters of an expression that are looked at, from where it begins
_LOOK_BACK = 500  # characters before a name that are looked at, and at most so many of an expression
_EOL = r"(?:\n[+\- ]?[ \t]*+)"  # the end of a line, and what begins the next one, in a diff too
_QUOTE = r"\\{0,3}[\"'`]"
_QUOTED = rf"[rbfuRBFU]{{0,2}}{_QUOTE}"  # how a text in quotes begins
_NAME = r"[A-Za-z_][\w.]{0,80}"
_TYPE = rf"{_NAME}(?:\[[^\]\n]{{0,80}}\])?(?:[ \t]*+\|[ \t]*+{_NAME}(?:\[[^\]\n]{{0,80}}\])?){{0,4}}"
# what may stand between a name and its value; the group is called by the way in which the value is given: behind a type, behind a
# sign, as NAME: ..., VALUE: ..., as the next text in quotes, by default=..., between tags of XML, as the next word
_WAYS = (
    rf"(?P<types>[ \t]*+:[ \t]*+{_TYPE}[ \t]*+=[ \t]*+(?=[rbfuRBFU]{{0,2}}[\"'(]|{_NAME}\())",
    rf"(?P<assigns>(?:{_QUOTE})?[ \t]*+\]?[ \t]*+(?:=>|<-|[:?+]=|[!=]==?|[=:](?![=:]))[ \t]*+)",
    rf"(?P<pairs>(?:{_QUOTE})?[ \t]*+,?[ \t]*+{_EOL}?(?:{_QUOTE})?(?P<value>\bvalue(?:{_QUOTE})?[ \t]*+[:=][ \t]*+))",
    rf"(?P<lists>{_QUOTE}[ \t]*+,[ \t]*+{_EOL}?(?=[rbfu]{{0,2}}\\{{0,3}}[\"']))",
    rf"(?P<defaults>{_QUOTE}[ \t]*+,(?:[^\n]|(?<=,)\n){{0,300}}?\bdefault[ \t]*+=[ \t]*+(?={_QUOTED}))",
    rf"(?P<tags>(?:{_QUOTE})?[ \t]*+>)",
    r"(?P<follows>[ \t]++(?:['\"](?=[^'\"\n]*['\"]))?(?=[^\s=:]))",
)
_BRACKET_OR_NEXT_LINE = rf"(?:[(\[][ \t]*+{_EOL}{{0,3}}|\\[ \t]*+{_EOL}|{_EOL}(?={_QUOTED}))"
_OPENING_QUOTE = r"(?P<prefix>[rbfuRBFU]{0,2})(?P<quote>\\{0,3}(?:\"\"\"|'''|[\"'`]))"
_JOINT = rf"[ \t]*+(?:\+[ \t]*+)?(?:\\[ \t]*+{_EOL})?(?={_QUOTED})"
_JOINT_IN_BRACKETS = rf"[ \t]*+[+,]?[ \t]*+{_EOL}{{0,3}}(?:\+[ \t]*+)?(?={_QUOTED})"
_LOGIN_SCHEME = r"(?i:Bearer|Basic|Token|ApiKey|Digest)[ \t]++(?!(?:if|or|and|else|for|in|is|not)\b)"
_YAML_BLOCK = r"[|>][+-]?\d?[ \t]*+(?:#[^\n]*)?(?=\n)"
_CALL_BEGINS = rf"{_NAME}\("
_SEVERAL_TARGETS = r"[+\- ]?[ \t]*+(?:[\w.]++[ \t]*+,[ \t]*+)+"  # user, password = "...", "..."
# calls whose arguments say where a secret is
_CALLS_THAT_REFER = (
    r"(?:.*\.)?(?:getenv|getpass|input|open|Path|get_secret\w*|read_text|prompt|path|join|environ|Depends|ask|field)\("
)
_EXPRESSION = (
    r"(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*(?:[\[(].*)?|[A-Za-z_][\w.]*[\[(].*|(?:lambda|await)\b.*"
    r"|[A-Za-z_]\w*\s+(?:if|or|and|else|for|in|is)\s.*"
)
_HEADER_VALUE = r"[^\"'\n]+"
_UNQUOTED_WORD = r"[^\s\"'`,;&)}\]<>|\\]+"
# what may stand before a name that begins a line, or is the end of a longer one
_BEFORE_FIRST_NAME = (
    r"[+\- ]?[ \t]*+(?:#[ \t]*+|//[ \t]*+|-[ \t]++|(?:export|set|setenv|local|ENV|ARG)[ \t]++|declare[ \t]++(?:-\w+[ \t]++)*"
    r"|//[\w./:-]*)*(?:[\w./-]+[.:/])?"
)
_LONGEST_NETRC_ENTRY = 260  # characters before its password
# words of a sentence that no option takes
_SMALL_WORDS = "to|and|or|is|are|in|for|from|with|the|an?|as|at|of|on|be|was|if|but|that|this|which|needs|takes|has|not"


def values(text: str, syntax: Syntax) -> Iterator[Span]:
    """Find the values beside the names of secrets."""
    done = 0  # where the last name or value ends: nothing before that is looked at again
    for part in compiled("|".join(SECRET_PARTS), re.IGNORECASE).finditer(text):
        if part.start() < done:
            continue
        start, end = _name_around(text, part.start(), done)
        done = end
        name = text[max(start, end - LONGEST_NAME) : end]
        is_of_text = name.lower() == "token" and _is_of_text(text, start)  # as "unexpected token"
        if is_of_text or not is_secret(name):
            continue
        for span in _values_beside(_Named(text, start, end, name, syntax)):
            done = max(done, span[1])
            yield span


def _is_of_text(text: str, start: int) -> bool:
    """Return whether the word before a token says that it is one of a text: `unexpected token: "}"`."""
    before = compiled(r"([A-Za-z]+) \Z").search(text, max(0, start - 20), start)
    return before is not None and before[1].lower() in BEFORE_TEXT_TOKEN


def _name_around(text: str, at: int, low: int) -> Span:
    """Return where a name begins and ends of which a part stands at `at`; it begins at `low` at the earliest."""
    start = at
    while start > max(low, at - LONGEST_NAME) and (text[start - 1].isalnum() or text[start - 1] in "_-."):
        start -= 1
    found = compiled(r"[\w.-]*").match(text, at)
    end = found.end() if found else at
    while end > at and text[end - 1] in ".-":
        end -= 1
    return start, end


def _values_beside(named: _Named) -> Iterator[Span]:
    """Find what is assigned to a name, or follows a name as the value of an option: by the first of _WAYS that gives a value."""
    text = named.text
    for pattern in _WAYS:
        found = compiled(pattern).match(text, named.end)
        if found is None:
            continue
        at, way = found.end(), found.lastgroup
        if way == "follows":  # --token VALUE, the last way
            if _takes_next_word(named):
                yield from _next_word(named, at)
            return
        if way == "tags":  # <token>VALUE</token>
            if "<" in named.before and (closing := compiled(r"[^<>\n]*(?=</)").match(text, at)):
                yield from _span_if_secret(at, closing.end(), text, named.name)
            return
        if way == "lists" and named.character_before not in ("'", '"'):  # "NAME", "VALUE"
            continue  # the text in quotes begins before the name, and so is more than that
        if named.character_before == "/" and "=" not in found[0]:
            return  # the name is the end of a path
        if way == "pairs":  # name: TOKEN, value: VALUE; what stands before the value is judged from the word "value" on
            named = named._replace(start=found.start("value"))
        spans = list(_value_at(named, at, is_assigned=way in ("assigns", "pairs")))
        if spans:
            yield from spans
            return


def _value_at(named: _Named, at: int, *, is_assigned: bool) -> Iterator[Span]:
    """Find the value that begins at `at`: in quotes, in lines below, or without quotes where a sign assigns it."""
    text, name = named.text, named.name
    opened = compiled(_BRACKET_OR_NEXT_LINE).match(text, at)
    is_in_brackets = opened is not None and opened[0].lstrip()[:1] in ("(", "[")
    first = opened.end() if opened else at
    if (quote_mark := compiled(_OPENING_QUOTE).match(text, first)) is not None:
        is_docstring = opened is not None and opened[0].startswith("\n") and len(quote_mark["quote"]) == 3
        if is_docstring or _closes_earlier_quote(named, first, quote_mark["quote"]):  # no value begins here
            return
        is_of_several = compiled(_SEVERAL_TARGETS).fullmatch(named.before) is not None  # user, token = "...", "..."
        yield from _quoted(text, first, name, goes_on=is_in_brackets or is_of_several)
        end = _end_of_quoted(text, quote_mark.end(), quote_mark["quote"])
        yield from _quoted_fallbacks(text, end, name)  # "" or "VALUE"
        return
    if (block := compiled(_YAML_BLOCK).match(text, at)) is not None:
        yield from _yaml_block(named, block.end())
        return
    if opened is not None and "\n" in opened[0]:  # without quotes, the next line may be anything
        return
    if (call := compiled(_CALL_BEGINS).match(text, at)) is not None:
        refers = compiled(_CALLS_THAT_REFER).fullmatch(call[0])  # the arguments say where the value is: getenv("...")
        if refers is None:
            yield from _quoted_arguments(text, call.end(), name)
        yield from _quoted_fallbacks(text, at, name)  # getenv("...") or "VALUE"
        return
    if is_assigned:
        yield from _quoted_fallbacks(text, at, name)  # name or "VALUE"
        yield from _unquoted(named, at)


# --- in quotes


def _quoted(text: str, at: int, name: str, *, goes_on: bool) -> Iterator[Span]:
    """Find the text in quotes that begins at `at`, and each that is joined to it: "a" "b", "a" + "b".

    `goes_on`: also those on the next lines and behind commas, as in brackets.
    """
    joint = compiled(_JOINT_IN_BRACKETS if goes_on else _JOINT)
    while (opening := compiled(_OPENING_QUOTE).match(text, at)) is not None:
        begin = opening.end()
        end = _end_of_quoted(text, begin, opening["quote"])
        yield from _span_if_secret(begin, end, text, name)
        following = joint.match(text, min(end + len(opening["quote"]), len(text)))
        has_no_end = end >= len(text) or text[end] == "\n"
        if following is None or has_no_end:
            return
        at = following.end()


def _closes_earlier_quote(named: _Named, at: int, quote: str) -> bool:
    """Return whether the quote at `at` ends what was begun before the name, as in `getpass("Password: ")`."""
    text, before = named.text, named.before
    if len(before) >= _LOOK_BACK or text[at + len(quote) : at + len(quote) + 1] not in ("", *" \t\n),]}:;.+"):
        return False
    before = compiled(r"(?<=[a-z]{2})(?<!rb)(?<!br)'(?=[a-z])").sub("", before)  # as in "don't"
    return (before + text[named.start : at]).count(quote) % 2 == 1


def _end_of_quoted(text: str, at: int, quote: str) -> int:
    """Return where a text ends that begins at `at`, behind `quote`; without a closing quote, the end of its line."""
    if quote.endswith(('"""', "'''")):
        end = text.find(quote, at)
        return end if end >= 0 else len(text)
    if quote.startswith("\\"):  # in a text that is in quotes itself
        line_end = text.find("\n", at)
        line_end = line_end if line_end >= 0 else len(text)
        end = text.find(quote, at, line_end)
        return end if end >= 0 else line_end
    found = compiled(rf"(?:[^{quote}\\\n]++|\\(?s:.))*+").match(text, at)
    end = found.end() if found else at
    if text[end : end + 1] == "\n":  # YAML, TOML and shells let it go on
        far = text.find(quote, end, at + _LONGEST_OPEN_QUOTE)
        if far >= 0 and compiled("[:=]").search(text, end, far) is None:  # else the quote belongs to another name
            return far
    return end


def _span_if_secret(begin: int, end: int, text: str, name: str) -> Iterator[Span]:
    """Yield this place, without the scheme of a login before the secret, if a secret stands there."""
    if (scheme := compiled(_LOGIN_SCHEME).match(text, begin, end)) is not None and scheme.end() < end:
        begin = scheme.end()
    inner = text[begin:end].rstrip("\\")
    if is_value(inner, name) and not _is_name_itself(inner):
        yield begin, begin + len(inner)


def _is_name_itself(text: str) -> bool:
    """Return whether a text is a name itself, as in a list of variables, a flag, or a sentence that asks for a secret."""
    return (
        (text.isupper() and "_" in text and text.replace("_", "").isalpha())
        or compiled(r"--?[a-z][\w-]*").fullmatch(text[:LONGEST_NAME]) is not None
        or compiled(r"[A-Za-z ,']{1,60}: ?").fullmatch(text[:LONGEST_NAME]) is not None
    )


def _quoted_arguments(text: str, at: int, name: str) -> Iterator[Span]:
    """Find the texts in quotes among the arguments, from `at` to the end of the line, of a call whose result `name` gets."""
    for found in compiled(rf"{_OPENING_QUOTE}|[)\n]").finditer(text, at, at + _LONGEST_EXPRESSION):
        if found["quote"] is None:  # the call or the line ends
            return
        if found.start() >= at:  # else the quote is in the argument before, or closes it
            end = _end_of_quoted(text, found.end(), found["quote"])
            if end - found.end() >= _SHORTEST_ARGUMENT and not is_secret(text[found.end() : end]):  # get("api_key")
                yield from _span_if_secret(found.end(), end, text, name)
            at = end + len(found["quote"])


def _quoted_fallbacks(text: str, at: int, name: str) -> Iterator[Span]:
    """Find what the expression at `at` takes otherwise, in its line: `... or "..."`, `... else "..."`, `field(default="...")`."""
    line = text.find("\n", at, at + _LONGEST_EXPRESSION)
    until = line if line >= 0 else at + _LONGEST_EXPRESSION
    for found in compiled(rf"(?:\bor\b|\belse\b|\|\||\?\?|\bdefault[ \t]*+=)[ \t]*+{_OPENING_QUOTE}").finditer(
        text, at, until
    ):
        yield from _span_if_secret(found.end(), _end_of_quoted(text, found.end(), found["quote"]), text, name)


def _yaml_block(named: _Named, at: int) -> Iterator[Span]:
    """Find the lines of a block of YAML behind `at`: they begin farther to the right than the line of its name."""
    text = named.text
    line = text.rfind("\n", max(0, named.start - _LOOK_BACK), named.start) + 1
    is_in_diff = text[line : line + 1] == "+"  # the first character of a line says what became of the line
    indent = _indent(text[line : named.start], is_in_diff=is_in_diff)
    end = at
    while end < len(text):
        line_end = text.find("\n", end + 1)
        line_end = len(text) if line_end < 0 else line_end
        content = text[end + 1 : line_end]
        has_text = bool((content[1:] if is_in_diff else content).strip())
        if has_text and _indent(content, is_in_diff=is_in_diff) <= indent:
            break
        end = line_end
    if text[at:end].strip("+- \n"):
        yield at + 1, end


def _indent(line: str, *, is_in_diff: bool) -> int:
    content = line[1:] if is_in_diff else line
    return len(content) - len(content.lstrip(" -"))


# --- without quotes


def _unquoted(named: _Named, at: int) -> Iterator[Span]:
    """Find a value without quotes that begins at `at`: a word, or the rest of a line that begins with the name.

    Except in settings and headers, it may be no value: a sentence, an expression, or the name of another value.
    """
    text, before = named.text, named.before
    is_in_quotes = before.count('"') % 2 == 1 or before.count("'") % 2 == 1
    begins_line = not is_in_quotes and compiled(_BEFORE_FIRST_NAME).fullmatch(before.rstrip("\"'")) is not None
    is_cookie = named.name.lower() in ("cookie", "set-cookie")  # a header, whose value has spaces
    if (scheme := compiled(_LOGIN_SCHEME).match(text, at)) is not None:  # of a header, too: "Bearer VALUE"
        value = text[scheme.end() : _end_of_match(text, scheme.end(), _UNQUOTED_WORD)]
        yield from _span_unless_brackets(named, scheme.end(), value)
        return
    pattern = _HEADER_VALUE if is_cookie else _UNQUOTED_WORD
    value = text[at : _end_of_line(text, at) if begins_line else _end_of_match(text, at, pattern)]
    if named.syntax is not Syntax.SETTINGS and not is_cookie:
        sign = text[at - 1 : at]
        if not sign.isspace() and sign != ":":  # NAME=VALUE, and perhaps a command behind it
            value = value.split(maxsplit=1)[0] if value.strip() else value
        value = value.rstrip(",;)")
        if _is_code_or_prose(named, at, value, begins_line=begins_line, is_in_quotes=is_in_quotes):
            return
    yield from _span_unless_brackets(named, at, value)


def _span_unless_brackets(named: _Named, at: int, value: str) -> Iterator[Span]:
    """Yield the place of a value if it is a secret; brackets alone begin a value in the next lines."""
    if value.strip("[]{}() ,"):
        yield from _span_if_secret(at, at + len(value), named.text, named.name)


def _is_code_or_prose(named: _Named, at: int, value: str, *, begins_line: bool, is_in_quotes: bool) -> bool:
    """Return whether what stands at `at` is no value: a sentence, an expression, or the name of another value."""
    text = named.text
    up_to_value = text[named.start : at]  # the name, and the sign behind it
    has_space_before = up_to_value[-1:].isspace()
    rest_of_line = text[at : at + _LOOK_BACK].partition("\n")[0]
    if (
        _is_sentence_or_comparison(value, up_to_value, begins_line=begins_line)
        or _is_expression(value)
        or (has_space_before and _is_expression(rest_of_line))  # with spaces in it
    ):
        return True
    character_behind = text[at + len(value) : at + len(value) + 1]
    if not is_in_quotes and _is_name_of_value(value, named.name, named.before, character_behind):
        return True
    names = r"[A-Z][a-zA-Z]*" if ":" in up_to_value else r"[a-z_]+"  # NAME: TYPE, and NAME = OTHER_NAME
    return named.syntax is Syntax.CODE and has_space_before and compiled(names).fullmatch(value) is not None


def _is_sentence_or_comparison(value: str, up_to_value: str, *, begins_line: bool) -> bool:
    """Return whether what stands behind a name and a sign is a sentence, or something that is compared with it, and no value."""
    is_tight = not up_to_value[-1:].isspace() and not up_to_value.endswith(":")
    is_compared = up_to_value.strip("\"' ]\t").endswith(("==", "!="))
    if is_compared or (begins_line and not is_tight and len(value.split()) > 1):
        return True
    return not begins_line and not is_tight and value.isalpha() and value.islower()


def _end_of_line(text: str, at: int) -> int:
    """Return where a value ends that goes on to the end of its line, or to a comment."""
    line = text.find("\n", at)
    line = len(text) if line < 0 else line
    comment = compiled(r"[ \t](?:#|//|;)").search(text, at, line)
    end = comment.start() if comment else line
    return at + len(text[at:end].rstrip(" \t\r\\"))


def _end_of_match(text: str, at: int, pattern: str) -> int:
    found = compiled(pattern).match(text, at)
    end = found.end() if found else at
    return at + len(text[at:end].rstrip(".:"))


def _is_name_of_value(value: str, name: str, before: str, after: str) -> bool:
    """Return whether this is the name of a value: NAME=WORD among the arguments of a call, NAME=NAME."""
    is_argument = before.rstrip()[-1:] in ("(", ",") and after in (")", ",") and value.isidentifier()
    return is_argument or value == name


def _is_expression(text: str) -> bool:
    """Return whether this is an expression of a program: a call, a name in another one."""
    return compiled(_EXPRESSION).fullmatch(text.rstrip().rstrip(",)}];")[:_LOOK_BACK]) is not None


# --- as the next word


def _takes_next_word(named: _Named) -> bool:
    """Return whether the word behind a name is its value: of an option --NAME, of a variable of Docker, of a file .netrc."""
    name = named.name
    if name.startswith("-"):
        begins_word = named.character_before in ("", *" \t\n+\"'=([{,")
        return begins_word and (name.startswith("--") or len(name) > 3)  # -token is one, -pw is none
    before = named.text[max(0, named.start - _LONGEST_NETRC_ENTRY) : named.start]
    line = before.rpartition("\n")[2]
    if name.lower() in ("password", "passwd"):  # of .netrc, in one line or in several
        login = line if line.strip("+- \t") else before
        if compiled(r"\b(?:machine|login|default)\b").search(login):
            return True
    return compiled(r"[+\- ]?[ \t]*+(?:ENV|setenv|setx|ARG|#define|set[ \t]+-\w+)[ \t]+").fullmatch(line) is not None


def _next_word(named: _Named, at: int) -> Iterator[Span]:
    """Find the word that begins at `at`, or what is in quotes there: no option, and no small word of a sentence."""
    text = named.text
    if text[at - 1 : at] in ('"', "'"):
        end = _end_of_quoted(text, at, text[at - 1])
    else:
        found = compiled(r"[^\s\"'`]+").match(text, at)
        end = found.end() if found else at
        if text[at:end].endswith((",", ")", ":", "]")):
            end -= 1
    word = text[at:end]
    if not word.startswith("-") and compiled(_SMALL_WORDS).fullmatch(word) is None:
        yield from _span_if_secret(at, end, text, named.name)


# --- of commands, calls and SQL


_SECRET = r"(?P<secret>[^\s\"'|;&<>]+)"
_SECRET_WORD = rf"[\"']?{_SECRET}"
_BETWEEN = r"\b[^\n|;]{0,200}?[ \t]"
_SECRET_QUOTED = r"[\"'](?P<secret>[^\"'\n]+)"
_COMMANDS = (
    rf"\bsshpass[ \t]+-p[ \t]*{_SECRET_WORD}",
    rf"\b(?:mysql\w*|mariadb[\w-]*){_BETWEEN}-p{_SECRET_WORD}",
    rf"\b(?:curl|wget|http){_BETWEEN}(?:-u|--user|--proxy-user)[ \t=]*[\"']?[^\s:\"'|;]{{0,99}}:{_SECRET}",
    rf"\bcurl{_BETWEEN}(?:-b|--cookie)[ \t=]+[\"']?[\w.-]{{1,99}}={_SECRET}",
    rf"\bldap\w+{_BETWEEN}-w[ \t]+{_SECRET_WORD}",
    rf"\bzip{_BETWEEN}-P[ \t]+{_SECRET_WORD}",
    rf"\b(?:redis-cli){_BETWEEN}-a[ \t]+{_SECRET_WORD}",
    rf"\b(?:mongo\w*|(?:docker|podman|helm|az|oc)\b[^\n|;]{{0,80}}?[ \t]login){_BETWEEN}-p[ \t]+{_SECRET_WORD}",
    rf"\bwandb[ \t]+login[ \t]+(?:--[\w-]+[ \t]+){{0,5}}(?!-){_SECRET_WORD}",
    rf"\becho[ \t]+(?:-n[ \t]+)?{_SECRET_WORD}[\"']?[ \t]*\|[^\n|;]{{0,200}}?--(?:password-stdin|with-token)",
    rf"\bssh-keygen{_BETWEEN}-N[ \t]+{_SECRET_WORD}",
    rf"[ \t]-pass(?:in|out)?[ \t]+pass:{_SECRET_WORD}",
    rf"\bconfigure[ \t]+set[ \t]+[\w.-]{{0,80}}(?:secret|token)[\w.-]{{0,80}}[ \t]+{_SECRET_WORD}",
    rf"\b(?:IDENTIFIED[ \t]+BY|(?i:password))[ \t]+{_SECRET_QUOTED}",
    rf"\blogin\([ \t]*(?:key[ \t]*=[ \t]*)?[rbfu]?{_SECRET_QUOTED}",
    rf"\blogin\([ \t]*[^\n,()]{{1,200}},[ \t]*[rbfu]?{_SECRET_QUOTED}",
    rf"[\"']wandb[\"'],[ \t]*[\"']login[\"'],[ \t]*{_SECRET_QUOTED}",
)


def arguments(text: str) -> Iterator[Span]:
    """Find what commands, calls and SQL take as a secret without a name for it: `curl -u`, `login("...")`."""
    for command in _COMMANDS:
        for found in compiled(command).finditer(text):
            if is_value(found["secret"], "password"):
                yield found.span("secret")
