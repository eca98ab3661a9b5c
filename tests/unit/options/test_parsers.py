"""The grammars of single values: what each takes, and what it says otherwise."""

from __future__ import annotations

import string
from collections.abc import Callable
from signal import Signals
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.spec.job import Fault, JobSpec, StreamChoice, Streams, default
from ddplaunch.spec.options import parsers
from ddplaunch.spec.options.resolve import variables_of_file
from ddplaunch.spec.options.table import OPTIONS

RIGHT = [
    (parsers.nproc_per_node, "4", 4),
    (parsers.nproc_per_node, "auto", "auto"),
    (parsers.nproc_per_node, "xpu", "gpu"),
    (parsers.number(0, 65535), "65535", 65535),
    (parsers.duration, "90", 90.0),
    (parsers.duration, "1.5", 1.5),
    (parsers.duration, "0", 0.0),
    (parsers.duration, "90s", 90.0),
    (parsers.duration, "15m", 900.0),
    (parsers.duration, "1h30m", 5400.0),
    (parsers.duration, "2d1h1m1.25s", 176461.25),
    (parsers.duration, "500ms", 0.5),
    (parsers.duration, "1m2s3ms", 62.003),
    (parsers.duration_from_1s, "1s", 1.0),
    (parsers.duration_or_off, "off", 0.0),
    (parsers.duration_or_off, "2m", 120.0),
    (parsers.switch, "T", True),
    (parsers.switch, "no", False),
    (parsers.streams, "3", StreamChoice(default=Streams.BOTH)),
    (parsers.streams, "0:3,1:2", StreamChoice(by_local_rank={0: Streams.BOTH, 1: Streams.ERR})),
    (parsers.streams, "12:1", StreamChoice(by_local_rank={12: Streams.OUT})),
    (parsers.local_ranks, "0, 2", frozenset({0, 2})),
    (parsers.needles, "apple,orange", ("apple", "orange")),
    (parsers.needles, "a,,b", ("a,b",)),
    (parsers.devices, "2,0", ("2", "0")),
    (parsers.devices, "GPU-8932f937-d72c,MIG-1b9e", ("GPU-8932f937-d72c", "MIG-1b9e")),
    (parsers.devices, "cpu", ("cpu",)),
    (parsers.devices, "MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    (parsers.signals, "TERM,sigusr1,2", (Signals.SIGTERM, Signals.SIGUSR1, Signals.SIGINT)),
    (parsers.signals, "USR1,SIGUSR1", (Signals.SIGUSR1,)),
    (parsers.notices, "usr1,TERM", (Signals.SIGUSR1, Signals.SIGTERM)),
    (parsers.init_method, "env://", "env"),
    (parsers.init_method, "file:///shared/x", "file:/shared/x"),
    (parsers.init_method, "file:x", "file:x"),
    (parsers.switch, "True", True),
    (parsers.switch, "0", False),
    (parsers.positive_number, "1e-1", 0.1),
    (parsers.variable, "A=b=c", ("A", "b=c")),
    (parsers.variable, "A=", ("A", "")),
    (parsers.nnodes, "3", (3, 3)),
    (parsers.nnodes, "1:4", (1, 4)),
    (parsers.host, "[::1]", "::1"),
    (parsers.host, "gpu-01.cluster", "gpu-01.cluster"),
    (parsers.endpoint, "gpu01", "gpu01"),
    (parsers.endpoint, "gpu01:29500", "gpu01:29500"),
    (parsers.endpoint, "[fe80::1%eth0]:29500", "[fe80::1%eth0]:29500"),
    (parsers.endpoint, "fe80::1", "fe80::1"),
    (parsers.rendezvous_settings, " join_timeout=60, is_host = 1", {"join_timeout": "60", "is_host": "1"}),
    (parsers.rendezvous_settings, "'join_timeout=5,is_host=1'", {"join_timeout": "5", "is_host": "1"}),
    (parsers.rendezvous_settings, "store_type=file=x", {"store_type": "file=x"}),
    (parsers.rendezvous_settings, "is_host=True,join_timeout=90", {"is_host": "1", "join_timeout": "90"}),
    (parsers.rendezvous_settings, "is_host=n,last_call_timeout=0", {"is_host": "0", "last_call_timeout": "0"}),
    (parsers.faults, "kill:5@2s", (Fault(kind="kill", target=5, after=2.0),)),
    (
        parsers.faults,
        "node:1@3, slow:0@500ms,hang:12@1m",
        (
            Fault(kind="node", target=1, after=3.0),
            Fault(kind="slow", target=0, after=0.5),
            Fault(kind="hang", target=12, after=60.0),
        ),
    ),
]

NOT_A_SIGNAL = '"TREM" is not a signal'
WRONG = [
    (parsers.nproc_per_node, "four", 'expected a number from 1 to 65536, "gpu", "cpu" or "auto"'),
    (parsers.nproc_per_node, "-1", 'expected a number from 1 to 65536, "gpu", "cpu" or "auto"'),
    (parsers.nproc_per_node, "2.0", 'expected a number from 1 to 65536, "gpu", "cpu" or "auto"'),
    (parsers.nproc_per_node, "9" * 5000, 'expected a number from 1 to 65536, "gpu", "cpu" or "auto"'),
    (parsers.nproc_per_node, "0", 'expected a number from 1 to 65536, "gpu", "cpu" or "auto"'),
    (parsers.number(1), "0", "expected a number from 1"),
    (parsers.number(1), "1_0", "expected a number from 1"),
    (parsers.number(1), "+1", "expected a number from 1"),
    (parsers.number(1), "\N{ARABIC-INDIC DIGIT THREE}", "expected a number from 1"),
    (parsers.number(0, 65535), "65536", "expected a number from 0 to 65535"),
    (parsers.duration, "", "expected seconds, or a time such as 90s, 15m or 1h30m"),
    (parsers.duration, "-1", "expected seconds, or a time such as 90s, 15m or 1h30m"),
    (parsers.duration, "1m1h", "expected seconds, or a time such as 90s, 15m or 1h30m"),
    (parsers.duration, "1h30", "expected seconds, or a time such as 90s, 15m or 1h30m"),
    (parsers.duration, "inf", "expected seconds, or a time such as 90s, 15m or 1h30m"),
    (parsers.duration, "99999d", "expected less than 30 years"),
    (parsers.positive_duration, "0s", "expected a time above zero"),
    (parsers.duration, "5ms1s", "expected seconds, or a time such as 90s, 15m or 1h30m"),
    (parsers.duration_from_1s, "999ms", "expected at least 1s"),
    (parsers.duration_or_off, "0", "expected at least 1s"),
    (parsers.positive_number, "0", "expected a number above zero"),
    (parsers.positive_number, "nan", "expected a number above zero"),
    (parsers.streams, "0:3,0:1", "local rank 0 is listed twice"),
    (
        parsers.streams,
        "4",
        "expected 0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or one of these for some local ranks",
    ),
    (parsers.local_ranks, "0,x", "expected local ranks such as 0,1,2"),
    (parsers.local_ranks, "-1", "expected local ranks such as 0,1,2"),
    (parsers.needles, "apple,", "an empty text between the commas would match every line"),
    (parsers.devices, "", "expected device indices or UUIDs such as 0,2 or GPU-8932f937, or cpu"),
    (parsers.devices, "cuda:0", "expected device indices or UUIDs such as 0,2 or GPU-8932f937, or cpu"),
    (parsers.devices, "1,01", "device 1 is listed twice"),
    (parsers.signals, "TREM", NOT_A_SIGNAL),
    (parsers.signals, "KILL", "SIGKILL cannot be passed on"),
    (parsers.notices, "USR1,CONT", "SIGCONT cannot announce the end"),
    (parsers.notices, "TREM", NOT_A_SIGNAL),
    (parsers.init_method, "tcp://a:1", 'expected "env", "tcp" or file:PATH'),
    (parsers.init_method, "file:", 'expected "env", "tcp" or file:PATH'),
    (parsers.text("expected a name"), " ", "expected a name"),
    (parsers.name, "../x", "expected up to 128 letters, digits and any of _.+@-, not beginning with one of .+@-"),
    (parsers.path, "", "expected a path"),
    (parsers.switch, "maybe", "expected 1 or 0"),
    (parsers.one_of("a", "b", "c"), "d", 'expected "a", "b" or "c"'),
    (parsers.variable, "FOO", "expected NAME=VALUE; workers inherit the variables of this shell anyway"),
    (parsers.variable, "1A=x", "expected NAME=VALUE"),
    (parsers.nnodes, "0", "expected a number of nodes, or MIN:MAX"),
    (parsers.nnodes, "1:2:3", "expected a number of nodes, or MIN:MAX"),
    (parsers.nnodes, "2:", "expected a number of nodes, or MIN:MAX"),
    (parsers.nnodes, "3:2", "MIN exceeds MAX"),
    (parsers.host, "a:29500", "expected a host without a port"),
    (parsers.host, "a b", "expected a host name or an address"),
    (parsers.endpoint, "a:65536", "expected HOST or HOST:PORT"),
    (parsers.endpoint, ":29500", "expected HOST or HOST:PORT"),
    (parsers.rendezvous_settings, "join_timeout", "expected KEY=VALUE,KEY=VALUE"),
    (parsers.rendezvous_settings, "a=1,timeout=0", "timeout: expected a time above zero"),
    (
        parsers.rendezvous_settings,
        "join_timeout=long",
        "join_timeout: expected seconds, or a time such as 90s, 15m or 1h30m",
    ),
    (parsers.rendezvous_settings, "is_host=maybe", "is_host: expected 1 or 0"),
    (parsers.faults, "", '"" is not KIND:RANK@TIME'),
    (parsers.faults, "kill:5", '"kill:5" is not KIND:RANK@TIME'),
    (parsers.faults, "kill:-1@2s", '"kill:-1@2s" is not KIND:RANK@TIME'),
    (
        parsers.faults,
        "kill:\N{ARABIC-INDIC DIGIT THREE}@2s",
        '"kill:\N{ARABIC-INDIC DIGIT THREE}@2s" is not KIND:RANK@TIME',
    ),
    (parsers.faults, "kill:5@2s,", '"" is not KIND:RANK@TIME'),
    (parsers.faults, "burn:5@2s", '"burn:5@2s": expected "kill", "node", "hang" or "slow"'),
    (parsers.faults, "kill:5@soon", '"kill:5@soon": expected seconds, or a time such as 90s, 15m or 1h30m'),
]


@pytest.mark.parametrize(("parse", "text", "value"), RIGHT)
def test_right_values_are_read(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text", "expected"), WRONG)
def test_wrong_values_say_what_was_expected(parse: Callable[[str], Any], text: str, expected: str) -> None:
    with pytest.raises(parsers.BadValue) as caught:
        parse(text)
    assert str(caught.value) == expected


def test_the_example_of_each_option_is_read_and_its_default_is_what_a_job_has_without_it() -> None:
    for option in OPTIONS:
        if option.example:
            option.parse(option.example)
        value = default(option.target) if option.target in JobSpec.__struct_fields__ and not option.is_flag else None
        if option.name == "max_restarts":
            value = (value, None)  # its text gives two fields
        if option.default:
            assert option.parse(option.default) == value, option.name
        else:
            assert value in (None, (), {}), option.name


@given(st.sampled_from(OPTIONS), st.text(max_size=30))
def test_any_text_is_read_or_refused_in_our_words(option: Any, text: str) -> None:
    try:
        option.parse(text)
    except parsers.BadValue as error:
        assert str(error)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_number_of_nodes_in_a_message_may_be_typed(least: int, more: int) -> None:
    nodes = (least, least + more)
    assert parsers.nnodes(parsers.write_nnodes(nodes)) == nodes


ENV_FILE = """\
# a comment, and an empty line

PLAIN=some words   # a comment
export EXPORTED=1
  INDENTED = x
HASH=a#b
EMPTY=
SINGLE='$HOME # \\n'
DOUBLE="a \\"b\\" \\$c \\n d"  # a comment
"""


def test_env_files_are_read_as_a_shell_reads_them() -> None:
    with pytest.raises(parsers.BadValue, match=r"^train\.env:5: expected NAME=VALUE$"):
        variables_of_file(ENV_FILE, "train.env")
    assert variables_of_file(ENV_FILE.replace(" = ", "="), "train.env") == [
        ("PLAIN", "some words"),
        ("EXPORTED", "1"),
        ("INDENTED", "x"),
        ("HASH", "a#b"),
        ("EMPTY", ""),
        ("SINGLE", "$HOME # \\n"),
        ("DOUBLE", 'a "b" $c \n d'),
    ]


@pytest.mark.parametrize("line", ['A="x', "A='x' y", 'A="x\\"'])
def test_open_quotes_are_named_with_file_and_line(line: str) -> None:
    with pytest.raises(parsers.BadValue) as caught:
        variables_of_file(f"B=1\r\n{line}\r\n", "train.env")
    assert str(caught.value) == f"train.env:2: the quote {line[2]} is not closed, or something follows it"


@given(st.text(alphabet=string.printable, max_size=40))
def test_any_single_quoted_value_is_kept_as_it_is(text: str) -> None:
    kept = text.translate({ord(mark): None for mark in "'\n"})
    assert variables_of_file(f"A='{kept}'", "f") == [("A", kept)]
