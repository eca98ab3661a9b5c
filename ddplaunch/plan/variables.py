"""The variables of a worker: those of its place in the job, those of all, and those that each generation sets anew. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.plan.other_places import without_other_places
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.words import count


def of_place(
    *, rank: int, local_rank: int, world_size: int, local_world_size: int, node_rank: int, nnodes: int, role: str
) -> dict[str, str]:
    """Return the variables that say which worker this is.

    torchrun sets the same (torch/distributed/elastic/agent/server/local_elastic_agent.py); with one role
    for the whole job the role's ranks are the job's.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(nnodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": role,
    }


_OF_PLACE = frozenset(
    of_place(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, nnodes=1, role="default")
)
# known once the nodes have met, and read by no module when it is imported
_OF_GENERATION = ("MASTER_", "TORCHELASTIC_", "DDPLAUNCH_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_WIDEST_RANKS = 14  # characters, as the status area shows them
_NARROWEST = 20  # columns: below that, rich's and tqdm's bars say nothing
_OF_A_SHELL = frozenset(
    ("_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "WINDOW", "STY", "TMUX_PANE", "TERM_SESSION_ID")
) | {
    *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "GPG_TTY", "TMUX", "HISTFILE"),
    # of a login, and of what systemd starts
    *("XDG_SESSION_ID", "XDG_VTNR", "XDG_SEAT", "XDG_ACTIVATION_TOKEN", "INVOCATION_ID", "JOURNAL_STREAM"),
    # windows of terminals, editors and prompts
    *("SHELL_SESSION_ID", "WINDOWPATH", "WT_SESSION", "ITERM_SESSION_ID", "KITTY_PID", "KITTY_WINDOW_ID"),
    *("ALACRITTY_LOG", "ALACRITTY_SOCKET", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE", "WEZTERM_UNIX_SOCKET"),
    *("KONSOLE_DBUS_SERVICE", "KONSOLE_DBUS_SESSION", "KONSOLE_DBUS_WINDOW", "GNOME_TERMINAL_SCREEN"),
    *("VSCODE_IPC_HOOK_CLI", "VSCODE_GIT_IPC_HANDLE", "STARSHIP_SESSION_KEY", "ATUIN_SESSION", "MCFLY_SESSION_ID"),
}


def environment(
    caller: Mapping[str, str],
    plan: Plan,
    worker: WorkerPlan,
    *,
    generation: int,
    term: int | None,
    port: int,
    error_file: str = "",
    log_dir: str = "",
    of_mps: Mapping[str, str] = MappingProxyType({}),
    of_terminal: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the whole environment of a worker: its plan's over the caller's, and over both what each generation sets anew.

    Of the caller's, none comes along that tells of a place in another launcher's job which is not that of the worker.
    """
    changing = of_generation(plan, generation=generation, term=term, port=port, error_file=error_file, log_dir=log_dir)
    asked = {**_inherited(caller, plan), **worker.variables}
    if asked.get("NO_COLOR"):
        of_terminal = {name: value for name, value in of_terminal.items() if name != "FORCE_COLOR"}
    return {**of_terminal, **asked, **of_mps, **changing}


def _inherited(caller: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Return the caller's variables that hold for the workers of this node."""
    rank = plan.workers[0].rank if len(plan.workers) == 1 else None
    return without_other_places(caller, rank, plan.world_size)


def of_terminal(columns: int, lines: int, *, highest: int) -> dict[str, str]:
    """Return the variables by which a worker that writes to a pipe learns that its output is shown on a terminal of this size.

    rich takes FORCE_COLOR for a terminal, and since 14.0 TTY_COMPATIBLE and TTY_INTERACTIVE; Python since 3.13, termcolor
    and others write colours for FORCE_COLOR. rich, tqdm and shutil.get_terminal_size read COLUMNS and LINES. What stands
    around a row of a job up to the rank `highest` is left free: the ranks before it, "slowest" behind it.
    """
    found = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}
    if columns and lines:
        around = min(len(f"[0-{highest}] "), _WIDEST_RANKS + 1) + len(" slowest ")
        found |= {"COLUMNS": str(max(_NARROWEST, columns - around)), "LINES": str(lines)}
    return found


def first_term(wall_clock: float) -> int:
    """Return the DDPLAUNCH_TERM of the first generation of a job that begins at this time, in seconds since 1970.

    Milliseconds are greater than the last term of any run before: each generation adds 1, and none is as short as 1 ms.
    """
    return max(0, int(wall_clock * 1000))


def of_generation(
    plan: Plan, *, generation: int, term: int | None, port: int, error_file: str = "", log_dir: str = ""
) -> dict[str, str]:
    """Return the variables that change when all workers are started again.

    `error_file` is where the worker writes its uncaught exception, "" for nowhere. Without a `term` there is no DDPLAUNCH_TERM:
    nodes that do not communicate, and shells into which a user pastes a worker, have no term in common.
    """
    address = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    method = {"env": "env://", "tcp": f"tcp://{address}:{port}"}.get(plan.init_method)
    return {
        "MASTER_PORT": str(port),
        # programs resume from a checkpoint if this is above 0: after a requeue too
        "TORCHELASTIC_RESTART_COUNT": str(plan.requeues + generation),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "DDPLAUNCH_INIT_METHOD": method or f"file://{init_file(plan, generation)}",  # --init-method file:PATH
        "DDPLAUNCH_LOG_DIR": log_dir,
        **({} if term is None else {"DDPLAUNCH_TERM": str(term)}),
    }


def of_fork_server(caller: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Return what the environments of all workers of the node have in common, whatever their ranks and their generation."""
    first, *others = (worker.variables for worker in plan.workers)
    shared = {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
    return {
        name: value
        for name, value in {**_inherited(caller, plan), **shared}.items()
        if name not in shared or not (name in _OF_PLACE or name.startswith(_OF_GENERATION))
    }


def without_worker_place(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process for a job of its own: in a worker, without the variables that ddplaunch has set."""
    if "TORCHELASTIC_RUN_ID" not in env:  # else RANK and its like are the user's
        return dict(env)
    return {name: value for name, value in env.items() if not (name in _OF_PLACE or name.startswith(_OF_GENERATION))}


def of_warm_interpreter(caller: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Return the same without what differs from shell to shell, and which no module reads when it is imported."""
    return {name: value for name, value in of_fork_server(caller, plan).items() if name not in _OF_A_SHELL}


def init_file(plan: Plan, generation: int) -> str | None:
    """Return the file of one generation's file:// rendezvous, None unless --init-method is file."""
    if not plan.init_method.startswith("file:"):
        return None
    return f"{plan.init_method.removeprefix('file:')}.{plan.run_id}.{generation}"


def common(
    spec: JobSpec, caller: Mapping[str, str], *, run_id: str, backend: str, address: str, omp: int | None
) -> dict[str, str]:
    """Return the variables that all workers of the job share: those of torchrun, and ddplaunch's own.

    `address` is MASTER_ADDR, `omp` the number of threads of a worker; None: OMP_NUM_THREADS stays as the caller has it.
    """
    found = {
        **dict(spec.env),
        "MASTER_ADDR": address,
        "TORCHELASTIC_RUN_ID": spec.rdzv_id or run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DDPLAUNCH_RUN_ID": run_id,
        "DDPLAUNCH_BACKEND": backend,
    }
    if spec.requeue_on:
        found["DDPLAUNCH_NOTICE_SIGNALS"] = ",".join(signum.name for signum in spec.requeue_on)
    if spec.sharing_strategy:
        found["DDPLAUNCH_SHARING_STRATEGY"] = spec.sharing_strategy
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED"):
        found[name] = caller.get(name, "1")
    found["OMP_NUM_THREADS"] = caller["OMP_NUM_THREADS"] if omp is None else str(omp)
    return found


def socket_interface_variables(interface: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to one interface, as far as `env` does not set them itself.

    By default gloo listens where the host's own name resolves to, which is 127.0.1.1 on many hosts
    (createDefaultDevice in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), and NCCL takes every interface that is not
    called docker, lo or virbr (ncclFindInterfaces in nccl's src/misc/socket.cc). The two are independent: a network
    chosen for NCCL implies none for gloo. One that is set but empty counts as set, and leaves the choice to the library.

    gloo takes names, separated by commas, literally (Options::create_default in ProcessGroupGloo.cpp). NCCL
    takes them as beginnings of names, unless `=` stands before them, and nothing after a colon (ncclOsFindInterfaces in
    nccl's src/os/linux.cc, parseStringList in src/misc/utils.cc); so the label of a further address, eth0:1, is gloo's.
    """
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface.partition(':')[0]}"}
    return {name: value for name, value in names.items() if name not in env}


def threads(spec: JobSpec, usable: int, workers: int, env_value: str | None) -> tuple[int | None, str]:
    """Return OMP_NUM_THREADS for each worker and the reason; None: leave the variable as it is.

    `usable` is the number of CPUs that the workers of this node share, `env_value` what OMP_NUM_THREADS holds before
    ddplaunch sets anything. --threads beats the variable. An empty variable counts as not set, as it does for OpenMP,
    which would then start a thread on every CPU in every worker.
    """
    if spec.threads is not None:
        return spec.threads, spec.origin("threads")
    if env_value and not env_value.isspace():
        return None, f"OMP_NUM_THREADS={env_value} was set"
    return max(1, usable // workers), f"{count(usable, 'usable CPU')} / {count(workers, 'worker')}"
