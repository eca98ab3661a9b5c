"""ddplaunch launches and supervises PyTorch DistributedDataParallel jobs.

For training scripts it offers `init_process_group()`, `device()`, `should_stop()` and `progress()`; for notebooks, tests and
programs `launch()`, which runs a function in workers, with the exceptions that it raises. They, and torch where it is needed, are
imported when they are first used: `import ddplaunch` costs nothing.
"""

__version__ = "0.1.0"
__all__ = [
    "JobError",
    "JobTimeout",
    "WorkerFailed",
    "__version__",
    "device",
    "init_process_group",
    "launch",
    "progress",
    "should_stop",
]

TYPE_CHECKING = False  # typing's own would be an import
if TYPE_CHECKING:
    from ddplaunch.tools.functions import launch
    from ddplaunch.tools.functions.exceptions import JobError, JobTimeout, WorkerFailed
    from ddplaunch.worker.api import device, init_process_group, should_stop
    from ddplaunch.worker.progress import progress
else:  # hidden from type checkers, for which __getattr__ would make every name exist
    _MODULES = {
        "JobError": "tools.functions.exceptions",
        "JobTimeout": "tools.functions.exceptions",
        "WorkerFailed": "tools.functions.exceptions",
        "device": "worker.api",
        "init_process_group": "worker.api",
        "launch": "tools.functions",
        "progress": "worker.progress",
        "should_stop": "worker.api",
    }

    def __getattr__(name: str) -> object:
        """Import the name, once."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
