"""From what was asked to the status of the job: look around, plan, then run the job here."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial

from ddplaunch import agent, front, torchbuild
from ddplaunch.cluster import local
from ddplaunch.crew import Outfit, raise_open_files
from ddplaunch.devices import cpus
from ddplaunch.devices.choose import choose
from ddplaunch.devices.probe import probe
from ddplaunch.errors import LaunchError
from ddplaunch.link import STDERR, STDOUT, Outbox
from ddplaunch.plan import Plan
from ddplaunch.plan.make import Node, make_plan
from ddplaunch.process import port, terminal
from ddplaunch.report.display import Display, Stream
from ddplaunch.report.output import Output
from ddplaunch.report.prefix import use_colour
from ddplaunch.report.run_folder import LOG_LIMIT, RunFolder
from ddplaunch.report.shown import Shown
from ddplaunch.report.teller import Teller
from ddplaunch.spec import JobSpec, Streams
from ddplaunch.supervise import Policy

_TAGS = {Stream.OUT: STDOUT, Stream.ERR: STDERR}
_MASKS = {Streams.NONE: set(), Streams.OUT: {Stream.OUT}, Streams.ERR: {Stream.ERR}, Streams.BOTH: set(Stream)}


def plan(spec: JobSpec, env: Mapping[str, str]) -> Plan:
    """Look at this node and decide the job; starts nothing.

    Raises:
        LaunchError: the job cannot be run here as asked.
    """
    hostname = socket.gethostname()
    hardware = probe({**env, **dict(spec.env)})  # the workers' variables say what they will see
    devices = choose(hardware, spec.devices, asked=spec.asked("devices", ",".join(spec.devices or ())))
    bound = spec.cpu_bind != "none" or spec.numa_binding is not None
    python = spec.program.python or _our_python()
    node = Node(
        hardware=hardware,
        devices=devices,
        cores=cpus.cores("/", hardware.cpus) if bound else (),
        # only a choice between backends asks what torch was built with
        build=torchbuild.find(python, _our_python()) if devices and spec.backend == "auto" else None,
        python=_our_python(),
        bootstrap=os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker", "bootstrap.py"),
        env=env,
    )
    run_id = spec.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    return make_plan(spec, local.discover(spec, hostname), node, run_id=run_id)


def show_plan(spec: JobSpec, env: Mapping[str, str], form: str) -> str:
    """Write the plan as a "table", as "json" or as "sh"; starts nothing.

    Raises:
        LaunchError: the job cannot be run here as asked.
    """
    from ddplaunch.report import plan_view  # only this command needs it

    decided = plan(spec, env)
    match form:
        case "json":
            return plan_view.as_json(decided, spec.origins)
        case "sh":
            return plan_view.shell(decided)
    return plan_view.table(decided, spec)


def run(spec: JobSpec, env: Mapping[str, str]) -> int:
    """Run the job and give its exit status.

    Raises:
        LaunchError: nothing was started.
    """
    _prepare_stdio()
    decided = plan(spec, env)
    if decided.master_port:
        port.reserve(decided.master_port).release()
    if spec.debug_rank is not None and not (os.isatty(0) and os.isatty(1)):
        raise LaunchError(
            "--debug gives a worker the terminal, but stdin or stdout is none", hint="run it in a terminal"
        )
    folder = _folder(spec, env, decided)
    signals = frozenset(
        signum
        for signum in (*front.ALWAYS, signal.SIGTSTP, *spec.stop_signals, *spec.forward_signals)
        if signal.getsignal(signum) is not signal.SIG_IGN
    )
    outfit = Outfit(
        plan=decided,
        env=env,
        folder=folder,
        open_files=raise_open_files(),
        log_limit=None if spec.log_dir else LOG_LIMIT,
        role=spec.role,
        duplicated={Stream.OUT: spec.duplicate_stdout_filters, Stream.ERR: spec.duplicate_stderr_filters},
    )
    policy = Policy(
        ranks=frozenset(worker.rank for worker in decided.local_workers),
        stop_signals=frozenset(spec.stop_signals) - frozenset(spec.forward_signals),
        grace_period=spec.grace_period,
        max_restarts=spec.max_restarts,
        timeout=spec.timeout,
        debug_rank=spec.debug_rank,
    )
    job = agent.Job(
        policy=policy,
        outfit=outfit,
        output=partial(_output, spec, env, decided),
        teller=partial(_teller, spec, env, decided, folder),
        signals=signals,
    )
    # what takes time and nobody waits for is done while the workers start
    return front.run(partial(agent.run, job), signals, spec.stop_signals, meanwhile=folder.tidy)


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # removed meanwhile: no path lies below it
        return ""


def _our_python() -> str:
    import sys

    return sys.executable


def _prepare_stdio() -> None:
    """Fill closed ones of the three standard descriptors, so that no file of ours becomes a worker's stdin or stdout.

    And leave the keys of the shell that has put this job into the background to the shell.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
            os.set_inheritable(fd, True)
    if terminal.belongs_to_another_job():
        os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)


def _folder(spec: JobSpec, env: Mapping[str, str], decided: Plan) -> RunFolder:
    tmp = env.get("TMPDIR") or "/tmp"
    if spec.log_dir == os.devnull:  # torchrun's way to say: none
        return RunFolder.none(decided.run_id, tmp=tmp)
    if spec.log_dir:
        root = os.path.abspath(spec.log_dir)
        return RunFolder.make(root, spec.rdzv_id or decided.run_id, torchrun_layout=True, tmp=tmp)
    state = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # which the XDG standard says to ignore
        state = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    if not os.path.isabs(state):
        problem = "no logs are kept: HOME is not set, and this user has no home folder"
        return RunFolder.none(decided.run_id, tmp=tmp, problem=problem)
    root = os.path.join(state, "ddplaunch", "runs")
    return RunFolder.make(root, decided.run_id, torchrun_layout=False, tmp=tmp)


def _output(spec: JobSpec, env: Mapping[str, str], decided: Plan, outbox: Outbox) -> Output:
    workers = decided.local_workers
    shown = [
        Shown(rank=worker.rank, local_rank=worker.local_rank, role=spec.role, streams=_shown(spec, worker.local_rank))
        for worker in workers
    ]
    terminals = {stream for stream, fd in ((Stream.OUT, 1), (Stream.ERR, 2)) if os.isatty(fd)}
    display = Display(
        mode=spec.output,
        ranks=shown,
        colour={stream for stream in Stream if use_colour(env, stream in terminals)},
        terminal=terminals,
        template=env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        world_size=decided.world_size,
    )
    return Output(display, lambda stream, data: outbox.put(_TAGS[stream], data))


def _shown(spec: JobSpec, local_rank: int) -> frozenset[Stream]:
    """torchrun's rules: redirected streams go to files only, unless they are tee'd; filtered ranks go nowhere else."""
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return frozenset()
    if spec.debug_rank is not None:
        return frozenset()  # the terminal belongs to the debugged worker
    hidden = _MASKS[spec.redirects.of(local_rank)] - _MASKS[spec.tee.of(local_rank)]
    return frozenset(set(Stream) - hidden)


def _teller(spec: JobSpec, env: Mapping[str, str], decided: Plan, folder: RunFolder, outbox: Outbox) -> Teller:
    return Teller(
        decided,
        folder,
        lambda text: outbox.put(STDERR, text.encode(errors="surrogateescape")),
        time.monotonic,
        verbosity=spec.verbosity,
        colour=use_colour(env, os.isatty(2)),
        cwd=_cwd(),
        origins=spec.origins,
    )
