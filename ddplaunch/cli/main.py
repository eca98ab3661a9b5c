"""The entry point: a click group whose verbs are imported when they are typed, the exit status, and what is said of errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click
from click.exceptions import Exit

from ddplaunch import __version__
from ddplaunch.cli.command import VERBS, Context, page
from ddplaunch.system.console.paint import Paint
from ddplaunch.system.console.streams import use_colour
from ddplaunch.system.errors import LaunchError, not_imported, write_stderr
from ddplaunch.system.exitcodes import BUG, NOT_WRITTEN, USAGE

_INTRO = "ddplaunch starts PyTorch training on all GPUs of one machine or of many, watches over it, and ends all of it together."


class Application(click.Group):
    """The verbs, of which `run` may be left out. Only the first word can be one, so that a script may have any name."""

    context_class = Context

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Run a command line as click does, but with our errors, completion included."""
        status = main(args)
        return sys.exit(status) if standalone_mode else status

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `run` before what begins with no verb, and read `version` as an option."""
        match args:
            case ["version"]:
                args = ["run", "--version"]
            case [word, *_] if word not in VERBS:
                args = ["run", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a verb."""
        if name not in VERBS:
            return None
        command: click.Command = getattr(import_module(f"ddplaunch.cli.{VERBS[name][0]}"), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete the first word: an option of `run`, a verb or a script, in bash only where no verb fits."""
        from click.shell_completion import CompletionItem  # only for a shell that completes

        run = self.get_command(ctx, "run")
        if incomplete.startswith("-") and run is not None:
            return run.shell_complete(click.Context(run), incomplete)
        verbs = [CompletionItem(verb, help=text) for verb, (_, text) in VERBS.items() if verb.startswith(incomplete)]
        return [*verbs, CompletionItem(incomplete, type="file")]


@click.command(cls=Application, add_help_option=False, invoke_without_command=True)
@click.pass_context
def application(ctx: click.Context) -> int:
    """Say what this is, and what to type, where nothing was."""
    if ctx.invoked_subcommand is None:
        from ddplaunch.cli.job import EXAMPLES

        help_page = ctx.make_formatter()
        assert isinstance(help_page, Context.formatter_class)
        help_page.write_text(_INTRO)
        help_page.examples(EXAMPLES)
        help_page.paragraph(
            "`ddplaunch --help` shows the options used most, `--help-all` all of them, `ddplaunch help` the verbs and the topics."
        )
        write_stderr(page(ctx, help_page.getvalue(), fd=2))
    return USAGE  # after a verb click returns what the verb has returned


def watch_disk(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Have each verb but `run` go on in a child, so that the command ends even if the disk of its files hangs."""
    completes = "_DDPLAUNCH_COMPLETE" in env
    if completes or (argv and argv[0] in VERBS and argv[0] != "run"):
        from ddplaunch.cli.hung_disk import end  # a job needs none of it
        from ddplaunch.system.process.apart import go_on_in_child

        go_on_in_child(lambda: NOT_WRITTEN if completes else end(argv, env))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, show an error if there is one, and return the exit status; `argv` is without the command's name."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # by the caller: nobody could wait for a child of ours
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except LaunchError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - whatever else it is, it is a bug of ours
        # what is not needed in each run is imported late, and may be missing: an installation is damaged, or was replaced.
        # That Python lacks a module of its own is no matter of our files
        name = error.name or "" if isinstance(error, ImportError) else ""
        is_file_missing = isinstance(error, ImportError) and name.partition(".")[0] not in sys.stdlib_module_names
        if not is_file_missing:
            sys.excepthook(*sys.exc_info())
            write_stderr(f"error: this is a bug in ddplaunch {__version__}; please report it with the lines above\n")
            return BUG
        failure = not_imported(error)
    is_printed_by_first_task = failure.is_same_in_each_task and _is_other_task(os.environ)
    if not is_printed_by_first_task:
        write_stderr(Paint(use_colour(os.environ, os.isatty(2))).report(failure.render()))
    if failure.then is not None:  # what is left to do once the user knows: node 0 is told
        failure.then()
    return failure.status


def _is_other_task(env: Mapping[str, str]) -> bool:
    """Whether srun has started this command as one of several tasks, the first of which says what is wrong with their line.

    Shells of a task inherit its variables: so the task has to be this process, or the parent that `watch_disk` has left.
    """
    task_pids = (str(os.getpid()), str(os.getppid()))
    return env.get("SLURM_PROCID", "0") != "0" and env.get("SLURM_TASK_PID") in task_pids


def _main(argv: list[str]) -> int:
    """Parse the command line, run the verb, and return the exit status; errors are raised.

    click's own main does the same, but also prints something at Ctrl-C, and ends silently where a pipe is closed.
    """
    if os.environ.get("_DDPLAUNCH_COMPLETE"):
        from ddplaunch.cli import completion  # only for a shell that completes

        return completion.answer(application)
    try:
        with application.make_context("ddplaunch", argv, obj=dict(os.environ), max_content_width=100) as ctx:
            status: int = application.invoke(ctx)
            return status
    except Exit as done:  # --help, say
        return done.exit_code
