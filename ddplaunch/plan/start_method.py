"""What a fork server is to import before it forks workers, or why there can be none, and whether it is kept warm. Pure."""

from __future__ import annotations

import _ast  # what `ast` is made of, without the import of `re`
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence

from ddplaunch.plan import WorkerPlan
from ddplaunch.plan.cluster import Allocation
from ddplaunch.spec.job import JobSpec, ProgramKind

# what DDP and every optimizer import at their first step is the last of them, and takes as long as torch itself
PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
_WITHOUT_STEPS = PRELOAD[:-1]
_TRAINS = (b"optim", b"DistributedDataParallel", b"torch.compile")

# OpenMP reads these and the CPUs it may use when it is loaded, which the fork server does for all workers
_OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")

# what is named here does something at the start of each process
_OF_EACH_PROCESS = ("LD_PRELOAD", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def modules(
    spec: JobSpec,
    workers: Sequence[WorkerPlan],
    caller: Mapping[str, str],
    script: bytes = b"",
    *,
    is_followed: bool = False,
) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the modules that a fork server imports; or None, and why workers are fresh although the user asked for a fork.

    `is_followed`: a debugger around the command gets into the workers.
    """
    if spec.start_method == "auto":
        changes = (
            is_followed
            or any(worker.terminal or worker.cpus or worker.wrap for worker in workers)
            or any(map(caller.get, _OF_EACH_PROCESS))
        )
        if changes or not import_torch(script):
            return None, None
        return PRELOAD if any(word in script for word in _TRAINS) else _WITHOUT_STEPS, None
    if spec.program.kind is ProgramKind.COMMAND:
        return None, "a command cannot be forked from an interpreter"
    if is_followed:
        return None, "the debugger around this command gets into fresh processes only"
    if any(worker.wrap for worker in workers):
        return None, "a worker of --wrap is a fresh process"
    if any(worker.terminal for worker in workers):
        return None, "the worker that has the terminal is a fresh process"
    if any(worker.cpus for worker in workers) and (names := [name for name in _OPENMP_BINDING if caller.get(name)]):
        return None, f"{names[0]} and CPUs of its own for each worker need fresh processes"
    return PRELOAD if spec.preload is None else spec.preload, None


# set in a batch job, whose end is to be the end of all that it has started
_OF_A_JOB = (
    *("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "OAR_JOB_ID"),
    *("SGE_TASK_ID", "PE_HOSTFILE"),  # Grid Engine, with "undefined" as the task where the job is no array
    *("LOADL_STEP_ID", "COBALT_JOBID", "PJM_JOBID", "_CONDOR_SCRATCH_DIR"),
)
_OF_A_WORKER = ("TORCHELASTIC_RUN_ID", "DDPLAUNCH_RUN_ID")


def keep_warm(
    spec: JobSpec, preload: Sequence[str] | None, allocation: Allocation, caller: Mapping[str, str]
) -> tuple[int | None, str]:
    """Return for how many seconds the fork server stays, and ""; or None, and why it does not stay although the user asked."""
    if spec.keep_warm is None or preload is None:
        return None, ""
    why = ""
    if names := [name for name in _OF_A_JOB if caller.get(name)]:
        why = f"nothing may outlive a batch job, and {names[0]} is set"
    elif allocation.cluster != "local" or allocation.nnodes != (1, 1):
        why = "a warm interpreter serves only jobs on this machine"
    elif any(map(caller.get, _OF_A_WORKER)):
        why = "nothing may outlive the job whose worker has started this one"
    elif caller.get("SUDO_UID"):
        why = "no process of another user is to stay after sudo"
    elif caller.get("DDPLAUNCH_CALL"):
        why = "a warm interpreter cannot run a function"
    return (None, why) if why else (60 * spec.keep_warm, "")


def asked(spec: JobSpec) -> str:
    """Return the option that asks for a fork server, as it was given."""
    if spec.keep_warm is not None and spec.origin("start_method") == spec.origin("keep_warm"):
        return spec.typed("keep_warm", spec.keep_warm)
    return spec.typed("start_method", spec.start_method)


# --- what a script does before it imports torch, as its text says
#
# A script cannot tell whether torch was imported before its first line if nothing that it does until it imports it itself changes
# what torch finds: variables, import path, modules, warnings, logging. So only what certainly changes nothing is passed over.


# imported before torch by many scripts; none of them sets a variable that torch reads, or replaces a module
_HARMLESS = sys.stdlib_module_names | {"ddplaunch", "numpy", "packaging", "psutil", "tqdm", "yaml"}

# what torch._dynamo reads at its import comes after the script's own import of torch
_TELLTALES = (b"TORCH", b"TRITON", b"INDUCTOR", b"sys.modules", b"meta_path", b"path_hooks", b"load_dotenv")
_NO_TELLTALES = (b"TORCHELASTIC",)

_PLAIN = (
    _ast.Constant, _ast.Name, _ast.Attribute, _ast.Subscript, _ast.Tuple, _ast.List, _ast.Dict, _ast.Compare, _ast.BoolOp,
    _ast.BinOp, _ast.UnaryOp, _ast.expr_context, _ast.cmpop, _ast.boolop, _ast.operator, _ast.unaryop,
)  # fmt: skip


def import_torch(text: bytes) -> bool:
    """Whether this script imports torch before it does anything that could change how torch is imported."""
    for harmless in _NO_TELLTALES:
        text = text.replace(harmless, b"")
    if any(telltale in text for telltale in _TELLTALES):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers show them
            tree = compile(text, "", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        return isinstance(tree, _ast.Module) and bool(_before_torch(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _before_torch(statements: Iterable[_ast.stmt]) -> bool | None:
    """Return True if torch is imported after harmless statements alone, False if another comes first, None if neither comes."""
    return next((step for step in map(_step, statements) if step is not None), None)


def _step(statement: _ast.stmt) -> bool | None:
    """Return True if one statement imports torch, False if it might change how torch is imported, None if neither."""
    imported: list[str] = []
    match statement:
        case _ast.Import(names=names):
            imported = [one.name for one in names]
        case _ast.ImportFrom(module=str(module), level=0):
            imported = [module]
        case _ast.Expr(value=_ast.Constant()) | _ast.Pass():
            pass
        case _ast.Assign(targets=[_ast.Name()], value=value) if _is_plain(value):
            pass
        case _ast.If(test=test, body=body, orelse=orelse) if _is_plain(test):
            return _either(_before_torch(body), _before_torch(orelse))
        case _ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
            if (step := _before_torch(body)) is not None:
                return step  # where torch cannot be imported there is no job
            handled = (_before_torch(handler.body) for handler in handlers)
            return _before_torch(last) if (step := _either(_before_torch(orelse), *handled)) is None else step
        case _:
            return False
    for name in imported:
        package = name.partition(".")[0]
        if package == "torch":
            return True
        if package not in _HARMLESS:
            return False
    return None


def _either(*branches: bool | None) -> bool | None:
    """Return the same for statements of which some run: torch is imported if all of them import it."""
    return False if False in branches else (True if all(branches) else None)


def _is_plain(expression: _ast.AST) -> bool:
    """Whether this calls nothing."""
    parts = (getattr(expression, name) for name in expression._fields)
    inner = [one for part in parts for one in (part if isinstance(part, list) else [part]) if isinstance(one, _ast.AST)]
    return isinstance(expression, _PLAIN) and all(map(_is_plain, inner))
