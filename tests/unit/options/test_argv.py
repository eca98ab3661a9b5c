"""A job written back to a command line: it reads the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.cli import main
from ddplaunch.errors import LaunchError
from ddplaunch.options.argv import from_argv, to_argv
from ddplaunch.options.option import Option
from ddplaunch.options.resolve import job_spec
from ddplaunch.options.table import OPTIONS
from ddplaunch.spec import JobSpec

_SAMPLES: dict[str, list[str]] = {
    "grace_period": ["0", "1.25", "1h30m"], "timeout": ["90", "0.001"], "nnodes": ["1", "2:4"], "tee": ["1", "0:3,7:0"],
    "duplicate_stdout_filters": ["a,,b,c", ""], "local_ranks_filter": ["3,1", ""], "init_method": ["tcp", "file:/x y"],
    "forward_signals": ["WINCH,URG"], "debug": ["0", "3"], "role": ["a b", "--x"],
    "hosts": ["a,b:4", "gpu[01-03]"], "simulate": ["divide", "share"], "chaos": ["kill:5@2s,slow:0@500ms"],
    "cluster": ["ssh", "local", "static"], "heartbeat_timeout": ["1", "2.5"], "rdzv_timeout": ["60", "10m"],
    "rdzv_conf": ["a=1,b=2", "join_timeout=60,is_host=t", "timeout=5,last_call_timeout=2"],
    "env": ["A=", "A=b=c", "B=two\nlines"], "nproc_per_node": ["gpu", "3"],
}  # fmt: skip
_WRITABLE = [
    option
    for option in OPTIONS
    if not option.no_effect and option.name not in ("env_file", "module", "no_python", "python", "quiet", "verbose")
]


@st.composite
def _command_lines(draw: st.DrawFn) -> list[str]:
    words = []
    chosen: list[Option] = draw(st.lists(st.sampled_from(_WRITABLE), unique_by=lambda option: option.name, max_size=8))
    for option in chosen:
        values = _SAMPLES.get(option.name) or list(option.choices) or [option.example]
        words.append(option.flag if option.is_flag else f"{option.flag}={draw(st.sampled_from(values))}")
    words += draw(st.sampled_from([[], ["-m"], ["--no-python"], ["--python=/x/y"], ["-q"], ["-v"]]))
    script = draw(st.sampled_from(["train.py", "plan", "--odd", "-"]))
    return [*words, "--", script, *draw(st.lists(st.text(min_size=0, max_size=5), max_size=3))]


@given(_command_lines())
def test_a_job_written_to_argv_reads_the_same(words: list[str]) -> None:
    try:
        job = main.resolve(main.parse("run", words), {}, None)
    except LaunchError:
        return  # an impossible combination
    again = main.resolve(main.parse("run", to_argv(job)), {}, None)
    for name in JobSpec.__struct_fields__:
        if name not in ("origins", "remarks"):
            assert getattr(again, name) == getattr(job, name), name
    assert job_spec(*from_argv(to_argv(job))) == again


def test_a_timeout_from_a_variable_does_not_contradict_the_flag_that_won_over_it() -> None:
    job = main.resolve(
        main.parse("run", ["--rdzv-timeout=5", "train.py"]),
        {"PET_RDZV_CONF": "join_timeout=60,last_call_timeout=7,is_host=0"},
        None,
    )
    again = main.resolve(main.parse("run", to_argv(job)), {}, None)
    assert (again.rdzv_timeout, again.last_call, again.rdzv_conf) == (5.0, 7.0, job.rdzv_conf)


def test_what_concerns_only_the_place_of_the_command_can_be_left_out() -> None:
    words = ["--nnodes=2", "--hosts=a,b", "--env=A=1", "--quiet", "--backend=gloo", "train.py", "x"]
    job = main.resolve(main.parse("run", words), {}, None)
    without = frozenset({"hosts", "env", "verbosity"})
    assert to_argv(job, without=without) == ["--backend=gloo", "--nnodes=2", "--", "train.py", "x"]


def test_defaults_are_not_written() -> None:
    assert to_argv(main.resolve(main.parse("run", ["train.py"]), {}, None)) == ["--", "train.py"]
