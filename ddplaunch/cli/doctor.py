"""`ddplaunch doctor`: examines this machine before a job does, or all nodes of the job and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from msgspec.structs import replace

from ddplaunch.cli import job
from ddplaunch.cli.command import Command, Once, Page, show
from ddplaunch.spec.options.table import BY_NAME
from ddplaunch.system.errors import LaunchError, indented, tell
from ddplaunch.system.exitcodes import OK

if TYPE_CHECKING:  # the help needs none of it
    from ddplaunch.plan.cluster import Allocation
    from ddplaunch.spec.job import JobSpec
    from ddplaunch.tools.doctor import Report

_STATUS_BROKEN = 1  # the exit status if a job would fail here
# options that say where a job runs
_OPTIONS_THAT_SAY_WHERE = (
    "hosts",
    "hostfile",
    "nnodes",
    "node_rank",
    "master_addr",
    "rdzv_endpoint",
    "simulate",
    "cluster",
)
_UNAUTHENTICATED = (
    "no token: any process that reaches node 0, or listens where node 0 should, can take part in the examination. "
    "To keep others out, give all nodes the same DDPLAUNCH_TOKEN or --token-file"
)
_OPTIONS_SHOWN = ("python", "hosts", "hostfile", "nnodes", "simulate", "remote_python", "verbose")


def _checks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ddplaunch.cli import completion
    from ddplaunch.tools.doctor.examine import ALL_CHECKS

    return completion.complete_list([check.id for check in ALL_CHECKS], incomplete)


class DoctorCommand(job.JobCommand):
    """A command with all options of a job, which needs no script."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return how it is typed."""
        return ["[OPTIONS]", "[SCRIPT]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its own options, and those of a job that say where."""
        assert isinstance(formatter, Page)
        Command.format_options(self, ctx, formatter)
        options = {one.option.name: one for one in self.params if isinstance(one, job.JobOption) and not one.hidden}
        formatter.rows("Options of a job, such as", [options[name].row() for name in _OPTIONS_SHOWN])


@click.command(
    cls=DoctorCommand,
    examples=(
        ("ddplaunch doctor", "this machine, or all nodes of a Slurm allocation"),
        ("ddplaunch doctor --hosts a,b,c train.py", "these hosts, and the network between them"),
        ("ddplaunch doctor --hostfile all.txt --write-hosts good.txt", "keep the good ones"),
        ("ddplaunch doctor --json > report.json", "for a program, or for a bug report"),
    ),
)
@click.option(
    "--only",
    cls=Once,
    metavar="LIST",
    help="Run only these checks: shm,limits. -v shows the names of all.",
    shell_complete=_checks,
)
@click.option(
    "--nodes", is_flag=True, help="Show the nodes whose machine has failed in the last 7 days, and check nothing."
)
@click.option("--forget", cls=Once, metavar="NODE", help="Forget that this node has failed, and check nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--write-hosts",
    "good_hosts_file",
    cls=Once,
    metavar="FILE",
    help="Write the hosts about which nothing broken or slow is known into a file for --hostfile.",
)
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    only: str | None,
    nodes: bool,
    forget: str | None,
    as_json: bool,
    good_hosts_file: str | None,
    **_: Any,
) -> int:
    """Shows what would make a job fail or crawl on this machine, or on several nodes and between them, the worst first, and what
    to type. Changes nothing, except that it remembers nodes which are slow or out of reach. The exit status is 1 only if
    something is broken. The text may be shown to others: it holds no value that looks like a secret. Takes the options of
    `ddplaunch --help-all`; with SCRIPT, each node has to have the same one.
    """  # noqa: D205 - the help of a verb is one paragraph
    env = ctx.obj
    line = job.typed(ctx)
    if nodes or forget is not None:
        if line.program:
            takes = "--nodes takes no argument" if forget is None else "--forget takes one node"
            raise LaunchError(f"ddplaunch doctor {takes}: {line.program[0]}", hint="ddplaunch doctor --help")
        if forget is not None:
            return show(_forgotten(env, forget))
        from ddplaunch.tools.doctor.show import remembered

        return show(remembered(env, as_json=as_json))
    from ddplaunch.plan.devices import interpreter
    from ddplaunch.spec.program import check, working_directory
    from ddplaunch.system.console.tables import Look, written
    from ddplaunch.tools.doctor import show as shown

    # the options of files and variables hold for a line without a script, too: "-" stands for it, and is not looked for
    with_program = line if line.program else replace(line, program=("-",))
    spec = interpreter.with_chosen_interpreter(job.resolve(with_program, env, working_directory()), env)
    if line.program:
        check(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    allocation, env = _allocation(spec, env)
    rendezvous = None if allocation is None else allocation.rendezvous
    if allocation is not None and rendezvous is not None:  # somebody starts a doctor on each node: they meet
        from ddplaunch.tools.doctor.nodes import joined

        if not joined.is_first_here(allocation):  # as `mpirun -n 8` starts several on one node
            return OK
        if joined.number_of_nodes(allocation) == 1:
            allocation = None
        else:
            if not allocation.authenticated:
                tell(f"note: {_UNAUTHENTICATED}\n")
            if not joined.is_coordinator(rendezvous):
                return joined.be_examined(spec, env, allocation)
    report = _examined(spec, env, allocation, only, good_hosts_file)
    verbose = spec.verbosity > 0
    text = shown.as_json(report) if as_json else written(shown.blocks(report, verbose=verbose), Look.of_stdout(env))
    return show(text) or (_STATUS_BROKEN if report.is_broken else OK)


def _forgotten(env: Mapping[str, str], node: str) -> str:
    """Forget the failures of a node, and return how many there were, for stdout.

    Raises:
        LaunchError: nothing is known of that node, or the file cannot be read or written.
    """
    import time

    from ddplaunch.record import bad_nodes
    from ddplaunch.record.folders import bad_nodes_file
    from ddplaunch.system.words import count, why_failed

    path, now = bad_nodes_file(env), time.time()
    if not bad_nodes.among(bad_nodes.read(path, now), [node]):
        raise LaunchError(
            f"--forget {node}: no failure of this node is remembered",
            hint="`ddplaunch doctor --nodes` shows all that is remembered",
        )
    try:
        forgotten = bad_nodes.forget(path, node, now)
    except OSError as error:
        raise LaunchError(f"{path}: {why_failed(error)}") from None
    return f"forgot {count(forgotten, 'failure')} of {node}"


def _allocation(spec: JobSpec, env: Mapping[str, str]) -> tuple[Allocation | None, Mapping[str, str]]:
    """Return the nodes to examine, None for this machine alone, and the variables with the secret of the nodes, if they have one.

    Raises:
        LaunchError: nodes were asked for by an option, and cannot be found.
    """
    from ddplaunch.launcher.start import dispatch

    try:
        allocated = dispatch.allocate_job(spec, env)
    except LaunchError as error:
        were_asked_for = any(spec.origin(name) != "default" for name in _OPTIONS_THAT_SAY_WHERE)
        if were_asked_for:
            raise
        note = f"only this machine is examined: {error.message}"
        tell(f"note: {indented(note)}\n")
        return None, env
    found = allocated.allocation
    starts_or_meets_no_other = not found.hosts_to_start_on and found.rendezvous is None
    if found.is_here or starts_or_meets_no_other:
        return None, env
    return found, allocated.env


def _examined(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation | None, only: str | None, good_hosts_file: str | None
) -> Report:
    """Examine this machine, or the nodes of an allocation; `only` names the checks, None for all.

    The good hosts are written into the file `good_hosts_file`, if it is named.
    """
    from ddplaunch.tools.doctor.examine import ALL_CHECKS, chosen, examine, subject_of

    tests = chosen(ALL_CHECKS, only)
    if good_hosts_file is not None and (allocation is None or spec.simulate):
        what = "simulated nodes are no hosts" if spec.simulate else "there are no hosts: only this machine is examined"
        raise LaunchError(
            f"--write-hosts {good_hosts_file}: {what}", hint=f"name hosts: `{BY_NAME['hosts'].flag} a,b,c`"
        )
    if allocation is None:
        return examine(tests, subject_of(spec, env))
    from ddplaunch.tools.doctor.nodes import examine as nodes

    report, hosts = nodes.examine_nodes(spec, env, allocation, only)
    if good_hosts_file is not None:
        nodes.write_hosts(good_hosts_file, hosts)
    return report
