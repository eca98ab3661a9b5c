"""The verbs as click commands, which complete what a shell has of a command line. Parses no whole one: see `parser.py`."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem, ShellComplete

from ddplaunch.cli.parser import with_values
from ddplaunch.cli.verbs import ABOUT, FORMS, NAMES_NO_RUN, RUN_OPTIONS, SUBMIT_OPTIONS, VERBS
from ddplaunch.errors import LaunchError
from ddplaunch.options.option import Option
from ddplaunch.options.table import ALIASES, BY_NAME, OPTIONS, SHELLS


def command(verb: str) -> click.Command:
    """Make the command of a verb."""
    if verb == "completion":
        shell = click.Argument(["shell"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_shell)
        return _Verb(verb, params=[shell, *_about()])
    if verb == "shim":
        return _Verb(verb, params=[click.Argument(["folder"]), *_about()])
    if verb == "submit":
        flags = [_with_help(click.Option([name], is_flag=True), text) for name, text in SUBMIT_OPTIONS]
        argv = click.Argument(["job"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_job)
        return _Submit(verb, params=[*flags, *_about(), argv])
    if verb in RUN_OPTIONS:
        return _RunVerb(verb)
    program = click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_files)
    forms = [_with_help(click.Option([f"--{name}"], is_flag=True), text) for name, text in FORMS if verb == "plan"]
    return _Verb(verb, params=[*forms, *map(_click_option, OPTIONS), *_aliases(), *_about(), program])


def root() -> click.Group:
    """Make the command that holds the verbs, for the completions of a shell."""
    return _Root("ddplaunch", commands={verb: command(verb) for verb in VERBS}, add_help_option=False)


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
            pass  # it is not finished yet
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.params.get("program"):
            return _files(incomplete)  # the options from here on are the script's
        return super().shell_complete(ctx, incomplete)


class _Submit(_Verb):
    """Finds the job behind the options of sbatch; they are parsed in slurm/submit/args.py."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["job"] = tuple(args[args.index("--") + 1 :]) if "--" in args else None
        return []

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from ddplaunch.slurm.submit.sbatch_options import KNOWN

        own = super().shell_complete(ctx, incomplete)
        names = {item.value for item in own}
        others = (f"--{name}" for name in sorted(KNOWN))
        return [*own, *(CompletionItem(name) for name in others if name.startswith(incomplete) and name not in names)]


class _RunVerb(click.Command):
    """A verb that looks into a run, which it names or leaves open; options may come behind the name."""

    def __init__(self, verb: str) -> None:
        options: list[click.Parameter] = [
            click.Option(
                list(names),
                is_flag=not metavar or None,
                type=None if not metavar else str,
                help=text,
                shell_complete=_complete_rank if "-r" in names else None,
            )
            for names, metavar, text in RUN_OPTIONS[verb]
        ]
        run = click.Argument(["run"], required=False, shell_complete=_complete_run)
        named = [] if verb in NAMES_NO_RUN else [run]
        super().__init__(verb, params=[*options, *_about(), *named], add_help_option=False)


class _Root(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["run", *args] if args and args[0] not in VERBS else args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
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


def _about() -> list[click.Parameter]:
    return [_with_help(click.Option(list(names), is_flag=True), text) for names, text in ABOUT]


def _files(incomplete: str, kind: str = "file") -> list[CompletionItem]:
    return [CompletionItem(incomplete, type=kind)]


def _complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _files(incomplete)


def _complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    argv = ctx.params["job"]
    if argv is None:
        return [CompletionItem("--")] if "--".startswith(incomplete) else []
    run = command("run")
    return ShellComplete(run, {}, "ddplaunch", "").get_completions(list(argv), incomplete)


def _complete_shell(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [shell for shell in SHELLS if shell.startswith(incomplete)]


def _complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ddplaunch.runs.find import names

    found = [CompletionItem(name) for name in names(os.environ) if name.startswith(incomplete)]
    return found or _files(incomplete, "dir")


def _complete_rank(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ddplaunch.runs.find import workers

    return [
        CompletionItem(str(worker.rank), help=f"pid {worker.pid} on {node.host}, {worker.state}")
        for node, worker in workers(os.environ, ctx.params.get("run"))
        if str(worker.rank).startswith(incomplete)
    ]


def _complete_value(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    option = BY_NAME[str(param.name)]
    choices = [CompletionItem(choice) for choice in option.choices if choice.startswith(incomplete)]
    if option.path or option.optional is not None:  # without a value, the next argument may be the script
        return [*choices, *_files(incomplete, "dir" if option.path == "folder" else "file")]
    return choices
