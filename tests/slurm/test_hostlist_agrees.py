"""Our reader of host lists against Slurm's own."""

import os
from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddplaunch.plan.cluster.hostlist import compress, expand
from tests.slurm.cluster import Cluster

NUMBER = st.integers(0, 1200)
WIDTH = st.integers(1, 4)


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """A part of what stands in brackets: 7, 008, 1-3, 099-101."""
    low, width = draw(NUMBER), draw(WIDTH)
    high = low + draw(st.integers(0, 3))
    return f"{low:0{width}}" if high == low else f"{low:0{width}}-{high:0{width}}"


BRACKETS = st.lists(ranges(), min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
WORD = st.from_regex(r"[a-z](?:[a-z0-9.-]{0,4}[a-z0-9])?", fullmatch=True)
# Slurm wants a name with brackets to end with one
BRACKETED = st.lists(st.tuples(WORD, BRACKETS), min_size=1, max_size=4).map(lambda pairs: "".join(map("".join, pairs)))
LISTS = st.lists(WORD | st.builds("{}{}".format, WORD, NUMBER) | BRACKETED, min_size=1, max_size=4).map(",".join)

NAME = st.builds(lambda word, number, width: f"{word}{number:0{width}}", WORD, NUMBER, WIDTH)
RUN = st.builds(
    lambda word, low, width, count: [f"{word}{number:0{width}}" for number in range(low, low + count)],
    st.sampled_from(["n", "gpu-a-", "x1y"]),
    st.sampled_from([0, 7, 98, 997]),
    WIDTH,
    st.integers(1, 5),
)
NAMES = st.lists(RUN | NAME.map(lambda name: [name]) | WORD.map(lambda name: [name]), min_size=1, max_size=6).map(
    lambda runs: [name for run in runs for name in run]
)

# one scontrol is asked about a great many lists, and the one that is wrong is shown: to look for a smaller lot takes minutes
MANY = settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


def asked(cluster: Cluster, question: str, texts: Sequence[str]) -> list[list[str]]:
    """The lines that `scontrol show QUESTION` prints for each text."""
    wide = {**os.environ, "COLUMNS": "100000"}  # it repeats what it is asked, and must not wrap it
    done = cluster.run(["scontrol"], input="".join(f"show {question} {text}\n" for text in texts), env=wide)
    assert done.stderr == ""
    answers: list[list[str]] = []
    for line in done.stdout.splitlines():
        if line.startswith("scontrol: show"):
            answers.append([])
        elif line != "scontrol: ":
            answers[-1].append(line)
    assert len(answers) == len(texts)
    return answers


@MANY
@given(texts=st.lists(LISTS, min_size=50, max_size=50))
def test_a_list_is_expanded_as_slurm_does(one_cluster: Cluster, texts: list[str]) -> None:
    for text, names in zip(texts, asked(one_cluster, "hostnames", texts), strict=True):
        assert list(expand(text, "X")) == names, text


@MANY
@given(many=st.lists(NAMES, min_size=50, max_size=50))
def test_slurm_reads_what_we_compress_and_we_what_slurm_does(one_cluster: Cluster, many: list[list[str]]) -> None:
    for names, read in zip(many, asked(one_cluster, "hostnames", list(map(compress, many))), strict=True):
        assert read == names
    for names, (text,) in zip(many, asked(one_cluster, "hostlist", list(map(",".join, many))), strict=True):
        assert list(expand(text, "X")) == names, text


def test_neighbours_are_compressed_to_the_same_text(one_cluster: Cluster) -> None:
    many = [
        [f"n{number:0{width}}" for number in range(low, low + 5)] for low in (0, 7, 98, 997) for width in range(1, 5)
    ]
    written = [text for (text,) in asked(one_cluster, "hostlist", list(map(",".join, many)))]
    assert written == list(map(compress, many))
    assert written == [text for (text,) in asked(one_cluster, "hostlistsorted", list(map(",".join, many)))]
