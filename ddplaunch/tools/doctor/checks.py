"""All checks of one machine, in the order in which -v shows them."""

from __future__ import annotations

from itertools import chain

from ddplaunch.tools.doctor import (
    Check,
    all_reduce,
    files,
    gpus,
    interpreter,
    limits,
    network,
    shared_memory,
    slurm,
    variables,
)

_MODULES = (interpreter, gpus, all_reduce, limits, shared_memory, files, network, variables, slurm)
ALL: tuple[Check, ...] = tuple(chain.from_iterable(module.CHECKS for module in _MODULES))
