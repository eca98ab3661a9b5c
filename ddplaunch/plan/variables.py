"""The variables of a worker: those of its place in the job, those of all, and those that each generation sets anew. Pure.

A worker inherits the variables by which launchers of MPI, and Slurm, tell a task its place. They are true of a worker that is
such a task: one worker, with the same rank in a job of the same size. Of others they are not: all workers of a node would be the
same task, MPI_Init would fail or wait, and libraries that look at these variables first would take one rank for all. What a user
has set for MPI stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from ddplaunch.plan import Plan, WorkerPlan
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


class _Kind(Struct, frozen=True):
    """The variables of one launcher."""

    rank: str
    size: str = ""  # "": it sets none
    prefixes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # complete
    settings: tuple[str, ...] = ()  # prefixes of a user's
    only_with_rank: bool = False  # without the rank, these may be a user's too

    def is_of(self, name: str) -> bool:
        """Whether a variable is one of these."""
        is_named = name in (self.rank, self.size) or name in self.names
        return is_named or (name.startswith(self.prefixes) and not name.startswith(self.settings or "\0"))


def _named(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names.split())


_KINDS = (
    _Kind(  # orterun of Open MPI 4, prterun of 5
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        prefixes=("OMPI_COMM_WORLD_", "OMPI_WORLD_", "OMPI_MCA_ess_base_", "OMPI_MCA_orte_ess_"),
        names=(
            *_named("OMPI_", "UNIVERSE_SIZE APP_CTX_NUM_PROCS FIRST_RANKS NUM_APP_CTX FILE_LOCATION COMMAND ARGV"),
            *_named("OMPI_", "TOOL_NAME VERSION"),
            *_named("OMPI_MCA_", "ess pmix initial_wdir num_procs"),  # `ess` and `pmix` forbid a process to be alone
            *_named("OMPI_MCA_orte_", "hnp_uri local_daemon_uri app_num launch num_nodes num_restarts"),
            *_named("OMPI_MCA_orte_", "bound_at_launch jobfam_session_dir top_session_dir precondition_transports"),
            *("PRTE_LAUNCHED", "PRTE_SHARED_FS"),
        ),
        only_with_rank=True,
    ),
    # a PMIx that was moved is found by PMIX_PREFIX, until version 4 by PMIX_INSTALL_PREFIX
    _Kind(rank="PMIX_RANK", prefixes=("PMIX_",), settings=("PMIX_MCA_", "PMIX_PREFIX", "PMIX_INSTALL_PREFIX")),
    _Kind(  # Hydra, of MPICH and Intel MPI; Cray's PMI; srun --mpi=pmi2
        rank="PMI_RANK",
        size="PMI_SIZE",
        prefixes=("MPI_LOCAL", "PMI_LOCAL_", "PMI_CONTROL_"),
        names=(
            *_named("PMI_", "FD PORT ID JOBID SPAWNED KVS APPNUM UNIVERSE_SIZE PROCESS_MAPPING SHARED_SECRET"),
            *("HYDI_CONTROL_FD", "HYDRA_CONTROL_FD"),
        ),
    ),
    _Kind(rank="MV2_COMM_WORLD_RANK", size="MV2_COMM_WORLD_SIZE", prefixes=("MV2_COMM_WORLD_", "MPISPAWN_")),
    _Kind(rank="JSM_NAMESPACE_RANK", size="JSM_NAMESPACE_SIZE", prefixes=("JSM_NAMESPACE_",)),
    _Kind(
        rank="PALS_RANKID",
        size="PALS_SIZE",
        names=_named("PALS_", "LOCAL_RANKID LOCAL_SIZE NODEID APINFO FD SPOOL_DIR STARTUP_BARRIER"),
    ),
    _Kind(rank="ALPS_APP_PE"),
    _Kind(rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", names=("FLUX_TASK_LOCAL_ID",)),
    _Kind(
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        prefixes=("SLURM_PMI_", "SLURM_PMI2_", "SLURM_PMIX_MAPPING_"),
        names=_named("SLURM_", "LOCALID GTIDS TASK_PID"),
    ),
)


def without_other_places(env: Mapping[str, str], rank: int | None, world_size: int) -> dict[str, str]:
    """Return the variables of the command that a worker inherits: none of a place in another job that is not the worker's.

    `rank` is that of the only worker of the command; None: it has several.
    """
    sized = [kind for kind in _KINDS if kind.size and kind.rank in env]
    # a rank without a size, as PMIx has it, is believed as far as the launcher is that has set both
    is_denied = bool(sized) and not any(_is_true(kind, env, rank, world_size) for kind in sized)
    foreign = [kind for kind in _KINDS if (is_denied and not kind.size) or not _is_true(kind, env, rank, world_size)]
    return {name: value for name, value in env.items() if not any(kind.is_of(name) for kind in foreign)}


def _is_true(kind: _Kind, env: Mapping[str, str], rank: int | None, world_size: int) -> bool:
    """Whether what the variables of a launcher say, if they are set at all, holds for the worker."""
    found, size = env.get(kind.rank), env.get(kind.size)
    if found is None and kind.only_with_rank:
        return True
    return rank is not None and found in (None, str(rank)) and size in (None, str(world_size))
