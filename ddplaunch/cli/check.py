"""`ddplaunch check`: whether the ranks of a large job would agree on their collectives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddplaunch.cli.command import Once, show
from ddplaunch.cli.job import JobCommand, checked
from ddplaunch.spec.job import JobSpec, ProgramKind
from ddplaunch.spec.options import parsers
from ddplaunch.spec.options.parsers import BadValue
from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.exitcodes import OK
from ddplaunch.system.words import these_ranks

if TYPE_CHECKING:
    from ddplaunch.tools.check.run import Wanted

_STATUS_WRONG = 1  # the exit status if ranks disagree, or one does not get through
_MOST_RANKS = 256  # that are checked
_DEFAULT_STEPS, _MOST_STEPS = 3, 10_000
_DEFAULT_WORKERS_OF_NODE = 8
_DEFAULT_RANK_SECONDS = 300.0  # that a rank may take
_EXAMPLES = {"--world-size": "512", "--ranks": "0,1,7", "--steps": "5"}

T = TypeVar("T")


@click.command(
    cls=JobCommand,
    params=[
        Once(
            ["--world-size"],
            metavar="N",
            help="The number of ranks of the job. Default: --nnodes times --nproc-per-node.",
        ),
        Once(
            ["--ranks"],
            metavar="LIST",
            help="Run only these ranks: 0,1,511. Default: the first two, the last of node 0, the first of node 1, the middle "
            "and the last. -r does not name ranks here. In the line of a job it is torchrun's --redirects.",
        ),
        Once(["--steps"], metavar="N", help="End each rank after N steps of the optimizer. [default: 3]"),
        click.Option(["--json"], is_flag=True, help="Print everything as JSON."),
    ],
    words="[--world-size N] [--ranks LIST] [--steps N] [--json]",
    examples=(
        ("ddplaunch check --world-size 512 train.py", "64 nodes of 8 ranks, and six of these run here"),
        ("ddplaunch check --nnodes 4 --nproc-per-node 4 --ranks 0,3,15 train.py", "these three of 16"),
    ),
)
@click.pass_context
def check(
    ctx: click.Context, /, world_size: str | None, ranks: str | None, steps: str | None, json: bool, **_: Any
) -> int:
    """Runs some ranks of a job of any size on this machine, each as if the others were there, for a few steps, and compares what
    they ask of their process groups: collectives, their order, shapes and types. Nothing is sent, and no checkpoint is written.
    The exit status is 1 if ranks disagree or one fails. --timeout is for each rank, 5 minutes if it is not given. Takes the
    options of `ddplaunch --help-all`.
    """  # noqa: D205 - the help of a verb is one paragraph
    from ddplaunch.plan.devices.node import inspect
    from ddplaunch.spec.options import token
    from ddplaunch.spec.program import working_directory
    from ddplaunch.system.console.tables import Look, written
    from ddplaunch.tools.check import run
    from ddplaunch.tools.check.compare import compare
    from ddplaunch.tools.check.show import Checked, as_json, blocks

    spec, env = checked(ctx), ctx.obj
    if spec.program.kind is ProgramKind.COMMAND:
        raise LaunchError("a check needs a Python program", hint="leave --no-python out")
    wanted = _wanted(spec, world_size, ranks, steps)
    began, cwd = time.monotonic(), working_directory() or ""
    env = token.visible_to_workers(env)
    first, *others = wanted.ranks
    is_quiet = spec.verbosity < 0
    if not is_quiet:
        order = f", rank {first} first" if others else ""
        say(f"checking {these_ranks(wanted.ranks)} of {wanted.world_size}{order}")
    tells_pace = not is_quiet and os.isatty(2)
    traces = run.run(spec, env, inspect(spec, env), wanted, tells_pace=tells_pace)
    if isinstance(traces, int):  # the exit status: a signal ended the check
        return traces
    compared, seconds = compare(traces, cwd), time.monotonic() - began
    result = Checked(wanted=wanted, traces=traces, compared=compared, seconds=seconds, cwd=cwd)
    text = as_json(result) if json else written(blocks(result), Look.of_stdout(env))
    return show(text) or (_STATUS_WRONG if result.is_wrong else OK)


def _wanted(spec: JobSpec, world_size: str | None, ranks: str | None, steps: str | None) -> Wanted:
    """Return what is to be checked, by the values of --world-size, --ranks and --steps, None for an option that was left out.

    Raises:
        LaunchError: a value is wrong, the size of the job is not known, or it has no such rank.
    """
    from ddplaunch.tools.check.run import Wanted, default_ranks

    per_node = spec.nproc_per_node  # None: not given; a text, as "gpu": as many as this machine has
    if isinstance(per_node, str):
        raise LaunchError(
            f"{spec.typed('nproc_per_node', per_node)}: a check of other nodes needs a number",
            hint="type for example `--nproc-per-node 8`",
        )
    if world_size is not None:
        size = _parsed("--world-size", world_size, parsers.number(1, 1 << 20))
    elif spec.origin("nnodes") != "default":
        _least, most = spec.nnodes
        size = most * (per_node or _DEFAULT_WORKERS_OF_NODE)
    else:
        raise LaunchError("a check needs the size of the job", hint="type for example `--world-size 512`")
    per_node = min(per_node or _DEFAULT_WORKERS_OF_NODE, size)
    chosen = default_ranks(size, per_node) if ranks is None else tuple(sorted(_parsed("--ranks", ranks, parsers.ranks)))
    if chosen[-1] >= size:
        raise LaunchError(f"--ranks {ranks}: there is no rank {chosen[-1]} of {size}", hint="ranks count from 0")
    if len(chosen) > _MOST_RANKS:
        raise LaunchError(f"--ranks {ranks}: {len(chosen)} ranks are more than a check runs, {_MOST_RANKS}")
    return Wanted(
        world_size=size,
        nproc_per_node=per_node,
        ranks=chosen,
        steps=_DEFAULT_STEPS if steps is None else _parsed("--steps", steps, parsers.number(1, _MOST_STEPS)),
        seconds=spec.timeout or _DEFAULT_RANK_SECONDS,
    )


def _parsed(flag: str, text: str, parse: Callable[[str], T]) -> T:
    """Return the value of an option; raise LaunchError with an example if it cannot be read."""
    try:
        return parse(text)
    except BadValue as error:
        raise LaunchError(f"{flag} {text}: {error}", hint=f"type for example `{flag} {_EXAMPLES[flag]}`") from None
