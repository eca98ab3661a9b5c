"""Runs a test in a worker: pytest there collects it again and runs it with the fixture values of the session that was typed."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec import Struct

from ddplaunch.tools.functions import pickling

REPORT_ATTRIBUTE = "_ddplaunch_report"  # attribute of an exception: pytest's report of it, as plain data


class RankOutcome(Exception):
    """A skip or an expected failure, for which pytest raises BaseExceptions."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)

    def exception(self) -> BaseException:
        """Return pytest's own exception."""
        kind, message = self.args
        if kind == "Skipped":
            return pytest.skip.Exception(message, _use_item_location=True)
        return pytest.xfail.Exception(message)


class Failed(Exception):
    """pytest.fail() was called."""


class Deferred:
    """A value that is unpickled when it is used: its module may be one that pytest has not imported yet."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value separately."""
        from multiprocessing import reduction

        data, descriptors = pickling.dumps(self._value)
        try:
            return PickledValue, (data, [reduction.DupFd(descriptor) for descriptor in descriptors])
        finally:
            pickling.close(descriptors)


class PickledValue:
    """A deferred value in the worker, still pickled."""

    def __init__(self, data: bytes, descriptors: Sequence[Any]) -> None:
        self._data = data
        self._descriptors = descriptors

    def open(self) -> Any:
        """Return the value."""
        return pickling.loads(self._data, self._descriptors)


class RankRequest(Struct, frozen=True, kw_only=True):
    """Which test to run."""

    arguments: list[str]  # pytest's command line
    values: Mapping[str, Any]  # of fixtures by name, and of attributes as "self.NAME"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the request although it is frozen."""
        return partial(RankRequest, arguments=self.arguments, values=dict(self.values)), ()


def run(request: RankRequest) -> None:
    """Run a test.

    Raises: what the test raises.
    """
    os.environ.pop("PYTEST_ADDOPTS", None)
    rank = _Rank(request.values)
    status = pytest.main(request.arguments, plugins=[rank])
    if rank.error is not None:
        raise rank.error
    if not rank.has_run:
        raise RuntimeError(f"pytest did not find the test again (exit status {int(status)}): {request.arguments[-1]}")


class _Rank:
    """The hooks of pytest's session in a worker: fixtures have the values that were sent, and `error` is to be sent back."""

    def __init__(self, values: Mapping[str, PickledValue]) -> None:
        self._values = values
        self.error: Exception | None = None
        self.has_run = False  # the test itself, beyond its fixtures

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Print nothing: the calling session reports."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Set up no fixture: each has its value."""
        assert isinstance(item, pytest.Function)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for name in item.fixturenames:
            item.funcargs[name] = self._values[name].open() if name in self._values else params.get(name)
        for name, value in self._values.items():
            if name.startswith("self."):
                setattr(item.instance, name.removeprefix("self."), value.open())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the exception of the test, with pytest's report of it."""
        report = yield
        self.has_run = self.has_run or call.when == "call"
        if call.excinfo is not None and self.error is None:
            self.error = error = _sendable(call.excinfo.value)
            whole = call.excinfo.value.__traceback__
            from_test = whole
            while from_test is not None and from_test.tb_frame.f_code.co_filename != str(item.path):  # frames of pytest
                from_test = from_test.tb_next
            error.__traceback__ = from_test or whole
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            try:
                setattr(error, REPORT_ATTRIBUTE, data)  # travels with the exception to the session that was typed
            except (AttributeError, TypeError):  # its class allows no attributes
                pass
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why the test cannot be collected."""
        if report.failed and self.error is None:
            self.error = RuntimeError(f"pytest cannot collect the test again:\n{report.longreprtext}")


def _sendable(raised: BaseException) -> Exception:
    """Return an exception that `launch()` can send: pytest's own for a skip, an xfail and a failure are none."""
    if isinstance(raised, Exception):
        return raised
    if isinstance(raised, (pytest.skip.Exception, pytest.xfail.Exception)):
        return RankOutcome("Skipped" if isinstance(raised, pytest.skip.Exception) else "XFailed", str(raised.msg))
    return Failed(str(raised))
