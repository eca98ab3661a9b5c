"""From the keywords of `launch()` to the options of its job, and to a JobSpec. Starts nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from ddplaunch.spec.job import RUNNER, Given, JobSpec, Source
from ddplaunch.spec.options import sources
from ddplaunch.spec.options.resolve import job_spec
from ddplaunch.spec.options.sources import from_keywords
from ddplaunch.spec.options.table import BY_NAME
from ddplaunch.system.errors import LaunchError

CALL = "launch()"

_OF_OTHER_HOSTS = (
    "cluster", "exclude", "hostfile", "hosts", "include", "local_addr", "master_addr", "no_control", "node_rank",
    "rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "remote_python", "standalone", "token_file",
)  # fmt: skip
_REFUSED = {
    **dict.fromkeys(("module", "no_python", "python", "run_path"), "a function runs in the interpreter that has it"),
    **dict.fromkeys(("debug", "debug_on_error", "debugpy"), "the workers of a function have no terminal"),
    **dict.fromkeys(_OF_OTHER_HOSTS, "the workers of a function run on this machine"),
}
# in files and variables these are for commands, and are ignored for functions
_NOT_OF_FUNCTIONS = frozenset((*_REFUSED, "nnodes", "simulate", "quiet", "verbose"))


def given(keywords: Mapping[str, object], env: Mapping[str, str], folder: str | None) -> list[Given]:
    """Collect the options of a job: keywords, variables, and the files found from `folder` upward; None: no files.

    What is for other hosts, terminals or interpreters is refused as a keyword, and left out where a file or a variable gives it:
    there it is for commands. ddplaunch is quiet unless a keyword says otherwise, since `launch()` raises its errors.

    Raises:
        TypeError: a keyword is no option, or has a value of a wrong type.
        LaunchError: an option does not apply to functions, or a file is wrong.
    """
    typed = list(from_keywords(keywords, call=CALL))
    for one in typed:
        if reason := _REFUSED.get(one.name):
            raise LaunchError(f"{one}: {reason}", hint=f"leave {one.name} out")
    is_simulated = any(one.name == "simulate" for one in typed)
    nnodes = next((one for one in typed if one.name == "nnodes"), None)
    if nnodes is not None and not is_simulated and BY_NAME["nnodes"].value(nnodes) != (1, 1):
        raise LaunchError(
            f"{nnodes}: the workers of a function run on this machine",
            hint="add simulate=True for several nodes on this one machine",
        )
    not_typed: list[Given] = [*sources.from_variables(env)]
    if folder is not None:
        in_files, _ = sources.from_files(folder)  # remarks on files that are ignored are for commands
        not_typed += in_files
    says_how_loud = not keywords.keys().isdisjoint({"quiet", "verbose"})
    # of several with one name, the last of the nearest source will win
    return [
        *(one for one in not_typed if one.name not in _NOT_OF_FUNCTIONS),
        *([] if says_how_loud else [_option("quiet", "True")]),
        _option("cluster", "local"),
        *typed,
    ]


def spec_of(collected: Iterable[Given], name: str) -> JobSpec:
    """Resolve the collected options into a JobSpec; `name` is that of the function, as people are to see it.

    Raises:
        LaunchError: a value is invalid, or two of them do not go together.
    """
    return job_spec(collected, [RUNNER, name])


def _option(name: str, text: str) -> Given:
    return Given(name=name, text=text, source=Source.CALL, origin=CALL, form=f"{name}={{}}")


def stop_signal(spec: JobSpec) -> signal.Signals:
    """Return the signal that stops this job: SIGTERM, unless SIGTERM has another meaning for this job."""
    stops = [signum for signum in spec.stop_signals if signum not in spec.forward_signals]
    return signal.SIGTERM if signal.SIGTERM in stops or not stops else stops[0]
