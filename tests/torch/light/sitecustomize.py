"""Torch in half the time: without its compiler, which optimizers and DDP import, tensors that have no data, and quantization."""

import sys
from types import ModuleType, SimpleNamespace

compiler = ModuleType("torch._dynamo")
vars(compiler).update(
    disable=lambda function, *_, **__: function,
    graph_break=lambda: None,
    trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    config=SimpleNamespace(_get_optimize_ddp_mode=lambda: "no_optimization"),  # before torch 2.6
    utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"),
    OptimizedModule=type("OptimizedModule", (), {}),
)
sys.modules[compiler.__name__] = compiler
quantization = ("ao", "quantization", "nn.intrinsic", "nn.qat", "nn.quantizable", "nn.quantized")
for unused in ("export", "masked", "distributions", *quantization):
    sys.modules[f"torch.{unused}"] = ModuleType(f"torch.{unused}")


class Instead:
    """Finds our file in the place of a module of torch's."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch._meta_registrations":
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(name, __file__.replace("sitecustomize", "meta_registrations"))


sys.meta_path.insert(0, Instead)
