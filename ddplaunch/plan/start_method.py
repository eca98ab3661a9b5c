"""What a fork server is to import before it forks workers, or why there can be none. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.plan import WorkerPlan, first_steps
from ddplaunch.spec import JobSpec, ProgramKind

# not torch._dynamo, which DDP and optimizers import: with torch 2.13 a script that has it from the start may hang where its DDP
# model ends, in fresh processes too (~ProcessGroupGloo joins a thread that waits for the GIL)
PRELOAD = ("torch", "torch.distributed")

# OpenMP reads these and the CPUs it may use when it is loaded, which the fork server does for all workers
_OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")

# what is named here does something at the start of each process
_OF_EACH_PROCESS = ("LD_PRELOAD", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def modules(
    spec: JobSpec, workers: Sequence[WorkerPlan], caller: Mapping[str, str], script: bytes = b""
) -> tuple[tuple[str, ...] | None, str | None]:
    """Give what a fork server imports; or None, and if it was asked for why workers are fresh processes nevertheless."""
    if spec.start_method == "auto":
        changes = any(worker.terminal or worker.cpus for worker in workers) or any(map(caller.get, _OF_EACH_PROCESS))
        if changes or not first_steps.import_torch(script):
            return None, None
        return PRELOAD, None
    asked = spec.asked("start_method", spec.start_method)
    if spec.program.kind is ProgramKind.COMMAND:
        return None, f"{asked} has no effect: a command cannot be forked from an interpreter"
    if any(worker.terminal for worker in workers):
        return None, f"{asked} has no effect: the worker that has the terminal is a fresh process"
    if any(worker.cpus for worker in workers) and (names := [name for name in _OPENMP_BINDING if caller.get(name)]):
        return None, f"{asked} has no effect: {names[0]} and CPUs of its own for each worker need fresh processes"
    return PRELOAD if spec.preload is None else spec.preload, None
