"""`ddplaunch run` and `ddplaunch plan`: the options of a job as click has them, what is typed for them, and the call.

click knows the options that are typed. Variables and files come from `spec/options/sources.py` and are ranked in
`spec/options/resolve.py`: click would keep one of several variables and forget which, `--env` counts from everywhere, and
`launch()` and the agents of other hosts, which have no click, do the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from msgspec import Struct

from ddplaunch.cli.command import FULL_HELP, TOPICS, VERBS, WORDS, Command, Page, show
from ddplaunch.plan.devices import interpreter
from ddplaunch.spec.job import Given, JobSpec, ProgramKind, Source
from ddplaunch.spec.options import sources
from ddplaunch.spec.options.resolve import job_spec
from ddplaunch.spec.options.table import ALIASES, BY_NAME, GROUPS, OPTIONS, TORCHRUN, Option
from ddplaunch.spec.program import check, working_directory
from ddplaunch.system.errors import LaunchError, indented, tell
from ddplaunch.system.exitcodes import MEANINGS
from ddplaunch.system.process.files import exists_on_disk
from ddplaunch.system.words import did_you_mean

if TYPE_CHECKING:
    from socket import socket

_FLAGS = frozenset(option.flag for option in OPTIONS)

EXAMPLES = (
    ("ddplaunch train.py", "one worker for each GPU"),
    ("ddplaunch --nproc-per-node 4 train.py --lr 0.1", "--lr is the script's"),
    ("ddplaunch --hosts a,b train.py", "on two hosts, over ssh"),
    ("ddplaunch plan --hosts a,b train.py", "only shows the workers"),
)
_MORE_EXAMPLES = (
    ("ddplaunch -m pkg.train", "a module"),
    ("ddplaunch --debug 1 train.py", "pdb in rank 1"),
    ("ddplaunch --nnodes 3 --simulate train.py", "three nodes on this one machine, to try it"),
)
# what people need first, in the order in which they come to need it, each with its summary; "": the first part of the full text
_COMMON = {
    **dict.fromkeys(("nproc_per_node", "module", "hosts", "nnodes", "devices"), ""),
    "python": "The interpreter of the workers.",
    "env": "",
    "output": "prefix, raw, collapse, rank0 or none.",
    "log_dir": "Where each run gets a folder for its logs.",
    "quiet": "",
    "verbose": "ddplaunch explains what it decides and does.",
    "live": "Show how far the job is, and which ranks differ.",
    "max_restarts": "How often to restart all after a failure.",
    "timeout": "Stop the job after this time.",
    "hang_timeout": "Stop a job that hangs, and say why.",
    "debug": "breakpoint() and pdb work in this rank.",
    "debug_on_error": "The first rank that fails gets pdb.",
    "simulate": "All nodes on this one machine, to try it.",
}  # fmt: skip
_DEFAULTS = (
    "An option may also be set in a variable, --nproc-per-node as DDPLAUNCH_NPROC_PER_NODE, in ddplaunch.toml, or in "
    "[tool.ddplaunch] of pyproject.toml, as nproc-per-node = 4. torchrun's PET_* variables are read too. "
    "Options may be written with _ for -."
)
_HELP_OF_HELP = ("-h, --help", "The options used most, in short.")
_OTHER_ABOUT_OPTIONS = (
    ("--help-all", "All options, by group, and the exit codes."),
    ("-V, --version", "The version."),
)
_HELP_OF_TOPIC = ("help [TOPIC]", f"{', '.join(TOPICS)}")


class Text(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """The value of an option of a job: a `Given`, whose text is parsed once all sources are known."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Given | None:
        """Return the text with its origin: the flag under which it was typed; None: the option was not typed."""
        assert isinstance(param, JobOption)
        if value is False:  # a flag that is not given, in click 8.1
            return None
        if value.partition("=")[0].replace("_", "-") in _FLAGS or value in ("-h", "--help", "--help-all"):
            hint = f"type for example `{param.flag} {param.option.example}`"
            raise LaunchError(f"{param.flag} needs a value, but {value} follows", hint=hint)
        form = param.flag if param.is_flag else f"{param.flag} {{}}"  # how it is typed, {} for the value
        return Given(name=param.option.name, text=value, source=Source.COMMAND_LINE, origin=param.flag, form=form)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete choices and paths."""
        assert isinstance(param, JobOption)
        option = param.option
        if option.name == "devices":
            from ddplaunch.cli import completion

            return completion.complete_devices(incomplete)
        found = [CompletionItem(choice) for choice in option.choices if choice.startswith(incomplete)]
        if option.path_kind or option.implied_value is not None:  # without a value, the next argument may be the script
            found.append(CompletionItem(incomplete, type="dir" if option.path_kind == "folder" else "file"))
        return found


_TEXT = Text()


class JobOption(click.Option):
    """An option of a job, under its own name or one that another launcher has for it."""

    def __init__(self, option: Option, alias: str = "") -> None:
        self.option = option
        self.flag = alias or option.flag
        names = [alias, alias.replace("-", "_")] if alias else [*filter(None, [option.short]), option.flag, option.name]
        # is_flag=False would have click take no value where the next argument begins with a -
        kind = {"is_flag": True, "flag_value": "1"} if option.is_flag else {"metavar": option.metavar}
        super().__init__(names, type=_TEXT, multiple=option.repeatable, hidden=bool(alias), **kind)
        self.help = option.help  # given above, click would look for an indent in it

    def row(self, text: str = "") -> tuple[str, str]:
        """Return its line in the help, with this text or its own."""
        option = self.option
        names = f"{option.short}, {option.flag}" if option.short else option.flag
        if not text:
            more = f" No effect here: {option.why_no_effect}." if option.why_no_effect else ""
            text = option.help + (more or (f" [default: {option.default}]" if option.default else ""))
        return names if option.is_flag else f"{names} {option.metavar}", text


# where the modules of other launchers are, and what people take for one
_LAUNCHER_PACKAGES = frozenset({"torch", "accelerate", "deepspeed", "torchrun", "horovodrun"})


def _programs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if ctx.params.get("module"):
        from ddplaunch.cli import completion

        return completion.complete_module(incomplete)
    return [CompletionItem(incomplete, type="file")]


class CommandLine(Struct, frozen=True):
    """What was typed for a job."""

    given: tuple[Given, ...]
    program: tuple[str, ...]  # SCRIPT and its arguments
    before_program: tuple[str, ...]  # the words before it, as they were typed


class JobCommand(Command):
    """A command with all options of a job; options after the script belong to the script."""

    def __init__(self, *args: Any, params: Sequence[click.Parameter] = (), words: str = "", **settings: Any) -> None:
        """Make a command with the options of a job and `params`, its own, which the usage line shows as `words`."""
        own = {name for param in params for name in param.opts}  # an alias with one of these names gives way
        aliases = (alias for alias in ALIASES if alias.flag not in own)
        options = [*map(JobOption, OPTIONS), *(JobOption(BY_NAME[alias.option], alias.flag) for alias in aliases)]
        program = click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, shell_complete=_programs)
        context = {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
        super().__init__(*args, params=[*params, *options, program], context_settings=context, **settings)
        self.own_options = [one for one in params if isinstance(one, click.Option)]
        self.words = words

    def prepared(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Return the arguments as click is to read them: flags written out, and a value behind each option that may lack one.

        The next argument is that value if it is a choice or a number, else the default is: click would take any next argument,
        so that `--debug train.py` would lack its script.
        """
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        known = {name: option for option in options for name in option.opts}
        result: list[str] = []
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            word, following = args[at], args[at + 1 : at + 2]
            if word.partition("=")[0].replace("_", "-") not in known:
                word = _complete_flag(ctx, word, following)
            found = known.get(word.replace("_", "-"))
            if isinstance(found, JobOption) and (implied := found.option.implied_value) is not None:
                taken = following if following and _is_value(found.option, following[0]) else []
                result.append(f"{found.flag}={taken[0] if taken else implied}")
            else:
                taken = following if _takes_next(word, found, known) else []
                # --output = raw, --output =raw; a value of --env or -env has a = of its own, and its parser says what is wrong
                if taken and (taken == ["="] or (taken[0].startswith("=") and "-env" not in word)):
                    from ddplaunch.cli.mistakes import error_for_blanks

                    raise error_for_blanks(word, taken[0], "".join(args[at + 2 : at + 3]))
                result += [word, *taken]
            at += 1 + len(taken)
        return [*result, *args[at:]]

    def mistake(self, error: click.UsageError, args: Sequence[str]) -> LaunchError:
        """Return what is wrong with the options, and what was probably meant."""
        # flags of this verb alone, on which its --help is the hint; all others are options of the job
        verbs_flags = [name for option in self.own_options for name in option.opts]
        if isinstance(error, click.NoSuchOption | click.BadOptionUsage):
            nearest = did_you_mean(error.option_name, [*verbs_flags, *_FLAGS])
            if nearest in verbs_flags:
                return super().mistake(error, args)
        from ddplaunch.cli import mistakes  # most people make none

        return mistakes.in_options(error, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options, and the script; behind that stand its own."""
        if ctx.params.get("program"):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return how it is typed."""
        return [*([self.words] if self.words else []), "[OPTIONS]", "SCRIPT", "[ARGS]..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options used most, or all of them by what they are for."""
        assert isinstance(formatter, Page)
        if self.own_options:  # of another verb than `run`, whose help does not repeat those of a job
            super().format_options(ctx, formatter)
            return
        options = {one.option.name: one for one in self.params if isinstance(one, JobOption) and not one.hidden}
        if not ctx.meta.get(FULL_HELP):
            formatter.examples(EXAMPLES)
            # where `_COMMON` has no summary
            first_parts = {name: re.split(r"(?<=\.) |[:;] ", BY_NAME[name].help)[0].rstrip(".") for name in _COMMON}
            rows = [options[name].row(summary or f"{first_parts[name]}.") for name, summary in _COMMON.items()]
            formatter.rows("Options", rows)
            formatter.verbs()
            formatter.rows("More", [_HELP_OF_TOPIC, *_OTHER_ABOUT_OPTIONS])
            return
        formatter.examples((*EXAMPLES, *_MORE_EXAMPLES))
        for group in GROUPS:
            if group == TORCHRUN:  # users of torchrun know them: the names are enough
                with formatter.section(group):
                    formatter.write_text(", ".join(option.flag for option in OPTIONS if option.group == group))
                    formatter.write_text("`ddplaunch help torchrun` explains them.")
            else:
                formatter.rows(group, rows_of_group(group))
        formatter.rows("Other options", [_HELP_OF_HELP, *_OTHER_ABOUT_OPTIONS])
        formatter.verbs()
        formatter.rows("More", [("run", VERBS["run"][1]), _HELP_OF_TOPIC, ("version", "The same as --version.")])
        formatter.paragraph(_DEFAULTS)
        formatter.rows("Exit codes", list(MEANINGS.items()))


def rows_of_group(group: str) -> list[tuple[str, str]]:
    """Return the lines of a group of options in the help."""
    return [JobOption(option).row() for option in OPTIONS if option.group == group]


def _complete_flag(ctx: click.Context, word: str, following: Sequence[str]) -> str:
    """Return this word, which is no flag of ours, or the flag of torchrun's that it begins.

    Raises LaunchError: it is a flag of another launcher, or lacks a dash; the hint has the value that may be `following`.
    """
    from ddplaunch.cli.mistakes import complete_flag  # most people type whole names

    try:
        return complete_flag(word, following[0] if following else "")
    except LaunchError:
        if ctx.resilient_parsing:  # a shell completes what is not finished yet
            return word
        raise


def _takes_next(word: str, option: click.Option | None, known: Mapping[str, click.Option]) -> bool:
    """Whether click takes the next argument as the value of this word, which names `option` as a whole; `known`: all, by name."""
    if option is not None:
        return not option.is_flag
    if word.startswith("--"):  # it has its value behind a =, or is unknown
        return False
    # letters may be grouped, up to the first one with a value: that is the next argument if the letter is the last one
    letters = [known.get(f"-{letter}") for letter in word[1:]]
    valued = [index for index, one in enumerate(letters) if one is not None and not one.is_flag]
    return valued[:1] == [len(letters) - 1]


def _is_value(option: Option, argument: str) -> bool:
    """Whether an argument is the optional value of an option: a choice, or a number, or, as in 0,2-3, a list of numbers."""
    if option.choices:
        return argument in option.choices
    return (re.sub("[,-]", "", argument) if option.takes_list else argument).isdigit()


# --- the job


def parse(words: Sequence[str], *, resilient: bool = False) -> CommandLine:
    """Parse the arguments of a job; `resilient`: whoever runs the line finds its mistakes, so that none is raised here."""
    with run.make_context("run", list(words), resilient_parsing=resilient) as ctx:
        return typed(ctx)


def typed(ctx: click.Context) -> CommandLine:
    """Return what click has parsed.

    Raises:
        LaunchError: an option was typed under two names, its own and an alias.
    """
    values = (value if isinstance(value, tuple) else (value,) for value in ctx.params.values())
    given = tuple(one for each in values for one in each if isinstance(one, Given))
    by_name: dict[str, Given] = {}
    for one in given:
        first = by_name.setdefault(one.name, one)
        if first.origin != one.origin:
            raise LaunchError(f"{first} and {one} are the same option", hint="leave one out")
    words: Sequence[str] = ctx.meta[WORDS]
    program: tuple[str, ...] = ctx.params.get("program") or ()
    before_program = tuple(words[: len(words) - len(program)])
    # torchrun drops the first -- of a line. Before the script click has dropped it; right behind the script it is dropped here
    has_dropped = before_program[-1:] == ("--",)
    if program[1:2] == ("--",) and not has_dropped:
        program = (program[0], *program[2:])
    return CommandLine(given, program, before_program)


def resolve(line: CommandLine, env: Mapping[str, str], folder: str | None) -> JobSpec:
    """Merge what was typed, the variables and the files found from `folder` upward into the job."""
    found, remarks = sources.from_files(folder) if folder is not None else ([], [])
    return job_spec([*line.given, *sources.from_variables(env), *found], line.program, remarks)


def checked(ctx: click.Context) -> JobSpec:
    """Return the job that was asked for, checked, and tell the user what is hardly meant.

    Raises:
        LaunchError: the line is wrong, or its script is not there.
    """
    line, env = typed(ctx), ctx.obj
    words = ctx.meta[WORDS]
    if not line.program and len(words) > 1 and words[-1].endswith(".py"):
        raise LaunchError(
            f"there is no SCRIPT to run: {words[-1]} is the value of {words[-2]}",
            hint="type the value of the option first, then the script",
        )
    spec = interpreter.with_chosen_interpreter(resolve(line, env, working_directory()), env)
    assert isinstance(ctx.command, JobCommand)
    verbs_flags = [option.opts[0] for option in ctx.command.own_options]
    is_run = not verbs_flags  # all other verbs with the options of a job have some of their own
    before = line.before_program if is_run else (str(ctx.info_name), *line.before_program)
    try:
        _check(spec, env, before)
    except LaunchError as error:
        if is_run:  # once the error is shown, node 0 is told that this node does not come
            from ddplaunch.launcher.start import dispatch

            error.then = partial(dispatch.tell_node_0, spec, env, error)
        raise
    for note in _notes(spec, env, before, verbs_flags):
        tell(f"note: {indented(note)}\n")
    return spec


def _check(spec: JobSpec, env: Mapping[str, str], before: Sequence[str]) -> None:
    """Check that the program and the file of the token exist. Hints repeat `before`, the words before the program.

    Raises:
        LaunchError: one of them does not exist; if possible the hint is the line that was meant.
    """
    target, args = spec.program.target, spec.program.args
    if spec.program.kind is ProgramKind.SCRIPT:
        missing = not exists_on_disk([target], "the script")
        if missing or os.path.basename(target).startswith("python"):  # /usr/bin/python3 is there, and is no script
            from ddplaunch.cli import mistakes  # most people name a script

            if error := mistakes.in_place_of_script(mistakes.Line(before, target, args)):
                raise error
    elif spec.program.kind is ProgramKind.MODULE and target.partition(".")[0] in _LAUNCHER_PACKAGES:
        from ddplaunch.cli import mistakes

        if error := mistakes.launcher_as_module(mistakes.Line(before, target, args)):
            raise error
    check(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    if spec.token_file is not None and not os.path.exists(spec.token_file):
        raise LaunchError(f"{spec.typed('token_file', spec.token_file)}: no such file or directory")


def _notes(spec: JobSpec, env: Mapping[str, str], before: Sequence[str], verbs_flags: Sequence[str]) -> Iterator[str]:
    """Yield what is no error, and yet hardly meant; nothing with --quiet. `verbs_flags` are those that only the verb has."""
    if spec.verbosity < 0:
        return
    yield from sources.unknown_variables(env)
    yield from sources.ignored_service_links(env)
    is_typed = spec.origin("nnodes").startswith("-")
    _least, most = spec.nnodes
    if spec.simulate and most == 1 and not is_typed:
        yield f"{spec.origin('simulate')} has one node; for two type `--nnodes 2` as well"
    is_run = not verbs_flags  # `run` has none
    if is_run:  # `plan` shows all remarks. Whoever types one of these two expects restarts, and there are none
        yield from (remark for remark in spec.remarks if remark.startswith(("--restart-on ", "--max-no-progress ")))
    script_flags = {word.partition("=")[0].replace("_", "-") for word in spec.program.args}
    if not script_flags.isdisjoint({*_FLAGS, *verbs_flags}):
        from ddplaunch.cli import mistakes

        line = mistakes.Line(before, spec.program.target, spec.program.args)
        if note := mistakes.behind_script(line, verbs_flags):
            yield note


@click.command(cls=JobCommand)
@click.pass_context
def run(ctx: click.Context, /, print_completion: Given | None, **_: Any) -> int:
    """Starts one worker for each accelerator and shows their output. Ends all of them as soon as one fails or
    you stop the job. Everything after SCRIPT belongs to the script.
    """  # noqa: D205 - the help of a verb is one paragraph
    if print_completion is not None:
        from ddplaunch.cli import completion

        return completion.print_script(ctx, print_completion.text, is_typed=True)
    spec = checked(ctx)
    # the launcher is heavier than what parses: neither --help nor a mistake needs it
    from ddplaunch.launcher.start import dispatch

    return dispatch.run(spec, ctx.obj, view=partial(_view, ctx.obj))  # `view` makes the rows of --live


def _view(env: Mapping[str, str], connection: socket) -> None:
    """Draw the rows of --live until the front ends. The front calls this in a process that it has forked."""
    from ddplaunch.tools.runs import live  # few jobs need it

    live.serve(connection, env)


@click.command(
    cls=JobCommand,
    params=[
        click.Option(["--json"], is_flag=True, help="Print the plan as JSON."),
        click.Option(
            ["--sh"], is_flag=True, help="Print the command and variables of each worker, to paste into a shell."
        ),
    ],
    words="[--json | --sh]",
    examples=(
        ("ddplaunch plan --nproc-per-node 4 train.py", "four workers on this machine"),
        ("ddplaunch plan --hosts a,b --json train.py", "for a program"),
    ),
)
@click.pass_context
def plan(ctx: click.Context, /, json: bool, sh: bool, **_: Any) -> int:
    """Shows what `ddplaunch` with the same arguments would do: ranks, devices, CPUs, variables, and where each value came
    from. Starts nothing. Takes the options of `ddplaunch --help-all`.
    """  # noqa: D205
    spec = checked(ctx)
    if json and sh:
        raise LaunchError("--json and --sh do not go together", hint="leave one out")
    from ddplaunch.launcher.start import dispatch

    return show(dispatch.show_plan(spec, ctx.obj, "json" if json else "sh" if sh else "table"))
