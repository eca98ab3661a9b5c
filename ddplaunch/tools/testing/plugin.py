"""A pytest plugin: `@pytest.mark.ddplaunch(nproc=2)` runs a test on every rank of a job.

Fixtures are set up once, in pytest's own process, and their values go to the workers. The test fails with the report of the
rank that failed first. In a session without such a test the plugin does nothing, and imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ddplaunch.tools.functions.exceptions import JobError  # noqa: F401 - in the name of a type, below
    from ddplaunch.tools.testing.rank import RankRequest

NAME = "ddplaunch"
# a run folder for each test would push others out
DEFAULTS: Mapping[str, Any] = {"timeout": 300, "log_dir": os.devnull}
_ABOUT = (
    f"{NAME}(nproc=2, timeout=300, **options): run the test in `nproc` workers, on every rank; `options` are those of "
    "the command ddplaunch, with _ for -"
)
# a worker imports this plugin before pytest does; the warning would be an error under `-W error`
_NO_WARNING_OF_IMPORT = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
_FIRST_FAILURE = pytest.StashKey["JobError"]()  # of a test that has failed on some rank


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _ABOUT)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that has the marker on every rank, and return True; None: pytest itself is to run the test."""
    marker = pyfuncitem.get_closest_marker(NAME)
    if marker is None or "DDPLAUNCH_RUN_ID" in os.environ:  # in a worker it runs as any other test
        return None
    from ddplaunch.tools.functions import launch
    from ddplaunch.tools.functions.exceptions import JobError
    from ddplaunch.tools.testing.rank import RankOutcome, run

    options = _options_of(marker)
    request = _request_for(pyfuncitem)
    wrong = ""  # shown outside of `except`, so that pytest shows no traceback of ours
    try:
        launch(run, (request,), **options)
    except RankOutcome as outcome:  # it was skipped, or failed as was expected
        raise outcome.exception() from None
    except JobError as error:
        pyfuncitem.stash[_FIRST_FAILURE] = error
        raise
    except (TypeError, ValueError) as error:
        wrong = str(error).replace("launch()", f"@pytest.mark.{NAME}")
    if wrong:
        pytest.fail(wrong, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the report of the rank that failed first, which its exception has brought along, in place of our traceback."""
    report = yield
    error = item.stash.get(_FIRST_FAILURE, None)
    if error is None or call.when != "call":
        return report
    from ddplaunch.tools.testing.rank import REPORT_ATTRIBUTE

    data = getattr(error, REPORT_ATTRIBUTE, None)  # set in the worker, see `rank`
    first = None if data is None else item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
    notes = list(getattr(error, "__notes__", ()))
    if not isinstance(first, pytest.TestReport):  # that rank left none: it was killed, say
        report.longrepr = "\n".join([f"{type(error).__name__}: {error}", *notes])
        return report
    report.longrepr = first.longrepr
    rank = getattr(error, "rank", "?")
    report.sections += [(f"{name} of rank {rank}", text) for name, text in first.sections]
    notes_behind_traceback = [note.strip("\n") for note in notes[1:]]  # the first note is the worker's traceback
    report.sections.append((NAME, "\n".join([f"rank {rank} failed first", *notes_behind_traceback])))
    return report


def _options_of(marker: pytest.Mark) -> dict[str, Any]:
    """Return the options for `launch()` from a marker."""
    if marker.args:
        pytest.fail(f"@pytest.mark.{NAME} takes keywords only: nproc={marker.args[0]!r}?", pytrace=False)
    options = {**DEFAULTS, **marker.kwargs}
    if {"nproc", "nproc_per_node"} <= options.keys():
        pytest.fail(f"@pytest.mark.{NAME}: nproc and nproc_per_node are the same: leave one out", pytrace=False)
    options.setdefault("nproc_per_node", options.pop("nproc", 2))
    return options


def _request_for(item: pytest.Function) -> RankRequest:
    """Return the request for each rank to run the same test with the values that its fixtures have here."""
    from ddplaunch.tools.functions.pickling import close, dumps
    from ddplaunch.tools.testing.rank import Deferred, RankRequest

    params = item.callspec.params if hasattr(item, "callspec") else {}
    names = item._fixtureinfo.argnames  # noqa: SLF001 - as pytest itself does where it calls a test
    given = {name: item.funcargs[name] for name in names}
    # a worker that collects the test again has the parameters that no fixture has changed
    values = {name: value for name, value in given.items() if name not in params or params[name] is not value}
    if item.instance is not None:
        values |= {f"self.{name}": value for name, value in vars(item.instance).items()}
    wrong = ""  # shown outside of `except`, so that pytest shows no traceback of ours
    for name, value in values.items():
        try:
            _, descriptors = dumps(value)  # whether it can be
            close(descriptors)
        except Exception as error:  # noqa: BLE001 - whatever the object's own code raises
            what = f"the attribute {name}" if name.startswith("self.") else f"the fixture {name}"
            wrong = (
                f"{what} cannot be sent to the workers of @pytest.mark.{NAME}: {' '.join(str(error).split())}\n"
                "make it in the test itself, where every rank gets its own"
            )
            break
    if wrong:
        pytest.fail(wrong, pytrace=False)
    return RankRequest(arguments=_command_line(item), values={name: Deferred(value) for name, value in values.items()})


def _command_line(item: pytest.Function) -> list[str]:
    """Return the command line with which pytest in a worker collects this test again, and reports it as here."""
    config, option = item.config, item.config.option
    argv = [f"--rootdir={config.rootpath}", *(["-c", str(config.inipath)] if config.inipath else [])]
    argv += ["-o", "addopts="]  # the caller's own, such as `-n 4`, are for the whole session
    argv += [one for pair in option.override_ini or () for one in ("-o", pair) if not pair.startswith("addopts")]
    argv += [one for name in option.plugins or () for one in ("-p", name)]
    argv += [one for warning in option.pythonwarnings or () for one in ("-W", warning)]
    argv += ["-W", _NO_WARNING_OF_IMPORT]
    argv += [f"--import-mode={option.importmode}", f"--assert={option.assertmode}", f"--tb={option.tbstyle}"]
    argv += ["-v"] * option.verbose + ["--showlocals"] * bool(option.showlocals)
    # its output goes to the console of the job, which pytest captures here
    return [*argv, "-s", "-p", "no:cacheprovider", f"{item.path}::{item.nodeid.partition('::')[2]}"]
