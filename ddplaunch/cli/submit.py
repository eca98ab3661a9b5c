"""`ddplaunch submit`: options of sbatch and of our own, and behind `--` the job.

sbatch reads its options as click does, but for two things: a value that begins with `--` is taken for a missing one, and an
option that is not in our table takes the next argument as its value unless that begins with `-`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete

from ddplaunch.cli import job, mistakes
from ddplaunch.cli.command import VERBS, WORDS, Command, show
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options.table import BY_NAME
from ddplaunch.spec.program import working_directory
from ddplaunch.system.errors import LaunchError
from ddplaunch.tools import submit as slurm
from ddplaunch.tools.submit.script import FLAGS, KNOWN, OPTIONAL, SHORT, USAGE, SbatchOption, SubmitRequest

SEPARATOR = "--"

_OUR_OPTIONS = ("print", "wait", "follow", "parsable", "help", "version")
_REFUSED = {"usage": "`sbatch --usage` shows it", "wrap": "ddplaunch writes the script: type the job after --"}
_NO_VALUE = "\0"  # what click gives for an option that has no value, or was typed without one


class _Value(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """The value of an option of sbatch: an SbatchOption."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SbatchOption | None:
        """Return the value with the name of its option; None: the option was not typed."""
        assert param is not None
        assert ctx is not None
        if value is False:  # a flag that is not given, in click 8.1
            return None
        name = param.opts[0].removeprefix("--")
        words: list[str] = ctx.meta[WORDS]
        is_own_word = value in words  # else it stands behind a =
        if value.startswith("--") and is_own_word:
            typed = words[words.index(value) - 1]
            hint = f"if {value} is its value, type `--{name}={value}`"
            raise LaunchError(f"{typed} needs a value, but {value} follows", hint=hint)
        return _checked(SbatchOption(name, None if value == _NO_VALUE else value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the job, one of whose options may be called as one of sbatch's."""
        return _complete(ctx, param, incomplete) if SEPARATOR in ctx.meta[WORDS] else []


class SubmitCommand(Command):
    """A command that takes all options of sbatch that we know, and others; its help shows only our own."""

    def __init__(self, *args: Any, params: Sequence[click.Parameter] = (), **settings: Any) -> None:
        """Add all options of sbatch to our own `params`; what follows the options is the job."""
        letters = {name: [f"-{letter}"] for letter, name in SHORT.items()}
        rest = click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete)
        options: list[click.Parameter] = []
        for name in sorted(KNOWN.difference(_OUR_OPTIONS)):
            # click: with a `flag_value`, an option need not have a value; without `is_flag`, it may have one
            without_value: dict[str, Any] = {"is_flag": name in FLAGS, "flag_value": _NO_VALUE}
            names = [f"--{name}", *letters.get(name, ())]
            options.append(click.Option(names, type=_Value(), **(without_value if name in FLAGS | OPTIONAL else {})))
        context = {"allow_interspersed_args": False, "ignore_unknown_options": True}
        super().__init__(*args, params=[*params, *options, rest], context_settings=context, **settings)
        self.own_options = [param for param in params if isinstance(param, click.Option)]

    def prepared(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Return what stands before the job, as click is to read it.

        Beginnings of names are written out. An option that is not in our table gets the word behind as its value, in one word.
        """
        before = args[: args.index(SEPARATOR)] if SEPARATOR in args else args
        words: list[str] = []
        for word in before:
            name, equals, value = word.removeprefix("--").partition("=")
            if word.startswith("--"):
                is_of_job = name.replace("-", "_") in BY_NAME  # an error, which `_options_not_in_table` raises
                is_whole = not name or name in KNOWN or name in _OUR_OPTIONS or is_of_job
                meant = [] if is_whole else [known for known in KNOWN if known.startswith(name)]
                words.append(f"--{meant[0] if len(meant) == 1 else name}{equals}{value}")
            elif words and not word.startswith("-") and _is_unknown_option(words[-1]):
                # the option before gets this word as its value
                words[-1] += f"={word}" if words[-1].startswith("--") else word
            else:
                words.append(word)
        return words

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return how it is typed."""
        return [USAGE.removeprefix("ddplaunch submit ")]

    def mistake(self, error: click.UsageError, args: Sequence[str]) -> LaunchError:
        """Return what is wrong with an option of sbatch that we know."""
        if not isinstance(error, click.BadOptionUsage):
            return super().mistake(error, args)
        name = error.option_name
        known = next((one for one in self.params if name in one.opts), None)
        if isinstance(known, click.Option) and not known.is_flag:
            return LaunchError(f"{name} needs a value" + (", but -- follows" if SEPARATOR in args else ""))
        return LaunchError(f"{name} takes no value", hint=f"type `{name}`")


def _is_unknown_option(word: str) -> bool:
    """Whether this is an option of one letter or name that we do not know, without a value."""
    if word.startswith("--"):
        name = word.removeprefix("--")
        return "=" not in name and name not in (*KNOWN, *_OUR_OPTIONS, *(option.key for option in BY_NAME.values()))
    return len(word) == 2 and word[0] == "-" and word[1] not in SHORT


def _checked(option: SbatchOption) -> SbatchOption:
    """Return an option of sbatch if it may stand in a batch script; else raise LaunchError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", option.name):
        raise LaunchError(f"{option.argument.partition('=')[0]!a} is not an option of sbatch", hint=USAGE)
    if option.name in _REFUSED:
        raise LaunchError(f"--{option.name} cannot be given to `ddplaunch submit`", hint=_REFUSED[option.name])
    if option.name in ("output", "error") and not option.value:
        raise LaunchError(f"--{option.name} names no file", hint=f"leave it out, or type --{option.name}=%x-%j.out")
    # a line that begins with #SBATCH ends where the line ends
    if option.value is not None and any(not character.isprintable() for character in option.value if character != "\t"):
        raise LaunchError(
            f"the value of --{option.name}, {option.value!r}, contains a character that an #SBATCH line cannot hold",
            hint="leave line breaks and control characters out",
        )
    return option


def _options_not_in_table(rest: Sequence[str], words: Sequence[str]) -> list[SbatchOption]:
    """Return the options in `rest`, what click has left of all arguments (`words`): those that are not in our table.

    Raises:
        LaunchError: a word is no option of sbatch, such as the script where the -- before it is missing.
    """
    found = []
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("-") or word == "-":
            if SEPARATOR in words:
                raise LaunchError(f"{word} before -- is neither an option of sbatch nor a value of one", hint=USAGE)
            meant = shlex.join(["ddplaunch", "submit", *_with_separator(words, words.index(word))])
            raise LaunchError("-- is missing between the options of sbatch and the job", hint=f"type `{meant}`")
        if name.replace("-", "_") in BY_NAME:
            raise LaunchError(f"--{name} is an option of ddplaunch, not of sbatch", hint=f"type it after --: {USAGE}")
        if word.startswith("--"):
            found.append(_checked(SbatchOption(name, value if equals else None)))
        else:
            found.append(_checked(SbatchOption(word[1], word[2:] or None)))
    return found


def _with_separator(words: Sequence[str], script_at: int) -> list[str]:
    """Return the line that was meant by `words` without --, whose script has this index.

    Options of sbatch go before the --, even from behind the script, unless the script's text has them, too.
    """
    text = mistakes.text_of(words[script_at]) or ""
    behind, of_sbatch, of_script = list(words[script_at + 1 :]), list[str](), list[str]()
    while behind:
        word = behind.pop(0)
        typed, equals, _ = word.partition("=")
        name = typed.removeprefix("--") if typed.startswith("--") else SHORT.get(typed.removeprefix("-"), "")
        if name not in KNOWN or not word.startswith("-") or typed in text:
            of_script.append(word)
            continue
        of_sbatch.append(word)
        needs_value = not equals and name not in FLAGS | OPTIONAL
        if needs_value and behind and not behind[0].startswith("-"):
            of_sbatch.append(behind.pop(0))
    return [*words[:script_at], *of_sbatch, SEPARATOR, words[script_at], *of_script]


def request_of(ctx: click.Context) -> SubmitRequest:
    """Return what was asked for."""
    words: list[str] = ctx.meta[WORDS]
    known = [value for value in ctx.params.values() if isinstance(value, SbatchOption)]
    options = (*known, *_options_not_in_table(ctx.params["rest"] or (), words))
    if SEPARATOR not in words:
        raise LaunchError("no job to submit: -- and a SCRIPT are missing", hint=USAGE)
    ours = {name: ctx.params[name] for name in ("print", "wait", "follow", "parsable")}
    return SubmitRequest(options=options, job=tuple(words[words.index(SEPARATOR) + 1 :]), **ours)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    words: list[str] = ctx.meta[WORDS]
    if SEPARATOR not in words:
        return [CompletionItem(SEPARATOR)] if SEPARATOR.startswith(incomplete) else []
    return ShellComplete(job.run, {}, "ddplaunch", "").get_completions(words[words.index(SEPARATOR) + 1 :], incomplete)


@click.command(
    cls=SubmitCommand,
    params=[
        click.Option(["--print"], is_flag=True, help="Print the script and submit nothing. Needs no Slurm."),
        click.Option(
            ["-W", "--wait"],
            is_flag=True,
            help="Wait until the job ends, print its states, and exit with its status; of an array, with the worst.",
        ),
        click.Option(
            ["--follow"],
            is_flag=True,
            help="Wait, and print the output of the job as it comes. Ctrl-C ends the waiting, not the job.",
        ),
        click.Option(["--parsable"], is_flag=True, help="Print only the number of the job."),
    ],
    examples=(
        (
            "ddplaunch submit --nodes 2 --gpus-per-node 4 --time 4:00:00 -- train.py --lr 0.1",
            "on two nodes with four GPUs each",
        ),
        ("ddplaunch submit --follow -p main -N 2 -- --nproc-per-node 4 train.py", "and show its output"),
        ("ddplaunch submit --print --nodes 2 -- train.py > train.sh", "a script to change and keep"),
    ),
    epilog="Unless given, the script has --job-name after SCRIPT, --nodes as in --nnodes if that is given, "
    "--ntasks-per-node=1, --output=%x-%j.out (%x-%A_%a.out for an array) and --open-mode=append.",
)
@click.pass_context
def submit(ctx: click.Context, /, **_: Any) -> int:
    """Checks the job, writes a batch script for it and hands that to Slurm's sbatch. Options before --
    go to sbatch, except those below. Arguments after -- are those of `ddplaunch` on one machine.
    """  # noqa: D205 - the help of a verb is one paragraph
    request, env = request_of(ctx), ctx.obj

    def parse_job(words: Sequence[str], job_env: Mapping[str, str]) -> tuple[int, JobSpec]:
        """Return how many of these words are SCRIPT and its arguments, and the job."""
        line = job.parse(words)
        return len(words) - len(line.before_program), job.resolve(line, job_env, working_directory())

    command = [sys.executable, "-P", "-m", "ddplaunch"]  # -P: not a ddplaunch.py that lies where the job runs
    if os.path.basename(sys.argv[0]) == "ddplaunch" and os.path.isfile(sys.argv[0]):
        command = [os.path.abspath(sys.argv[0])]  # as it was typed
    made = slurm.draft(request, env, command, parse_job, tuple(VERBS))
    return show(made.script) if request.print else slurm.send(made, request, env, show)
