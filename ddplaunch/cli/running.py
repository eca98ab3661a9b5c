"""The verbs that look into runs, end them, or show what is kept for the next."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import click
from click.shell_completion import CompletionItem

from ddplaunch.cli.command import Command, Once, not_written, show

Env = Mapping[str, str]


def _runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ddplaunch.tools.runs.find import completions

    found = completions(os.environ, incomplete, str(ctx.info_name))
    return [CompletionItem(name, help=text or None) for name, text in found] or [CompletionItem(incomplete, type="dir")]


def _ranks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a rank of the run that was named: its rank, with pid, host and state as help."""
    from ddplaunch.tools.runs.choice import workers

    # click leaves the words before an option unread whose value is still to come
    named = ctx.params.get("run") or next(iter(ctx.args), None)
    return [
        CompletionItem(str(worker.rank), help=f"pid {worker.pid} on {node.host}, {worker.state}")
        for node, worker in workers(os.environ, named)
        if str(worker.rank).startswith(incomplete)
    ]


# which run is meant without RUN
_THE_ONLY_ONE = "You may leave it out if only one of your jobs runs here."
_BY_FOLDER = "An ended run with --log-dir is found by its folder alone."
_THE_LATEST = f"Without it, your latest run. {_BY_FOLDER}"
_ONE_RUN = "at most the name of one run"
_run = click.argument("run", metavar="[RUN]", required=False, shell_complete=_runs)
_of_ranks = click.option(
    "-r", "--ranks", cls=Once, metavar="LIST", help="Only these ranks: 3, or 0-2,4.", shell_complete=_ranks
)
_json = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")


@click.command(
    cls=Command,
    takes=_ONE_RUN,
    run_by_default="Without it, all jobs.",
    examples=(
        ("ddplaunch ps", "the jobs that run now"),
        ("ddplaunch ps --all train.py", "all runs of a script, ended ones too"),
    ),
)
@_json
@click.option("-a", "--all", "every", is_flag=True, help="List your runs, ended ones too, newest first.")
@_run
@click.pass_obj
def ps(env: Env, as_json: bool, every: bool, run: str | None) -> int:
    """Shows your jobs that run on this host or were started here, and their workers on all hosts: the state, CPU and memory of
    each, and for how long it has printed nothing. If another host answers for a job, the table says where to ask. A job that
    does not answer within a second is marked.
    """  # noqa: D205 - the help of a verb is one paragraph
    if every:
        from ddplaunch.tools.runs import past

        return show(past.show(env, run, as_json=as_json))
    from ddplaunch.tools.runs import ps as verb

    return show(verb.show(env, run, as_json=as_json))


@click.command(
    help="Watches the workers of a running job in a table: the state of each, its share of a CPU, its memory, its output and its "
    "last line.",
    keys=(
        ("arrows", "Choose a worker."),
        ("s", "Show where all workers are."),
        ("l", "Show the log of the chosen worker."),
        ("a", "Open a debugger in the chosen worker."),
        ("k", "Stop the job."),
        ("q", "Leave."),
    ),
    cls=Command,
    takes=_ONE_RUN,
    run_by_default=_THE_ONLY_ONE,
    examples=(("ddplaunch top", "the only job"), ("ddplaunch top train.py", "the job that runs this script")),
)
@_run
@click.pass_obj
def top(env: Env, run: str | None) -> int:
    """Watch the workers."""
    from ddplaunch.tools.runs import top as verb

    return verb.show(env, run)


@click.command(
    cls=Command,
    takes=_ONE_RUN,
    run_by_default=f"Without it, your latest run. With -f, the latest that still runs. {_BY_FOLDER}",
    epilog="Of a job itself, -r is torchrun's --redirects: `ddplaunch -r 3 train.py` sends all output to the logs alone.",
    examples=(
        ("ddplaunch logs -f -r 3", "rank 3 of the running job"),
        ("ddplaunch logs -n 20 k7qx", "the end of each log of run k7qx"),
        ("ddplaunch logs --grep 'loss|nan' --since 5m", "some lines"),
    ),
)
@_of_ranks
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until the run ends.")
@click.option("--grep", cls=Once, metavar="RE", help="Only lines that match this regular expression of Python's.")
@click.option(
    "-n", "--tail", cls=Once, metavar="N", help="Only the last N lines of each log, or of its lines that match."
)
@click.option(
    "--since",
    cls=Once,
    metavar="TIME",
    help="Only lines since 5m (ago), 14:05 (the last time it was) or 2026-11-22T14:05. Accurate to about 10 s.",
)
@_run
@click.pass_obj
def logs(
    env: Env, ranks: str | None, follow: bool, grep: str | None, tail: str | None, since: str | None, run: str | None
) -> int:
    """Prints the stdout and stderr of the workers from the logs of a run, rank by rank, with the rank before each line. The
    first line, on stderr, names the run.
    """  # noqa: D205
    from ddplaunch.tools.runs import logs as verb

    try:
        wanted = verb.wanted(now=time.time(), ranks=ranks, pattern=grep, tail=tail, since=since, follow=follow)
        return verb.show(env, run, wanted)
    except OSError as error:  # files that cannot be read are no error: they end
        return not_written(error)


