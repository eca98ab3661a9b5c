"""What a fork server (which forks all workers of a node) imports, or why there is none, and whether it stays warm. Pure."""

from __future__ import annotations

import _ast  # what `ast` is made of, without the import of `re`
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from ddplaunch.plan import WorkerPlan
from ddplaunch.plan.cluster import Allocation
from ddplaunch.spec.job import JobSpec, ProgramKind

# what DDP and every optimizer import at their first step is the last of them, and takes as long as torch itself
PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
_PRELOAD_WITHOUT_DYNAMO = PRELOAD[:-1]
_TRAINING_WORDS = (b"optim", b"DistributedDataParallel", b"torch.compile")

# OpenMP reads these and the CPUs it may use when it is loaded, which the fork server does for all workers
_OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")

# what is named here does something at the start of each process
_ACTING_AT_EACH_START = ("LD_PRELOAD", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


class Preload(NamedTuple):
    """What a fork server imports before it forks workers."""

    modules: tuple[str, ...] | None  # None: there is no fork server, workers are fresh processes
    why_fresh: str = ""  # although the user asked for a fork server; "": the user did not


def choose_preload(
    spec: JobSpec,
    workers: Sequence[WorkerPlan],
    caller: Mapping[str, str],
    script: bytes = b"",
    *,
    debugger_follows_children: bool = False,
) -> Preload:
    """Return what a fork server imports. By `auto` there is one only if the script shows that a fork changes nothing.

    `script` is the text of the program, `debugger_follows_children`: a debugger around the command gets into the workers.
    """
    if spec.start_method == "auto":
        fork_may_change_workers = (
            debugger_follows_children
            or any(worker.terminal or worker.cpus or worker.wrap for worker in workers)
            or any(map(caller.get, _ACTING_AT_EACH_START))
        )
        if fork_may_change_workers or not imports_torch_first(script):
            return Preload(None)
        trains = any(word in script for word in _TRAINING_WORDS)  # then its first step imports torch._dynamo
        return Preload(PRELOAD if trains else _PRELOAD_WITHOUT_DYNAMO)
    if spec.program.kind is ProgramKind.COMMAND:
        return Preload(None, "a command cannot be forked from an interpreter")
    if debugger_follows_children:
        return Preload(None, "the debugger around this command gets into fresh processes only")
    if any(worker.wrap for worker in workers):
        return Preload(None, "a worker of --wrap is a fresh process")
    if any(worker.terminal for worker in workers):
        return Preload(None, "the worker that has the terminal is a fresh process")
    openmp_binding = [name for name in _OPENMP_BINDING if caller.get(name)]
    if openmp_binding and any(worker.cpus for worker in workers):
        return Preload(None, f"{openmp_binding[0]} and CPUs of its own for each worker need fresh processes")
    return Preload(PRELOAD if spec.preload is None else spec.preload)


# set in a batch job, whose end is to be the end of all that it has started
_VARIABLES_OF_BATCH_JOBS = (
    *("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "OAR_JOB_ID"),
    *("SGE_TASK_ID", "PE_HOSTFILE"),  # Grid Engine, with "undefined" as the task where the job is no array
    *("LOADL_STEP_ID", "COBALT_JOBID", "PJM_JOBID", "_CONDOR_SCRATCH_DIR"),
)
_VARIABLES_OF_WORKERS = ("TORCHELASTIC_RUN_ID", "DDPLAUNCH_RUN_ID")


class KeptWarm(NamedTuple):
    """Whether a fork server stays after the job, with what it has imported, for the next run."""

    seconds: int | None = None  # for which it stays, unused; None: it ends with the job
    why_not: str = ""  # although the user asked for it; "": the user did not, or there is no fork server


def choose_keep_warm(
    spec: JobSpec, preload: Sequence[str] | None, allocation: Allocation, caller: Mapping[str, str]
) -> KeptWarm:
    """Return for how long the fork server stays, if --keep-warm asks for that; `preload` is None where there is none."""
    if spec.keep_warm is None or preload is None:
        return KeptWarm()
    why = ""
    of_a_batch_job = [name for name in _VARIABLES_OF_BATCH_JOBS if caller.get(name)]
    if of_a_batch_job:
        why = f"nothing may outlive a batch job, and {of_a_batch_job[0]} is set"
    elif allocation.cluster != "local" or allocation.nnodes != (1, 1):
        why = "a warm interpreter serves only jobs on this machine"
    elif any(map(caller.get, _VARIABLES_OF_WORKERS)):
        why = "nothing may outlive the job whose worker has started this one"
    elif caller.get("SUDO_UID"):
        why = "no process of another user is to stay after sudo"
    elif caller.get("DDPLAUNCH_CALL"):  # set by `launch()` of a Python program
        why = "a warm interpreter cannot run a function"
    return KeptWarm(why_not=why) if why else KeptWarm(60 * spec.keep_warm)  # --keep-warm is in minutes


def option_that_asks(spec: JobSpec) -> str:
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

# words of a script that may change, wherever they stand, how torch is imported: torch._dynamo, which the fork server imports as
# well, would be imported only after the script's first lines
_MAY_CHANGE_TORCH = (b"TORCH", b"TRITON", b"INDUCTOR", b"sys.modules", b"meta_path", b"path_hooks", b"load_dotenv")
_NO_VARIABLES_OF_TORCH = (b"TORCHELASTIC",)

_PLAIN = (
    _ast.Constant, _ast.Name, _ast.Attribute, _ast.Subscript, _ast.Tuple, _ast.List, _ast.Dict, _ast.Compare, _ast.BoolOp,
    _ast.BinOp, _ast.UnaryOp, _ast.expr_context, _ast.cmpop, _ast.boolop, _ast.operator, _ast.unaryop,
)  # fmt: skip


def imports_torch_first(text: bytes) -> bool:
    """Whether this script imports torch before it does anything that could change how torch is imported."""
    for word in _NO_VARIABLES_OF_TORCH:  # though they hold one of the words that are looked for
        text = text.replace(word, b"")
    if any(word in text for word in _MAY_CHANGE_TORCH):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers show them
            tree = compile(text, "", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        return isinstance(tree, _ast.Module) and _effect_of_all(tree.body) is _Effect.IMPORTS_TORCH
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


class _Effect(Enum):
    """What statements do as to torch."""

    IMPORTS_TORCH = auto()
    MAY_CHANGE_IT = auto()  # how torch is imported
    NONE = auto()


def _effect_of_all(statements: Iterable[_ast.stmt]) -> _Effect:
    """Return the first effect that statements have which run one after the other."""
    return next((effect for effect in map(_effect_of, statements) if effect is not _Effect.NONE), _Effect.NONE)


def _effect_of(statement: _ast.stmt) -> _Effect:
    """Return what one statement does as to torch; what is not known to be harmless may change how torch is imported."""
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
            return _effect_of_any(_effect_of_all(body), _effect_of_all(orelse))
        case _ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
            effect = _effect_of_all(body)
            if effect is not _Effect.NONE:
                return effect  # where torch cannot be imported there is no job
            effect = _effect_of_any(_effect_of_all(orelse), *(_effect_of_all(handler.body) for handler in handlers))
            return effect if effect is not _Effect.NONE else _effect_of_all(last)
        case _:
            return _Effect.MAY_CHANGE_IT
    for name in imported:
        package = name.partition(".")[0]
        if package == "torch":
            return _Effect.IMPORTS_TORCH
        if package not in _HARMLESS:
            return _Effect.MAY_CHANGE_IT
    return _Effect.NONE


def _effect_of_any(*branches: _Effect) -> _Effect:
    """Return the effect of branches of which one runs: torch is imported if all of them import it."""
    if _Effect.MAY_CHANGE_IT in branches:
        return _Effect.MAY_CHANGE_IT
    return _Effect.NONE if _Effect.NONE in branches else _Effect.IMPORTS_TORCH


def _is_plain(expression: _ast.AST) -> bool:
    """Whether this calls nothing."""
    parts = (getattr(expression, name) for name in expression._fields)
    inner = [one for part in parts for one in (part if isinstance(part, list) else [part]) if isinstance(one, _ast.AST)]
    return isinstance(expression, _PLAIN) and all(map(_is_plain, inner))
