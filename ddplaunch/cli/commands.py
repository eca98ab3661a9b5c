"""The verbs as click commands: their options from the table, their help, and shell completion. Converts no value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ddplaunch import __version__
from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import MEANINGS
from ddplaunch.options.option import Option
from ddplaunch.options.table import ALIASES, BY_NAME, GROUPS, OPTIONS
from ddplaunch.record import fields_of
from ddplaunch.spec import JobSpec, default

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VERBS = ("run", "plan", "submit", "completion")
FLAGS: dict[str, Option | None] = {
    **{option.flag: option for option in OPTIONS},
    **{option.short: option for option in OPTIONS if option.short},
    **{alias.flag: BY_NAME[alias.option] for alias in ALIASES},
    "--help": None,
    "--version": None,
}

_FORMS = (("json", "The plan as JSON."), ("sh", "The commands and variables of each worker, to paste into a shell."))
_KNOWN = frozenset((*FLAGS, *(f"--{name}" for name, _ in _FORMS)))

USAGE = {
    "run": "ddplaunch [OPTIONS] SCRIPT [ARGS]...",
    "plan": "ddplaunch plan [--json | --sh] [OPTIONS] SCRIPT [ARGS]...",
    "submit": "ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]...",
    "completion": "ddplaunch completion [bash|zsh|fish]",
}
_ABOUT = {
    "run": "Starts one worker per accelerator, gives each its place, shows what they print, and ends all of them the "
    "moment one fails or you stop the job. Everything after SCRIPT belongs to the script.",
    "plan": "Shows what `ddplaunch` with the same arguments would do: ranks, devices, CPUs, variables, and where each value "
    "came from. Starts nothing. Takes the options of `ddplaunch --help`.",
    "submit": "Checks the job, writes a batch script for it and hands that to Slurm's sbatch. Options before -- go to "
    "sbatch, but for those below; what follows it are the arguments of `ddplaunch` on one machine.",
    "completion": "Prints the script that makes a shell complete our options. In bash or zsh: "
    'eval "$(ddplaunch completion bash)". In fish: ddplaunch completion fish | source.',
}
_EXAMPLES = (
    ("ddplaunch train.py", "one worker per GPU; one if there is none"),
    ("ddplaunch --nproc-per-node 4 train.py --lr 0.1", "four workers; --lr is the script's"),
    ("ddplaunch -m pkg.train", "a module"),
    ("ddplaunch --debug 1 train.py", "pdb in rank 1"),
    ("ddplaunch plan --nproc-per-node 4 train.py", "what would be started, and why"),
    ("ddplaunch --hosts a,b train.py", "on two hosts, over ssh"),
    ("ddplaunch --nnodes 3 --simulate train.py", "three nodes on this one machine, to try it"),
)
SUBMIT_OPTIONS = (
    ("--print", "Shows the script and submits nothing. Needs no Slurm."),
    (
        "--wait",
        "Waits until the job ends, reports its states, and exits with its status; of an array, with the worst.",
    ),
    ("--follow", "Shows the output of the job as it comes, too. Ctrl-C ends the waiting, not the job."),
    ("--parsable", "Prints the number of the job and nothing else."),
)
_SUBMIT_EXAMPLES = (
    (
        "ddplaunch submit --nodes 2 --gpus-per-node 4 --time 4:00:00 -- train.py --lr 0.1",
        "on two nodes with four GPUs each",
    ),
    ("ddplaunch submit --follow -p main -N 2 -- --nproc-per-node 4 train.py", "and show its output"),
    ("ddplaunch submit --print --nodes 2 -- train.py > train.sh", "a script to change and keep"),
)
SUBMIT_DEFAULTS = (
    "Unless given, the script has --job-name after SCRIPT, --nodes as in --nnodes if that is given, "
    "--ntasks-per-node=1, --output=%x-%j.out (%x-%A_%a.out for an array) and --open-mode=append."
)
_DEFAULTS = (
    "An option may also be set in a variable, --nproc-per-node as DDPLAUNCH_NPROC_PER_NODE, in ddplaunch.toml, or in "
    "[tool.ddplaunch] of pyproject.toml, as nproc-per-node = 4. torchrun's PET_* variables are read too. "
    "Options may be written with _ for -."
)


def command(verb: str, show: Callable[[str], int]) -> click.Command:
    """Make the command of a verb; `show` prints a text and gives the exit status."""
    if verb == "completion":
        shell = click.Argument(["shell"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_shell)
        return _Verb(verb, params=[shell, *_help_and_version(show)])
    if verb == "submit":
        flags = [click.Option([name], is_flag=True, help=text) for name, text in SUBMIT_OPTIONS]
        argv = click.Argument(["job"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_job)
        return _Submit(verb, params=[*flags, *_help_and_version(show), argv])
    program = click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_files)
    forms = [click.Option([f"--{name}"], is_flag=True, help=text) for name, text in _FORMS if verb == "plan"]
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

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verb = str(self.name)
        _write_usage(formatter, VERBS if verb == "run" else (verb,))
        formatter.write_paragraph()
        formatter.write_text(_ABOUT[verb])
        if verb == "plan":
            _write_rows(formatter, "Forms", [(f"--{name}", text) for name, text in _FORMS])
        if verb == "run":
            _write_rows(formatter, "Examples", _EXAMPLES, column=48)
            for group in GROUPS:
                rows = [(_usage_of(option), _help_of(option)) for option in OPTIONS if option.group == group]
                _write_rows(formatter, group, rows)
            _write_rows(formatter, "Other options", [("-h, --help", "This text."), ("--version", "The version.")])
            formatter.write_paragraph()
            formatter.write_text(_DEFAULTS)
            _write_rows(formatter, "Exit status", list(MEANINGS.items()))


class _Submit(_Verb):
    """Parses only what completion by a shell needs; see slurm/submit/args.py."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.params["job"] = tuple(args[args.index("--") + 1 :]) if "--" in args else None
        return []

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help(ctx, formatter)
        _write_rows(formatter, "Options", SUBMIT_OPTIONS)
        with formatter.section("Examples"):
            for command, meaning in _SUBMIT_EXAMPLES:
                formatter.write(f"  {command}\n      {meaning}\n")
        formatter.write_paragraph()
        formatter.write_text(SUBMIT_DEFAULTS)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from ddplaunch.slurm.submit.sbatch_options import KNOWN

        own = super().shell_complete(ctx, incomplete)
        names = {item.value for item in own}
        others = (f"--{name}" for name in sorted(KNOWN))
        return [*own, *(CompletionItem(name) for name in others if name.startswith(incomplete) and name not in names)]