@click.command(
    cls=Command,
    takes=_ONE_RUN,
    run_by_default=_THE_LATEST,
    examples=(
        ("ddplaunch report --open", "the latest run, in your browser"),
        ("ddplaunch report --trace steps.json k7qx", "a trace of run k7qx"),
    ),
)
@click.option("--open", "opens", is_flag=True, help="Show the page in your browser.")
@click.option("--out", cls=Once, metavar="FILE", help="Write this file. Default: report.html in the folder of the run.")
@click.option(
    "--trace",
    "trace_file",
    cls=Once,
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev to FILE, in place of the page.",
)
@click.option(
    "--diff",
    "shows_diff",
    is_flag=True,
    help="Show the changes of the code even if values in them are hidden. These stay hidden.",
)
@_run
@click.pass_obj
def report(env: Env, opens: bool, out: str | None, trace_file: str | None, shows_diff: bool, run: str | None) -> int:
    """Writes one HTML page about a run that goes on or has ended: what happened, a timeline of all ranks, the first failure with
    stacks, the ends of the logs, plan and environment. The page needs no other file and holds no script. Its path is printed.
    """  # noqa: D205
    from ddplaunch.tools.page import verb

    return show(verb.write(env, run, out=out, trace_file=trace_file, opens=opens, shows_diff=shows_diff))


@click.command(
    help="Shows the stacks of all workers of a job, equal ones once, and which workers wait in a collective for which "
    "others. Each worker stops for a millisecond and goes on.",
    cls=Command,
    takes=_ONE_RUN,
    run_by_default=_THE_ONLY_ONE,
    examples=(
        ("ddplaunch stacks", "all ranks of the only job"),
        ("ddplaunch stacks -r 0,4-7 --threads k7qx", "some ranks, with all their threads"),
    ),
)
@_of_ranks
@click.option("--threads", is_flag=True, help="Show all threads, not only the main ones.")
@click.option("--native", is_flag=True, help="Show frames of C too, by py-spy.")
@_json
@_run
@click.pass_obj
def stacks(env: Env, run: str | None, ranks: str | None, threads: bool, native: bool, as_json: bool) -> int:
    """Show where the workers are."""
    from ddplaunch.tools.runs import talk

    wanted = talk.WantedStacks(ranks=ranks, threads=threads, native=native, as_json=as_json)
    return show(talk.show_stacks(env, run, wanted))


@click.command(
    help="Profiles the ranks of a running job with torch.profiler, and writes one trace of all for ui.perfetto.dev. A table "
    "shows how the steps of each rank divide into compute, communication, waiting for other ranks and loading data. The script "
    "needs no preparation, and goes on with the same results.",
    cls=Command,
    takes=_ONE_RUN,
    run_by_default=_THE_ONLY_ONE,
    examples=(
        ("ddplaunch profile", "10 s of all ranks"),
        ("ddplaunch profile -r 0,3 --steps 5 --out steps.json.gz", "five steps of two ranks"),
    ),
)
@_of_ranks
@click.option("--seconds", cls=Once, metavar="S", help="Profile for S seconds; with --steps, at most. [default: 10]")
@click.option("--steps", cls=Once, metavar="N", help="Profile N steps of the optimizer, for at most 60 s.")
@click.option("--memory", is_flag=True, help="Also keep the history of CUDA's allocator, for pytorch.org/memory_viz.")
@click.option(
    "--out",
    cls=Once,
    metavar="FILE",
    help="Write the trace to this file, compressed if it ends in .gz. Default: a file in the folder of the run.",
)
@_run
@click.pass_obj
def profile(
    env: Env, run: str | None, ranks: str | None, seconds: str | None, steps: str | None, memory: bool, out: str | None
) -> int:
    """Profile the workers."""
    from ddplaunch.tools import profile as verb

    return show(verb.show(env, run, ranks, verb.wanted(seconds, steps, memory=memory), out))


@click.command(
    help="Opens pdb in a worker of a running job, at the line that the worker executes. The worker continues when you leave pdb "
    "with `c`, `q` or Ctrl-D. Until then, no time limit of the job runs.",
    cls=Command,
    takes=_ONE_RUN,
    run_by_default=_THE_ONLY_ONE,
    examples=(
        ("ddplaunch attach -r 3", "rank 3 of the only job"),
        ("ddplaunch attach -r 0 k7qx", "rank 0 of run k7qx"),
    ),
)
@click.option(
    "-r",
    "--rank",
    cls=Once,
    metavar="RANK",
    help="The rank to debug. A job of one worker needs none.",
    shell_complete=_ranks,
)
@_run
@click.pass_obj
def attach(env: Env, rank: str | None, run: str | None) -> int:
    """Open a debugger in a worker."""
    from ddplaunch.tools.runs import talk

    return talk.attach(env, run, rank)


@click.command(
    help="Stops jobs as Ctrl-C in their terminals does, waits until they have ended, and says how. A second `ddplaunch "
    "stop` kills the job, as a second Ctrl-C does.",
    cls=Command,
    run_by_default=_THE_ONLY_ONE,
    examples=(("ddplaunch stop k7qx", "the run k7qx"), ("ddplaunch stop --all", "all your jobs here")),
)
@click.option("--all", "every", is_flag=True, help="Stop all your jobs that run on this host.")
@click.argument("runs", metavar="[RUN...]", nargs=-1, shell_complete=_runs)
@click.pass_obj
def stop(env: Env, every: bool, runs: tuple[str, ...]) -> int:
    """Stop jobs."""
    from ddplaunch.tools.runs import talk

    return talk.stop(env, runs, every=every)


@click.command(
    cls=Command,
    examples=(("ddplaunch warm", "what is kept"), ("ddplaunch warm --stop", "and end it, to free its memory")),
)
@click.option("--stop", is_flag=True, help="End them, each as soon as no run uses it.")
@click.pass_obj
def warm(env: Env, stop: bool) -> int:
    """Shows the interpreters that --keep-warm keeps for your next runs on this machine: what each has imported, how many
    runs it has served, and when it ends.
    """  # noqa: D205
    from ddplaunch.launcher.workers import show as verb

    return show(verb.show(env, stop=stop))
