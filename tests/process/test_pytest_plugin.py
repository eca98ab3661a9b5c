"""The pytest plugin: real sessions of pytest, with tests that run on every rank."""

from importlib.metadata import entry_points

import pytest

from tests.process.calling import PACKAGE

pytest_plugins = ["pytester"]

INSTALLED = any(plugin.name == "ddplaunch" for plugin in entry_points(group="pytest11"))
PLUGIN = ("-p", "ddplaunch.tools.testing.plugin")


@pytest.fixture
def session(job, pytester, monkeypatch):
    """Run pytest on these words; prove that nothing of it is left."""
    for name in ("state", "tmp", "signs"):
        (job.home / name).mkdir()
    for name in ("XDG_STATE_HOME", "TMPDIR", "DDP_TEST_MARK", "DDP_TEST_DIR"):
        monkeypatch.setenv(name, job.env[name])
    for name in (
        "RANK",
        "WORLD_SIZE",
        "FORCE_COLOR",
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))

    def run(*words, plugins=False):
        """With the plugins that are installed, or with ours alone: others take longer to import than ours to run."""
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "" if plugins else "1")
        ours = () if plugins and INSTALLED else PLUGIN
        result = pytester.runpytest_subprocess(*ours, "-p", "no:cacheprovider", *words, timeout=300)
        # pytest's own folders stay for its next session
        for left in (job.home / "tmp").iterdir():
            assert left.name.startswith("pytest-of-"), left
        assert not job.left()
        return result

    return run


def test_a_test_runs_on_every_rank_and_fails_with_the_first_failing_rank(session, pytester):
    pytester.makeconftest(
        """
        import pytest
        @pytest.fixture(autouse=True)
        def once(tmp_path_factory, request):
            with open("setups", "a") as file:
                file.write(request.node.name + "\\n")
        """
    )
    pytester.makepyfile(
        test_it="""
        import os, time
        import pytest

        class Thing:
            def __init__(self, number): self.number = number

        RANK = int(os.environ.get("RANK", -1))

        @pytest.fixture
        def thing():
            return Thing(7)

        @pytest.fixture(params=[1, 2])
        def several(request):
            return request.param * 10

        @pytest.mark.ddplaunch(nproc=2)
        def test_passes(thing, several, tmp_path):
            assert (type(thing) is Thing, thing.number) == (True, 7)
            assert several in (10, 20)
            assert os.environ["WORLD_SIZE"] == "2"
            (tmp_path / str(RANK)).touch()
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            print("the same folder on rank", RANK)

        @pytest.mark.ddplaunch(nproc=2)
        @pytest.mark.parametrize("call", [lambda: "x"])
        def test_fails(call, thing):
            print("seen on rank", RANK)
            if RANK == 1:
                assert call() * 2 == "x" + str(thing.number)
            time.sleep(600)

        @pytest.mark.ddplaunch(nproc=1)
        class TestClass:
            def setup_method(self):
                self.made = [os.getpid()]

            def test_method(self):
                assert self.made != [os.getpid()]
                assert os.getpid() != os.getppid()

        def test_other():
            assert RANK == -1
        """
    )
    result = session("-v")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_fails*_",
            ">*assert call() * 2 == *",
            "E*AssertionError: assert 'xx' == 'x7'",
            "test_it.py:*: AssertionError",
            "*Captured stdout call*",
            "*[[]?[]] seen on rank ?",
            "*- ddplaunch -*",
            "rank 1 failed first",
            "*the other worker was stopped by SIGTERM*",
        ]
    )
    shown = result.stdout.str()
    assert "tools/functions/caller.py" not in shown and "_pytest" not in shown  # nothing of how we learned of it
    assert (pytester.path / "setups").read_text().count("test_passes[1]") == 1  # fixtures run once, not on every rank


def test_skips_expected_failures_and_pytest_fail_are_honoured(session, pytester):
    pytester.makepyfile(
        test_it="""
        import os, time
        import pytest
        pytestmark = pytest.mark.ddplaunch(nproc=1)

        @pytest.mark.ddplaunch(nproc=2)
        def test_skips_on_one_rank():
            if os.environ["RANK"] == "1":
                pytest.skip("not on this rank")
            time.sleep(600)

        @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
        def test_expected():
            1 / 0

        @pytest.mark.xfail(raises=KeyError, strict=True)
        def test_other_than_expected():
            1 / 0

        def test_xfails_itself():
            pytest.xfail("one day")

        def test_says_that_it_fails():
            pytest.fail("said so")

        @pytest.mark.skipif(True, reason="nowhere")
        def test_is_not_even_tried():
            os._exit(1)
        """
    )
    result = session("-rsxf")
    result.assert_outcomes(skipped=2, xfailed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "E *Failed: said so",
            "SKIPPED * test_it.py:*: not on this rank",
            "XFAIL test_it.py::test_xfails_itself - one day",
            "FAILED test_it.py::test_other_than_expected - ZeroDivisionError*",
        ]
    )


