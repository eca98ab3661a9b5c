"""What a fork server is to import before it forks workers, or why there can be none. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.cluster import Allocation
from ddplaunch.plan import WorkerPlan, first_steps
from ddplaunch.spec import JobSpec, ProgramKind

# what DDP and every optimizer import at their first step is the last of them, and takes as long as torch itself
PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
_WITHOUT_STEPS = PRELOAD[:-1]
_TRAINS = (b"optim", b"DistributedDataParallel", b"torch.compile")

# OpenMP reads these and the CPUs it may use when it is loaded, which the fork server does for all workers
_OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")

# what is named here does something at the start of each process
_OF_EACH_PROCESS = ("LD_PRELOAD", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def modules(
    spec: JobSpec, workers: Sequence[WorkerPlan], caller: Mapping[str, str], script: bytes = b""
) -> tuple[tuple[str, ...] | None, str | None]:
    """Return what a fork server imports; or None, and if it was asked for why workers are fresh processes nevertheless."""
    if spec.start_method == "auto":
        changes = any(worker.terminal or worker.cpus for worker in workers) or any(map(caller.get, _OF_EACH_PROCESS))
        if changes or not first_steps.import_torch(script):
            return None, None
        return PRELOAD if any(word in script for word in _TRAINS) else _WITHOUT_STEPS, None
    if spec.program.kind is ProgramKind.COMMAND:
        return None, "a command cannot be forked from an interpreter"
    if any(worker.terminal for worker in workers):
        return None, "the worker that has the terminal is a fresh process"
    if any(worker.cpus for worker in workers) and (names := [name for name in _OPENMP_BINDING if caller.get(name)]):
        return None, f"{names[0]} and CPUs of its own for each worker need fresh processes"
    return PRELOAD if spec.preload is None else spec.preload, None


# set in a batch job, whose end is to be the end of all that it has started
_OF_A_JOB = (
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
    "OAR_JOB_ID",
    "SGE_TASK_ID",  # Grid Engine: "undefined" where the job is no array
    "PE_HOSTFILE",
    "LOADL_STEP_ID",
    "COBALT_JOBID",
    "PJM_JOBID",
    "_CONDOR_SCRATCH_DIR",
)
_OF_A_WORKER = ("TORCHELASTIC_RUN_ID", "DDPLAUNCH_RUN_ID")


def keep_warm(
    spec: JobSpec, preload: Sequence[str] | None, allocation: Allocation, caller: Mapping[str, str]
) -> tuple[int | None, str]:
    """Return for how many seconds the fork server is kept for the next run; or None, and if it was asked for why it is not."""
    if spec.keep_warm is None or preload is None:
        return None, ""
    why = ""
    if allocation.cluster != "local" or allocation.nnodes != (1, 1):
        why = "what is kept serves jobs on this machine alone"
    elif names := [name for name in _OF_A_JOB if caller.get(name)]:
        why = f"nothing may outlive a batch job, and {names[0]} is set"
    elif any(map(caller.get, _OF_A_WORKER)):
        why = "nothing may outlive the job whose worker has started this one"
    elif caller.get("SUDO_UID"):
        why = "no process of another user is to stay after sudo"
    elif caller.get("DDPLAUNCH_CALL"):
        why = "what is kept cannot run a function"
    return (None, why) if why else (60 * spec.keep_warm, "")


def asked(spec: JobSpec) -> str:
    """The option that asks for a fork server, as it was given."""
    if spec.keep_warm is not None and spec.origin("start_method") == spec.origin("keep_warm"):
        return spec.asked("keep_warm", spec.keep_warm)
    return spec.asked("start_method", spec.start_method)
