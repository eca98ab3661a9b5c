"""Torch without its compiler, which optimizers and DDP import, and which takes a worker as long as torch itself."""

import sys
from types import ModuleType, SimpleNamespace

compiler = ModuleType("torch._dynamo")
vars(compiler).update(
    disable=lambda function, *_, **__: function,
    graph_break=lambda: None,
    trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    config=SimpleNamespace(_get_optimize_ddp_mode=lambda: "no_optimization"),  # before torch 2.6
    utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"),
)
sys.modules[compiler.__name__] = compiler
