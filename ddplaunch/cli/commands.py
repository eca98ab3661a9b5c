"""The verbs as click commands: their options from the table, their help, and shell completion. Converts no value."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ddplaunch import __version__
from ddplaunch.errors import LaunchError
from ddplaunch.options.option import Option
from ddplaunch.options.table import ALIASES, BY_NAME, OPTIONS, SHELLS
from ddplaunch.output.streams import use_colour

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VERBS = {
    "run": "Start a job; may be left out.",
    "plan": "Show what would be started, and why; start nothing.",
    "submit": "Queue the job in Slurm.",
    "ps": "Show your running jobs and their workers.",
    "logs": "Show what the workers of a run write, or have written.",
    "stacks": "Show where the workers of a running job are, and who waits for whom.",
    "stop": "Stop a running job as Ctrl-C does, and wait for its end.",
    "shim": "Write a torchrun that is ddplaunch into a folder.",
    "completion": "Print what completes our options in a shell.",
}
FORMS = (("json", "The plan as JSON."), ("sh", "The commands and variables of each worker, to paste into a shell."))
SUBMIT_OPTIONS = (
    ("--print", "Shows the script and submits nothing. Needs no Slurm."),
    (
        "--wait",
        "Waits until the job ends, reports its states, and exits with its status; of an array, with the worst.",
    ),
    ("--follow", "Shows the output of the job as it comes, too. Ctrl-C ends the waiting, not the job."),
    ("--parsable", "Prints the number of the job and nothing else."),
)
# of the verbs that look into runs: names, the name of the value ("": a flag), help
RUN_OPTIONS: dict[str, tuple[tuple[tuple[str, ...], str, str], ...]] = {
    "ps": ((("--json",), "", "All that is known, as JSON."),),
    "logs": (
        (("-r", "--ranks"), "LIST", "Of these ranks only, as 3 or 0-2,4."),
        (("-f", "--follow"), "", "Shows what is written from now on, too, until the run ends."),
        (("--grep",), "RE", "Lines only in which this is found, a regular expression of Python's."),
        (("--since",), "TIME", "What was written in this time, as 5m or 2h; up to 10 s more, in long runs longer."),
    ),
    "stacks": (
        (("-r", "--ranks"), "LIST", "Of these ranks only, as 3 or 0-2,4."),
        (("--threads",), "", "All threads, not only the main ones."),
        (("--native",), "", "With frames of C, by py-spy."),
        (("--json",), "", "All that is known, as JSON."),
    ),
    "stop": (),
}
NAMES_NO_RUN = ("ps",)
FLAGS: dict[str, Option | None] = {
    **{option.flag: option for option in OPTIONS},
    **{option.short: option for option in OPTIONS if option.short},
    **{alias.flag: BY_NAME[alias.option] for alias in ALIASES},
    "--help": None,
    "--help-all": None,
    "--version": None,
}
_KNOWN = frozenset((*FLAGS, *(f"--{name}" for name, _ in FORMS)))


def command(verb: str, show: Callable[[str], int]) -> click.Command:
    """Make the command of a verb; `show` prints a text and gives the exit status."""
    if verb == "completion":
        shell = click.Argument(["shell"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_shell)
        return _Verb(verb, params=[shell, *_help_and_version(show)])
    if verb == "shim":
        return _Verb(verb, params=[click.Argument(["folder"]), *_help_and_version(show)])
    if verb == "submit":
        flags = [_with_help(click.Option([name], is_flag=True), text) for name, text in SUBMIT_OPTIONS]
        argv = click.Argument(["job"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_job)
        return _Submit(verb, params=[*flags, *_help_and_version(show), argv])
    if verb in RUN_OPTIONS:
        return _RunVerb(verb, show)
    program = click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_files)
    forms = [_with_help(click.Option([f"--{name}"], is_flag=True), text) for name, text in FORMS if verb == "plan"]
    return _Verb(verb, params=[*forms, *map(_click_option, OPTIONS), *_aliases(), *_help_and_version(show), program])


def root(show: Callable[[str], int]) -> click.Group:
    """Make the command that holds the verbs, for the completions of a shell."""
    return _Root("ddplaunch", commands={verb: command(verb, show) for verb in VERBS}, add_help_option=False)


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
    return argument in option.choices if option.choices else argument.isdigit()


def _takes_next(argument: str, option: Option | None) -> bool:
    if not argument.startswith("--"):  # short ones may be grouped, and what follows one with a value is its value
        options = [FLAGS.get(f"-{letter}") for letter in argument[1:]]
        valued = [at for at, one in enumerate(options) if one is not None and not one.is_flag]
        return bool(valued) and valued[0] == len(options) - 1
    return option is not None and not option.is_flag


class _Verb(click.Command):
    def __init__(self, verb: str, params: list[click.Parameter]) -> None:
        super().__init__(
            verb,
            params=params,
            add_help_option=False,
            context_settings={
                "allow_interspersed_args": False,
                "max_content_width": 100,
                "token_normalize_func": lambda name: name.replace("_", "-"),
            },
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            args = with_values(args)
        except LaunchError:
            if not ctx.resilient_parsing:
                raise
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.params.get("program"):
            return _files(incomplete)  # the options from here on are the script's
        return super().shell_complete(ctx, incomplete)


class _Submit(_Verb):
    """Parses only what completion by a shell needs; see slurm/submit/args.py."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.params["job"] = tuple(args[args.index("--") + 1 :]) if "--" in args else None
        return []

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from ddplaunch.slurm.submit.sbatch_options import KNOWN

        own = super().shell_complete(ctx, incomplete)
        names = {item.value for item in own}
        others = (f"--{name}" for name in sorted(KNOWN))
        return [*own, *(CompletionItem(name) for name in others if name.startswith(incomplete) and name not in names)]