def test_a_test_that_hangs_shows_where_every_rank_is_and_a_death_how(session, pytester):
    pytester.makepyfile(
        test_it="""
        import os, time, threading
        import pytest
        def lies_here(): time.sleep(600)
        def lies_there(): time.sleep(600)

        @pytest.mark.ddplaunch(nproc=2, timeout=15)
        def test_hangs():
            lies_here() if os.environ["RANK"] == "0" else lies_there()

        @pytest.mark.ddplaunch(nproc=2)
        def test_dies():
            os.kill(os.getpid(), 11)
        """
    )
    result = session()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "JobTimeout: stopped: timeout of 15 s was reached*",
            "where rank 0 was:",
            "*in lies_here",
            "*in test_hangs",
            "where rank 1 was:",
            "*in lies_there",
            "WorkerFailed: rank ? failed: killed by SIGSEGV*",
        ]
    )
    assert "_pytest" not in result.stdout.str().partition("where rank 0")[2].partition("test_dies")[0]


def test_what_cannot_be_done_is_said(session, pytester):
    pytester.makepyfile(
        test_it="""
        import threading
        import pytest

        @pytest.fixture
        def lock():
            return threading.Lock()

        @pytest.mark.ddplaunch(nproc=2)
        def test_lock(lock): pass

        @pytest.mark.ddplaunch(nproc=2)
        def test_capsys(capsys): pass

        @pytest.mark.ddplaunch(2)
        def test_place(): pass

        @pytest.mark.ddplaunch(nprocs=2)
        def test_word(): pass

        @pytest.mark.ddplaunch(nproc=0)
        def test_none(): pass

        @pytest.mark.ddplaunch(nproc=2, nproc_per_node=3)
        def test_two_numbers(): pass
        """
    )
    result = session("--strict-markers")
    result.assert_outcomes(failed=6)
    result.stdout.fnmatch_lines(
        [
            "the fixture lock cannot be sent to the workers of @pytest.mark.ddplaunch: cannot pickle '_thread.lock' object",
            "the fixture capsys cannot be sent to the workers of @pytest.mark.ddplaunch: *",
            "@pytest.mark.ddplaunch takes keywords only: nproc=2?",
            "@pytest.mark.ddplaunch got an unexpected keyword argument 'nprocs'*",
            "nproc_per_node=0: expected a number from 1 to 65536*",
            "@pytest.mark.ddplaunch: nproc and nproc_per_node are the same: leave one out",
        ]
    )


def test_options_of_the_session_do_not_disturb_the_ranks(session, pytester):
    pytester.makepyprojecttoml(
        """
        [tool.pytest.ini_options]
        addopts = ["-n", "1", "--import-mode=importlib", "-p", "no:randomly"]
        filterwarnings = ["error"]
        python_files = ["check_*.py"]
        """
    )
    pytester.mkdir("below")
    (pytester.path / "below" / "check_it.py").write_text(
        "import os, pytest\n"
        "class Odd(Exception): pass\n"
        "@pytest.mark.ddplaunch(nproc=2)\n"
        "def test_it():\n    assert 'RANK' in os.environ\n"
        "    with pytest.raises(Odd):\n        raise Odd\n"
    )
    result = session(plugins=True)
    result.assert_outcomes(passed=1)


def test_a_session_that_does_not_use_it_imports_nothing_more(session, pytester):
    pytester.makepyfile(
        test_it="""
        import sys
        def test_it():
            ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("ddplaunch", "multiprocessing", "torch"))
            of_plugin = ["ddplaunch.tools", "ddplaunch.tools.testing", "ddplaunch.tools.testing.plugin"]
            assert ours == ["ddplaunch", *of_plugin], ours
        """
    )
    session().assert_outcomes(passed=1)
    assert "ddplaunch(nproc=2" in session("--markers", plugins=True).stdout.str()