class _Root(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["run", *args] if args and args[0] not in VERBS else args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        verbs = [] if incomplete.startswith("-") else super().shell_complete(ctx, incomplete)
        run = self.commands["run"]
        own = run.shell_complete(click.Context(run), incomplete) if incomplete.startswith("-") else _files(incomplete)
        return [*verbs, *own]


def _click_option(option: Option) -> click.Option:
    return click.Option(
        [name for name in (option.short, option.flag, option.name) if name],
        is_flag=option.is_flag or None,  # False would let click take no value where the next argument is an option
        multiple=option.repeatable,
        type=None if option.is_flag else click.UNPROCESSED,
        help=option.help,
        shell_complete=_complete_value,
    )


def _aliases() -> list[click.Parameter]:
    return [click.Option([alias.flag, alias.key], type=click.UNPROCESSED, hidden=True) for alias in ALIASES]


def _help_and_version(show: Callable[[str], int]) -> list[click.Parameter]:
    def help_(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            ctx.exit(show(ctx.get_help()))

    def version(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            ctx.exit(show(f"ddplaunch {__version__}"))

    return [
        click.Option(["-h", "--help"], is_flag=True, is_eager=True, expose_value=False, callback=help_, help="Help."),
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=version, help="The version."
        ),
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
    return [shell for shell in ("bash", "zsh", "fish") if shell.startswith(incomplete)]


def _complete_value(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    option = BY_NAME[str(param.name)]
    choices = [CompletionItem(choice) for choice in option.choices if choice.startswith(incomplete)]
    if option.path or option.optional is not None:  # without a value, the next argument may be the script
        return [*choices, *_files(incomplete, "dir" if option.path == "folder" else "file")]
    return choices


def _write_usage(formatter: click.HelpFormatter, verbs: Sequence[str]) -> None:
    for at, verb in enumerate(verbs):
        formatter.write(f"{'Usage: ' if at == 0 else '       '}{USAGE[verb]}\n")


def _write_rows(
    formatter: click.HelpFormatter, heading: str, rows: Sequence[tuple[str, str]], column: int = 30
) -> None:
    with formatter.section(heading):
        formatter.write_dl(rows, col_max=column)


def _usage_of(option: Option) -> str:
    names = f"{option.short}, {option.flag}" if option.short else option.flag
    return names if option.is_flag else f"{names} {option.metavar}"


def _help_of(option: Option) -> str:
    if option.no_effect:
        return f"{option.help} No effect here: {option.no_effect}."
    value = default(option.target) if option.target in fields_of(JobSpec) else None
    if option.is_flag or option.repeatable or value is None or not (text := option.write(value)):
        return option.help
    return f"{option.help} [default: {text}]"
