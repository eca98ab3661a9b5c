import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.cluster.hostlist import (
    Host,
    compress,
    counts,
    exclude,
    expand,
    include,
    parse_hostfile,
    parse_hosts,
)
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import refusal

LISTS = [
    ("login", "login"),
    ("node[1-3]", "node1 node2 node3"),
    ("node[1,3,10-11]", "node1 node3 node10 node11"),
    ("node[1,3,10-11],gpu-a-[01-02],x1y[2-3]", "node1 node3 node10 node11 gpu-a-01 gpu-a-02 x1y2 x1y3"),
    ("rack[1-2]n[01-03,7]", "rack1n01 rack1n02 rack1n03 rack1n7 rack2n01 rack2n02 rack2n03 rack2n7"),
    ("a[1-2]b[3-4]c[5-6]", "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6"),
    ("node[1-2,007-010],gpu[1-2]-ib[0-1],login",
     "node1 node2 node007 node008 node009 node010 gpu1-ib0 gpu1-ib1 gpu2-ib0 gpu2-ib1 login"),
    ("n[9-11]", "n9 n10 n11"),
    ("n[09-11]", "n09 n10 n11"),
    ("b,a,b", "b a b"),
    (" a , n[1, 3] ", "a n1 n3"),
    ("n[1-2].example.org", "n1.example.org n2.example.org"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "names"), LISTS, ids=[text for text, _ in LISTS])
def test_a_slurm_list_is_expanded_in_its_order(text: str, names: str) -> None:
    assert " ".join(expand(text, "X")) == names


BAD_LISTS = [
    ("", "there is no host"),
    (" ", "there is no host"),
    ("a,,b", "a name is missing beside a comma"),
    ("n[1-", "the brackets do not match"),
    ("n[1]]", "the brackets do not match"),
    ("n[[1]]", "the brackets do not match"),
    ("n[]", '"" is not a number or a range such as 01-16'),
    ("n[a-b]", '"a-b" is not a number or a range such as 01-16'),
    ("n[1-2-3]", '"1-2-3" is not a number or a range such as 01-16'),
    ("n[3-1]", "the range 3-1 runs backwards"),
    ("n[0-999999999]", "these are more than 65536 hosts"),
    ("a[0-999]b[0-999]", "these are more than 65536 hosts"),
    ("n[1-1000000000]", '"1-1000000000" is not a number or a range such as 01-16'),
    ("(null)", '"(null)" is not the name of a host'),
    ("-oProxyCommand=x", '"-oProxyCommand=x" is not the name of a host'),
    ("[1-2]", None),
    ("a b", '"a b" is not the name of a host'),
    ("n[\u0661-\u0663]", '"\u0661-\u0663" is not a number or a range such as 01-16'),
]


@pytest.mark.parametrize(("text", "what"), BAD_LISTS, ids=[text for text, _ in BAD_LISTS])
def test_what_is_no_list_is_refused_with_its_origin(text: str, what: str | None) -> None:
    if what is None:
        assert expand(text, "X") == ("1", "2")
        return
    with pytest.raises(LaunchError) as raised:
        expand(text, "SLURM_JOB_NODELIST")
    assert raised.value.message == f'"{text}" in SLURM_JOB_NODELIST: {what}'


def test_many_lists_together_are_not_more_hosts_than_one_may_have() -> None:
    with pytest.raises(LaunchError, match="these are more than 65536 hosts"):
        expand(",".join(["n[0-65535]"] * 1_000), "X")
    with pytest.raises(LaunchError, match="these are more than 65536 hosts"):
        parse_hosts(",".join(["n[0-65535]"] * 1_000), "X")
    with pytest.raises(LaunchError, match="these are more than 65536 hosts"):
        parse_hostfile("n[0-65535]\n" * 1_000, "X")


NAMES = st.lists(
    st.from_regex(r"[a-z][a-z.-]{0,3}[0-9]{0,4}", fullmatch=True) | st.integers(0, 20).map("node{:02}".format)
)


