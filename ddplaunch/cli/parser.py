"""The words of a command line become values of options, by name, as getopt_long reads them. Converts no value, prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddplaunch.cli.verbs import ABOUT, FORMS, RUN_OPTIONS
from ddplaunch.options.option import Option
from ddplaunch.options.table import ALIASES, BY_NAME, OPTIONS

FLAGS: dict[str, Option | None] = {
    **{option.flag: option for option in OPTIONS},
    **{option.short: option for option in OPTIONS if option.short},
    **{alias.flag: BY_NAME[alias.option] for alias in ALIASES},
    "--help": None,
    "--help-all": None,
    "--version": None,
}
_KNOWN = frozenset((*FLAGS, *(f"--{name}" for name, _ in FORMS)))
_FLAG, _VALUED, _REPEATABLE = 0, 1, 2  # kinds of options


class NoSuchOption(Exception):
    """No option of the verb has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class GivenTwice(NoSuchOption):
    """The option takes one value, and is there twice; only of the options of a job does the last one count."""


class WrongValue(NoSuchOption):
    """The option lacks its value, or has one and takes none."""


def parse(verb: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the value of each option that is there, by name: a text, True for a flag, a list of texts if it may be repeated.

    "program" is what follows the options. Options of the verbs that look into runs may come behind it, too.

    Raises:
        LaunchError: it is an option of another launcher.
        NoSuchOption: it is no option.
        GivenTwice: one of a verb that looks into runs is there twice.
        WrongValue: an option lacks its value, or takes none.
    """
    of_run = verb in RUN_OPTIONS
    kinds = dict(_kinds(verb))
    words = list(argv) if of_run else with_values(argv)
    values: dict[str, Any] = {}
    program: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            program.append(word)
            if of_run:
                continue
            if words[:1] == ["--"]:  # directly behind the program torchrun drops it, and hands on any other
                words.pop(0)
            break
        for name, attached in _options(word if of_run else _dashed(word), kinds):
            key, kind = kinds[name]
            if kind == _FLAG:
                values[key] = True
                continue
            if attached is None and not words:
                raise WrongValue(name)
            if of_run and key in values:
                raise GivenTwice(name)
            value = words.pop(0) if attached is None else attached
            if kind == _REPEATABLE:
                values.setdefault(key, []).append(value)
            else:
                values[key] = value
    return {**values, "program": (*program, *words)}


def words_before(argv: Sequence[str], program: Sequence[str]) -> int:
    """Return how many words stand before the program that `parse` has found."""
    at = len(argv) - len(program)
    return at - 1 if program and argv[at] != program[0] else at  # `parse` has dropped the -- behind it


def _kinds(verb: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """The options of a verb: the key of each among the values, and its kind."""
    for names, _ in ABOUT:
        for name in names:
            yield name, (names[-1][2:].replace("-", "_"), _FLAG)
    if verb in RUN_OPTIONS:
        for of_verb, metavar, _ in RUN_OPTIONS[verb]:
            for name in of_verb:
                yield name, (of_verb[-1][2:], _VALUED if metavar else _FLAG)
    elif verb in ("run", "plan"):
        for option in OPTIONS:
            kind = _FLAG if option.is_flag else _REPEATABLE if option.repeatable else _VALUED
            for name in (option.flag, option.short):
                yield name, (option.name, kind)
        for alias in ALIASES:
            yield alias.flag, (alias.key, _VALUED)
        for form, _ in FORMS if verb == "plan" else ():
            yield f"--{form}", (form, _FLAG)


def _dashed(word: str) -> str:
    """The word with - for each _ in the name of its option."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _options(word: str, kinds: dict[str, tuple[str, int]]) -> Iterator[tuple[str, str | None]]:
    """The options in a word, each with its value if that is in the word, too: letters may be grouped, up to one with a value."""
    name, equals, value = word.partition("=")
    if name.startswith("--") or (len(name) > 2 and name in kinds):  # -np is one, too
        if name not in kinds:
            raise NoSuchOption(name)
        if equals and kinds[name][1] == _FLAG:
            raise WrongValue(name)
        yield name, value if equals else None
        return
    for at, letter in enumerate(word[1:], 2):
        name = f"-{letter}"
        if name not in kinds:
            raise NoSuchOption(name)
        if kinds[name][1] != _FLAG:
            yield name, word[at:] or None
            return
        yield name, None


def with_values(argv: Sequence[str]) -> list[str]:
    """Write beginnings of flags out, and add the value of each option whose value is optional.

    That is the next argument if it is a choice or a number, else the default: click would take any next argument, so that
    `--debug train.py` would lack its script.

    Raises:
        LaunchError: a flag is another launcher's, and not one of ours.
    """
    result: list[str] = []
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-", "--"):
        following = argv[at + 1 : at + 2]
        argument = argv[at]
        if argument.partition("=")[0].replace("_", "-") not in _KNOWN:
            from ddplaunch.options.names import written_out  # most people type whole names

            argument = written_out(argument, "".join(following))
        option = FLAGS.get(argument.replace("_", "-"))
        if option is not None and option.optional is not None:
            explicit = following if following and _is_value(option, following[0]) else []
            result.append(f"{option.flag}={explicit[0] if explicit else option.optional}")
            at += 1 + len(explicit)
            continue
        taken = following if _takes_next(argument, option) else []
        result += [argument, *taken]
        at += 1 + len(taken)
    return [*result, *argv[at:]]


def _is_value(option: Option, argument: str) -> bool:
    if option.choices:
        return argument in option.choices
    return argument.translate({44: None, 45: None} if option.listed else {}).isdigit()  # a list, as 0,2-3


def _takes_next(argument: str, option: Option | None) -> bool:
    if not argument.startswith("--"):  # short ones may be grouped, and what follows one with a value is its value
        options = [FLAGS.get(f"-{letter}") for letter in argument[1:]]
        valued = [at for at, one in enumerate(options) if one is not None and not one.is_flag]
        return bool(valued) and valued[0] == len(options) - 1
    return option is not None and not option.is_flag
