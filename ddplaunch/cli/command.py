"""What all commands share: how their help looks, --help and --version, and wrong arguments as errors of ours.

A command is declared where its verb is: its docstring is its help, its options are click's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

import click

from ddplaunch import __version__
from ddplaunch.system.console.paint import CODE, STRONG, plain, styled
from ddplaunch.system.console.streams import use_colour
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import NOT_WRITTEN, OK, of_signal
from ddplaunch.system.words import did_you_mean, why_failed

Rows = Sequence[tuple[str, str]]

# in the meta of a context
WORDS = "ddplaunch.system.words"  # the arguments as they were typed
FULL_HELP = "ddplaunch.full_help"  # whether all options are shown

# the module of each verb, and its purpose
VERBS = {
    "run": ("job", "Start a job. You may leave this verb out."),
    "plan": ("job", "Show the workers of a job, and start nothing."),
    "doctor": ("doctor", "Find faults of this machine, or of all nodes."),
    "check": ("check", "Find ranks that disagree about their collectives."),
    "submit": ("submit", "Queue the job in Slurm."),
    "ps": ("running", "List your jobs and their workers, or all your runs."),
    "top": ("running", "Watch the workers of a job, in a table."),
    "logs": ("running", "Show the output of the workers."),
    "stacks": ("running", "Show where the ranks are, and who waits for whom."),
    "profile": ("running", "Trace the ranks, and show where their steps go."),
    "attach": ("running", "Open a debugger in a worker."),
    "stop": ("running", "Stop a job as Ctrl-C does, and wait for its end."),
    "report": ("running", "Write a page about a run: timeline, first failure, logs."),
    "warm": ("running", "Show the interpreters that --keep-warm keeps, or end them."),
    "shim": ("shim", "Write a torchrun that is ddplaunch into a folder."),
    "completion": ("completion", "Print a script that completes our options in a shell."),
    "help": ("help", "Show the help of a verb, or a topic."),
}
# when people need which of them
MOMENTS = {
    "Before a job": ("plan", "doctor", "check", "submit"),
    "While it runs": ("ps", "top", "logs", "stacks", "profile", "attach", "stop"),
    "After it": ("report", "logs"),
    "Once": ("warm", "shim", "completion"),
}
# the topics of `ddplaunch help`: docs/generate.py takes their texts from the pages of the documentation
TOPICS = {
    "hangs": "Find the rank that the others wait for.",
    "output": "Choose the output on the terminal, and find the logs.",
    "slurm": "Run in a batch job, or let ddplaunch write it.",
    "signals": "Stop a job, kill it, or send it a signal.",
    "exit-codes": "Each exit code, and what to do.",
    "environment": "The variables that workers get.",
    "torchrun": "Coming from torchrun, and torchrun's own options.",
}

_RUN = "A run by its name, as `ddplaunch ps` shows it, a part of its long name, its script, or its folder."
_SIGPIPE = 13  # the status 141 is what a shell shows for any program whose reader went away
_WIDEST = 100  # longer lines are hard to read
_HYPHEN = "\u2011"  # at which no line ends; no page shows it
_NARROWEST = 30
_NARROWEST_IN_COLUMNS = 78  # below it, examples have their meaning on a line of its own
_BLANKS = 4  # that click writes before and between two columns


class Page(click.HelpFormatter):
    """A page of help, in colours; `page` takes them out where none are wanted."""

    def __init__(self, width: int | None = None, max_width: int | None = None, **settings: Any) -> None:
        """Take the width of the terminal, also of a narrow one, for which click would write 50 columns."""
        if width is None:
            import shutil  # as click's own formatter does

            width = max(min(shutil.get_terminal_size().columns, max_width or _WIDEST) - 2, _NARROWEST)
        super().__init__(width=width, **settings)

    def write_text(self, text: str) -> None:
        """Write a paragraph, whose lines end between words."""
        super().write_text(_whole_words(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **settings: Any) -> None:
        """Write names and their meanings, whose lines end between words."""
        super().write_dl([(first, _whole_words(second)) for first, second in rows], *args, **settings)

    def getvalue(self) -> str:
        """Return the page."""
        return super().getvalue().replace(_HYPHEN, "-")

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write how the command is typed, on one line; `run` may be left out."""
        self.write(f"{styled('Usage:', STRONG)} {prog.removesuffix(' run')} {args}".rstrip() + "\n")

    def write_heading(self, heading: str) -> None:
        """Write a heading."""
        self.write(styled(f"{heading}:", STRONG) + "\n")

    def paragraph(self, text: str) -> None:
        """Write a paragraph behind an empty line."""
        self.write_paragraph()
        self.write_text(text)

    def rows(self, heading: str, rows: Rows) -> None:
        """Write names and their meanings."""
        with self.section(heading):
            self.write_dl([(styled(name, CODE), text) for name, text in rows], col_max=self.width // 3)

    def verbs(self) -> None:
        """Write all verbs but `run` and `help`, by the moment at which people need them."""
        self.write_paragraph()
        width = max(map(len, VERBS))
        for moment, verbs in MOMENTS.items():
            self.write_heading(moment)
            with self.indentation():
                self.write_dl([(styled(verb.ljust(width), CODE), VERBS[verb][1]) for verb in verbs])

    def examples(self, rows: Rows) -> None:
        """Write commands, which stay whole, and what they do."""
        fits = max(len(example) + len(meaning) for example, meaning in rows) + _BLANKS <= self.width
        coloured = [(styled(example, CODE), meaning) for example, meaning in rows]
        with self.section("Examples"):
            if fits and self.width >= _NARROWEST_IN_COLUMNS:
                self.write_dl(coloured, col_max=_WIDEST)
            else:
                for example, meaning in coloured:
                    self.write(f"  {example}\n")
                    with self.indentation(), self.indentation():
                        self.write_text(meaning)


def _whole_words(text: str) -> str:
    """Return a text in which click breaks no word at a hyphen, least of all the name of an option."""
    return re.sub(r"(?<=\w)-(?=\w)", _HYPHEN, text)


class Context(click.Context):
    """click's, with our pages."""

    formatter_class = Page


class Command(click.Command):
    """A verb. `takes` is what is said where there is an argument too many, `hint` what to type then."""

    context_class = Context

    def __init__(
        self,
        name: str | None,
        *,
        takes: str = "no argument",
        hint: str = "",
        examples: Rows = (),
        run_by_default: str = "",
        keys: Rows = (),
        **settings: Any,
    ) -> None:
        """Make a verb with the settings of click. `run_by_default` says, of a verb that takes RUN, which run is meant without it.

        `keys` are those of a verb that takes the keyboard.
        """
        settings["context_settings"] = {"max_content_width": _WIDEST, **settings.get("context_settings", {})}
        super().__init__(name, **{"add_help_option": False, **settings})
        self.takes = takes
        self.hint = hint
        self.examples = examples
        self.run_by_default = run_by_default
        self.keys = keys
        self.own_options = [param for param in self.params if isinstance(param, click.Option)]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return its own parameters and those that every verb has."""
        return [*self.params, *_ABOUT]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raise what click finds wrong as an error of ours, unless they ask for help somewhere."""
        ctx.meta[WORDS] = args
        try:
            return super().parse_args(ctx, self.prepared(ctx, args))
        except (click.UsageError, LaunchError) as error:
            help_flag = _help_or_version_flag(args)
            if help_flag is not None and args != [help_flag] and not ctx.resilient_parsing:
                # a line is not read for its mistakes where help is asked for
                return super().parse_args(ctx, [help_flag])
            mistake = self.mistake(error, args) if isinstance(error, click.UsageError) else error
            mistake.is_same_in_each_task = True  # of srun: all have the same line
            raise mistake from None

    def prepared(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Return the arguments as click understands them: the beginning of one option's name alone is that option."""
        names = [name for param in self.get_params(ctx) for name in param.opts]
        words = list(args)
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            meant = [each for each in names if each.startswith(name)]
            if word == "--":
                break
            if name.startswith("--") and name not in names and len(meant) == 1:
                words[at] = meant[0] + equals + value
        return words

    def mistake(self, error: click.UsageError, args: Sequence[str]) -> LaunchError:
        """Return what is wrong with the arguments, in our words."""
        verb = f"ddplaunch {self.name}"
        names = {name: option for option in self.own_options for name in option.opts}
        match error:
            case click.NoSuchOption(option_name=name):
                meant = did_you_mean(name, [*names, "--help"] if names else [])
                hint = f"did you mean `{meant}`?" if meant else f"{verb} --help"
                return LaunchError(f"{name} is not an option of {verb}", hint=hint)
            case click.BadOptionUsage(option_name=name):
                metavar = names[name].metavar if name in names else None
                lacks = f"needs a value ({metavar})" if metavar else "takes no value"
                return LaunchError(f"{name} {lacks}", hint=f"{verb} --help")
        meant = next((f"did you mean `{verb} --{word}`?" for word in args if f"--{word}" in names), None)
        return LaunchError(f"{verb} takes {self.takes}", hint=meant or self.hint or f"{verb} --help")

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return how it is typed, each of its options by its shortest name."""
        options = [f"[{option.opts[0]}{f' {option.metavar}' if option.metavar else ''}]" for option in self.own_options]
        return [*options, *(param.human_readable_name for param in self.params if isinstance(param, click.Argument))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its arguments, its own options, its keys, and examples."""
        assert isinstance(formatter, Page)
        if self.run_by_default:
            formatter.rows("Arguments", [("RUN", f"{_RUN} {self.run_by_default}")])
        if rows := [record for option in self.own_options if (record := option.get_help_record(ctx))]:
            formatter.rows("Options", rows)
        if self.keys:
            formatter.rows("Keys", self.keys)
        if self.examples:
            formatter.examples(self.examples)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what it does, not indented."""
        assert isinstance(formatter, Page)
        formatter.paragraph(" ".join((self.help or "").split()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what is left to be said, not indented."""
        if self.epilog and isinstance(formatter, Page):
            formatter.paragraph(self.epilog)


class Once(click.Option):
    """An option that may be there once: of two values click would drop one silently."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"multiple": True, **settings})

    def process_value(self, ctx: click.Context, value: Any) -> str | None:
        """Return the value, None for none; raise LaunchError for two values, or where an option follows in place of one."""
        values: Sequence[str] = super().process_value(ctx, value)  # all of them, since `multiple` is set
        if len(values) > 1:
            hint = f"give all in one list: `{self.opts[-1]} 0,4`" if self.metavar == "LIST" else "give it once"
            raise LaunchError(f"{', '.join(self.opts)} is given twice", hint=hint)
        text = next(iter(values), None)
        options = (param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option))
        if any(text in option.opts for option in options):  # it would become the name of a file
            lacks = f"needs a value ({self.metavar}), but {text} follows"
            raise LaunchError(f"{self.opts[-1]} {lacks}", hint=f"{ctx.command_path} --help")
        return text


def show(text: str) -> int:
    """Write a text and a newline to stdout, and return the exit status: that of a program whose reader went away, if it has."""
    if sys.stdout is None:  # closed by the caller
        return OK
    try:
        # names of files that are not UTF-8 are written as they were read
        sys.stdout.buffer.write(f"{text.rstrip()}\n".encode(errors="surrogateescape"))
        sys.stdout.flush()
    except OSError as error:
        return not_written(error)
    return OK


def not_written(error: OSError) -> int:
    """Return the exit status of a command whose reader has gone away."""
    # what is left in the buffer would fail once more when the interpreter ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        return of_signal(_SIGPIPE)
    raise LaunchError(f"cannot write to stdout: {why_failed(error)}", status=NOT_WRITTEN)


def page(ctx: click.Context, text: str, *, fd: int = 1) -> str:
    """Return a page of help as it is shown on this descriptor."""
    return text if use_colour(ctx.find_root().obj or os.environ, os.isatty(fd)) else plain(text)


def _about(*names: str, meaning: str, text_of: Callable[[click.Context], str]) -> click.Option:
    """Return an option that shows a text instead of running the verb; `meaning` stands for it in the help."""

    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[FULL_HELP] = "--help-all" in names
            ctx.exit(show(text_of(ctx)))

    return click.Option(names, is_flag=True, is_eager=True, expose_value=False, help=meaning, callback=callback)


def _help_or_version_flag(args: Sequence[str]) -> str | None:
    """Return the first flag that asks for help or the version; None where a script or another program stands before it."""
    before = takewhile(lambda word: (word.startswith("-") and word != "--") or not os.path.lexists(word), args)
    names = {name for option in _ABOUT for name in option.opts}
    return next((word for word in before if word in names), None)


def _help_page(ctx: click.Context) -> str:
    return page(ctx, ctx.get_help())


def _version(_ctx: click.Context) -> str:
    return f"ddplaunch {__version__}"


_ABOUT = (
    _about("-h", "--help", meaning="The options used most.", text_of=_help_page),
    _about("--help-all", meaning="All options.", text_of=_help_page),
    _about("-V", "--version", meaning="The version.", text_of=_version),
)