@given(NAMES.filter(bool))
def test_names_are_compressed_to_what_expands_to_them(names: list[str]) -> None:
    assert list(expand(compress(names), "X")) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n08", "n09", "n10", "x"], "n[08-10],x"),
        (["n9", "n10"], "n[9-10]"),
        (["n1", "n3"], "n1,n3"),
        (["n2", "n1"], "n2,n1"),
        (["a", "b"], "a,b"),
        ([], ""),
    ],
)
def test_neighbours_are_written_together(names: list[str], text: str) -> None:
    assert compress(names) == text


@pytest.mark.parametrize(
    ("text", "numbers"), [("1", (1,)), ("1(x3)", (1, 1, 1)), ("5,1(x2)", (5, 1, 1)), ("8,2,1(x6)", (8, 2) + (1,) * 6)]
)
def test_counts_are_expanded(text: str, numbers: tuple[int, ...]) -> None:
    assert counts(text, "SLURM_TASKS_PER_NODE") == numbers


@pytest.mark.parametrize("text", ["", "x", "1(x)", "1(3)", "1(x99999999999)", "1(x65536),1", "-1", "1,,2"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(LaunchError) as raised:
        counts(text, "SLURM_TASKS_PER_NODE")
    expected = f'"{text}" in SLURM_TASKS_PER_NODE: this is not a list of numbers such as 5,1(x2)'
    assert raised.value.message == expected


HOSTS = [
    ("a", [Host(name="a")]),
    ("a,b:4,c", [Host(name="a"), Host(name="b", slots=4), Host(name="c")]),
    ("node[1-2]:4", [Host(name="node1", slots=4), Host(name="node2", slots=4)]),
    ("user@a:2", [Host(name="user@a", slots=2)]),
    ("10.0.0.2:4", [Host(name="10.0.0.2", slots=4)]),
    ("[fe80::1]:4", [Host(name="fe80::1", slots=4)]),
    ("[fe80::1%eth0]", [Host(name="fe80::1%eth0")]),
    ("u@[::1]:2", [Host(name="u@::1", slots=2)]),
    ("fe80::1", [Host(name="fe80::1")]),
    ("a,a,b", [Host(name="a", slots=2), Host(name="b", slots=1)]),
    ("a,a,b:4", [Host(name="a", slots=2), Host(name="b", slots=4)]),
]


@pytest.mark.parametrize(("text", "hosts"), HOSTS, ids=[text for text, _ in HOSTS])
def test_hosts_may_say_how_many_workers_they_take(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text, "--hosts") == tuple(hosts)


def test_the_address_of_a_host_has_no_user() -> None:
    assert [host.address for host in parse_hosts("a,u@b,u@[::1]", "--hosts")] == ["a", "b", "::1"]


BAD_HOSTS = [
    ("a:0", '"a:0" in --hosts: "0" is not a number of slots from 1 to 65536'),
    ("a:", '"a:" in --hosts: "" is not a number of slots from 1 to 65536'),
    ("a:x", '"a:x" in --hosts: "x" is not a number of slots from 1 to 65536'),
    ("a:4,a:2", '"a:2" in --hosts: a is named twice'),
    ("a,b,a:2", '"a:2" in --hosts: a is named twice'),
    ("a:4,a", '"a" in --hosts: a is named twice'),
    ("[1:2]", '"[1:2]" in --hosts: "1:2" is not the name of a host'),
    ("-l root", '"-l root" in --hosts: "-l root" is not the name of a host'),
    ("u@-x", '"u@-x" in --hosts: "u@-x" is not the name of a host'),
    ("a\x1b[1m", "'a\\x1b[1m' in --hosts: the brackets do not match"),
    ("x" * 100 + ",", f'"{"x" * 57}..." in --hosts: a name is missing beside a comma'),
]


@pytest.mark.parametrize(("text", "message"), BAD_HOSTS, ids=[text[:20] for text, _ in BAD_HOSTS])
def test_what_names_no_hosts_is_refused(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        parse_hosts(text, "--hosts")
    assert raised.value.message == message


FILES = [
    ("deepspeed", "worker-1 slots=4\nworker-2 slots=2\n", [Host(name="worker-1", slots=4), Host(name="worker-2", slots=2)]),
    ("open mpi", "u@a slots=2 max_slots=4\nb slots = 3 max-slots=3\n",
     [Host(name="u@a", slots=2), Host(name="b", slots=3)]),
    ("mpich", "a:2\nb # two\n", [Host(name="a", slots=2), Host(name="b")]),
    ("machine file", "a\na\nb\na\n", [Host(name="a", slots=3), Host(name="b", slots=1)]),
    ("slurm", "node[1-2] slots=4\nx,y:2\n",
     [Host(name="node1", slots=4), Host(name="node2", slots=4), Host(name="x"), Host(name="y", slots=2)]),
    ("devices", "a gpus=0,02,GPU-8932f937\nb:1 gpus=3\n",
     [Host(name="a", devices=("0", "2", "GPU-8932f937")), Host(name="b", slots=1, devices=("3",))]),
    ("comments", "# all\n\n  a\t# first\r\n#b\n", [Host(name="a")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "hosts"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_host_files_of_all_kinds_are_read(text: str, hosts: list[Host]) -> None:
    assert parse_hostfile(text, "hosts.txt") == tuple(hosts)


BAD_FILES = [
    ("", "hosts.txt: the file names no host"),
    ("# nothing\n", "hosts.txt: the file names no host"),
    ("a\nb slots=x\n", '"b slots=x" in hosts.txt:2: "x" is not a number of slots from 1 to 65536'),
    ("a port=22", '"a port=22" in hosts.txt:1: "port=22" is not known'),
    ("a 4", '"a 4" in hosts.txt:1: "4" is not known'),
    ("a:4 slots=4", '"a:4 slots=4" in hosts.txt:1: the number of slots is given twice'),
    ("a slots=4\na slots=4", '"a slots=4" in hosts.txt:2: a is named twice'),
    ("a gpus=0,0", '"a gpus=0,0" in hosts.txt:1: device 0 is listed twice'),
    ("a gpus=x", '"a gpus=x" in hosts.txt:1: "x" is not a device'),
    ("a gpus=", '"a gpus=" in hosts.txt:1: "" is not a device'),
    ("n[2-1]", '"n[2-1]" in hosts.txt:1: the range 2-1 runs backwards'),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=[text for text, _ in BAD_FILES])
def test_a_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        parse_hostfile(text, "hosts.txt")
    assert raised.value.message == message


A, B, C = Host(name="a", slots=4), Host(name="u@b"), Host(name="c", devices=("0", "2"))

INCLUDED = [
    ("a", [A]),
    ("b,a", [A, B]),
    ("a@c", [A, C]),
    ("a:0,2@b", [Host(name="a", slots=2, devices=("0", "2")), B]),
    ("a,b:1", [Host(name="a", slots=1, devices=("1",)), Host(name="u@b", devices=("1",))]),
    ("c:2", [Host(name="c", devices=("2",))]),
    ("a:GPU-8932", [Host(name="a", slots=1, devices=("GPU-8932",))]),
]


@pytest.mark.parametrize(("text", "hosts"), INCLUDED, ids=[text for text, _ in INCLUDED])
def test_included_hosts_keep_their_order(text: str, hosts: list[Host]) -> None:
    assert include([A, B, C], text, "--include") == tuple(hosts)


EXCLUDED = [
    ("a", [B, C]),
    ("a@b", [C]),
    ("a:0,1", [Host(name="a", slots=2, devices=("2", "3")), B, C]),
    ("c:0", [A, B, Host(name="c", devices=("2",))]),
    ("c:0,2", [A, B]),
]


@pytest.mark.parametrize(("text", "hosts"), EXCLUDED, ids=[text for text, _ in EXCLUDED])
def test_excluded_hosts_and_devices_are_left_out(text: str, hosts: list[Host]) -> None:
    assert exclude([A, B, C], text, "--exclude") == tuple(hosts)


BAD_CHOICES = [
    (include, "d", '"d" in --x: there is no such host', "the hosts are a, b, c"),
    (include, "a@a", '"a@a" in --x: a is listed twice', "name it once, as a:0,1"),
    (include, "a:4", '"a:4" in --x: a has no device 4', "it has 0, 1, 2, 3"),
    (include, "c:1", '"c:1" in --x: c has no device 1', "it has 0, 2"),
    (include, "c:GPU-1", '"c:GPU-1" in --x: c has no device GPU-1', "it has 0, 2"),
    (include, "a:0,b", '"a:0,b" in --x: "b" is not a device', "type indices or UUIDs such as 0,2"),
    (exclude, "b:0", '"b:0" in --x: how many devices b has is not known', "list it with their number: b:4"),
    (exclude, "a,b,c", '"a,b,c" in --x: no host is left', None),
    (exclude, "@", '"" in --x: there is no host', "type names such as gpu01,gpu02"),
]


@pytest.mark.parametrize(("choose", "text", "message", "hint"), BAD_CHOICES, ids=[row[1] for row in BAD_CHOICES])
def test_a_choice_of_what_is_not_there_is_refused(choose, text: str, message: str, hint: str | None) -> None:
    assert refusal(lambda: choose([A, B, C], text, "--x")) == (message, hint)


def test_of_many_hosts_some_are_named() -> None:
    with pytest.raises(LaunchError) as raised:
        include(parse_hosts("n[1-20]", "X"), "m", "--include")
    assert raised.value.hint == "the hosts are n1, n2, n3, n4, n5, n6, n7, n8 and 12 more"


ANY = st.text(max_size=40) | st.text(alphabet="an01,-[]:@%# =\n\tslotgpu", max_size=40)


@given(ANY)
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (expand, parse_hosts, parse_hostfile, counts):
        try:
            read(text, "X")
        except LaunchError as error:
            assert error.message.isprintable()


@given(ANY)
def test_any_choice_is_made_or_refused(text: str) -> None:
    for choose in (include, exclude):
        try:
            assert {host.name for host in choose([A, B, C], text, "X")} <= {"a", "u@b", "c"}
        except LaunchError as error:
            assert error.message.isprintable()


HOSTILE = {
    "a word far away": lambda size: f"a{' ' * size}b",
    "an = far away": lambda size: f"a slots{' ' * size}=1",
    "many devices": lambda size: f"a gpus={','.join(map(str, range(size // 6)))}",
    "many colons": lambda size: f"[{':' * size}]x",
    "many brackets": lambda size: f"a{'[1]' * (size // 3)}",
    "many lines": lambda size: "host01\n" * (size // 7),
    "many users": lambda size: "a@" * (size // 2),
}


def work(size: int, text: Callable[[int], str]) -> float:
    """The processor time that reading takes, of the best of some times."""
    took = []
    for _ in range(3):
        began = time.process_time()
        with suppress(LaunchError):
            parse_hostfile(text(size), "hosts.txt")
        took.append(time.process_time() - began)
    return min(took)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_file_takes_as_much_longer_as_it_is_larger(text: Callable[[int], str]) -> None:
    assert work(64_000, text) < 3 * 16 * work(4_000, text)  # 256 times as long if each character looked at all others


def test_devices_are_taken_out_of_many_in_one_pass() -> None:
    assert work_of(64_000) < 3 * 16 * work_of(4_000)


def work_of(size: int) -> float:
    hosts = (Host(name="a", slots=size), Host(name="b"))
    began = time.process_time()
    exclude(hosts, f"a:{','.join(map(str, range(size // 2)))}", "--exclude")
    return time.process_time() - began


def test_a_name_of_endless_length_is_refused_before_there_are_many_of_it() -> None:
    with pytest.raises(LaunchError, match="a name has at most 512 characters"):
        expand(f"{'a' * 5_000}[1-65536]", "X")