class _RunVerb(click.Command):
    """A verb that looks into a run, which it names or leaves open; options may come behind the name."""

    def __init__(self, verb: str, show: Callable[[str], int]) -> None:
        options: list[click.Parameter] = [
            click.Option(list(names), is_flag=not metavar or None, type=None if not metavar else str, help=text)
            for names, metavar, text in RUN_OPTIONS[verb]
        ]
        run = click.Argument(["run"], required=False, shell_complete=_complete_run)
        named = [] if verb in NAMES_NO_RUN else [run]
        super().__init__(verb, params=[*options, *_help_and_version(show), *named], add_help_option=False)


class _Root(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["run", *args] if args and args[0] not in VERBS else args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            run = self.commands["run"]
            return run.shell_complete(click.Context(run), incomplete)
        verbs = [CompletionItem(verb, help=text) for verb, text in VERBS.items() if verb.startswith(incomplete)]
        return [*verbs, *_files(incomplete)]


def _click_option(option: Option) -> click.Option:
    made = click.Option(
        [name for name in (option.short, option.flag, option.name) if name],
        is_flag=option.is_flag or None,  # False would let click take no value where the next argument is an option
        multiple=option.repeatable,
        type=None if option.is_flag else click.UNPROCESSED,
        shell_complete=_complete_value,
    )
    return _with_help(made, option.help)


def _with_help(option: click.Option, text: str) -> click.Option:
    """Set the text that a shell shows; given at once, click would look for an indent in it, with `inspect`."""
    option.help = text
    return option


def _aliases() -> list[click.Parameter]:
    return [click.Option([alias.flag, alias.key], type=click.UNPROCESSED, hidden=True) for alias in ALIASES]


def _help_and_version(show: Callable[[str], int]) -> list[click.Parameter]:
    def help_(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            from ddplaunch.cli import help_text  # its texts are of no use to a job

            name = str(ctx.command.name)
            ctx.exit(
                show(help_text.of(name, full=param.name == "help_all", colour=use_colour(os.environ, os.isatty(1))))
            )

    def version(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            ctx.exit(show(f"ddplaunch {__version__}"))

    def option(
        names: list[str], callback: Callable[[click.Context, click.Parameter, Any], None], text: str
    ) -> click.Option:
        made = click.Option(names, is_flag=True, is_eager=True, expose_value=False, callback=callback)
        return _with_help(made, text)

    return [
        option(["-h", "--help"], help_, "The options that people use."),
        option(["--help-all"], help_, "All options."),
        option(["-V", "--version"], version, "The version."),
    ]


def _files(incomplete: str, kind: str = "file") -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=kind)]


def _complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _files(incomplete)


def _complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem, ShellComplete

    argv = ctx.params["job"]
    if argv is None:
        return [CompletionItem("--")] if "--".startswith(incomplete) else []
    run = command("run", lambda text: 0)
    return ShellComplete(run, {}, "ddplaunch", "").get_completions(list(argv), incomplete)


def _complete_shell(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [shell for shell in SHELLS if shell.startswith(incomplete)]


def _complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from ddplaunch.runs.find import names

    found = [CompletionItem(name) for name in names(os.environ) if name.startswith(incomplete)]
    return found or _files(incomplete, "dir")


def _complete_value(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    option = BY_NAME[str(param.name)]
    choices = [CompletionItem(choice) for choice in option.choices if choice.startswith(incomplete)]
    if option.path or option.optional is not None:  # without a value, the next argument may be the script
        return [*choices, *_files(incomplete, "dir" if option.path == "folder" else "file")]
    return choices
