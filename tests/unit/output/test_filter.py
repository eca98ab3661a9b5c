"""The lines that torchrun's --duplicate-stdout-filters and --duplicate-stderr-filters copy."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.output import sinks
from ddplaunch.launcher.output.sinks import LineFilter


def filtered(needles: list[str], data: bytes, size: int) -> bytes:
    lines = LineFilter(needles)
    out = b"".join(lines.feed(data[start : start + size]) for start in range(0, len(data), size))
    return out + lines.end()


@given(
    data=st.lists(st.sampled_from([b"a", b"b", b"\xff", b"\r", b"\n", b"\r\n"]), max_size=20).map(b"".join),
    needles=st.lists(st.sampled_from(["a", "ab", "bb", "\n", ""]), max_size=2),
    size=st.sampled_from([1, 2, 7, 4096]),
)
def test_the_lines_are_those_that_torchrun_copies(data: bytes, needles: list[str], size: int) -> None:
    """The expectation is the loop of torch/distributed/elastic/multiprocessing/tail_log.py."""
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape").read()
    lines = (
        text.splitlines(keepends=True) if not text or text.endswith("\n") else (text + "\n").splitlines(keepends=True)
    )
    expected = "".join(line for line in lines if any(needle in line for needle in needles))
    assert filtered(needles, data, size) == expected.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("needles", "expected"),
    [
        (["loss"], b"loss 1\nepoch 2 loss 2\n"),
        (["epoch 1", "loss 1"], b"epoch 1\nloss 1\n"),
        (["LOSS"], b""),
        ([], b""),
    ],
    ids=["one", "any of two", "case counts", "none"],
)
def test_a_line_passes_if_it_holds_a_needle(needles: list[str], expected: bytes) -> None:
    assert filtered(needles, b"epoch 1\nloss 1\nepoch 2 loss 2", 4096) == expected


def test_a_needle_that_a_piece_cut_is_found() -> None:
    lines = LineFilter(["loss"])
    assert lines.feed(b"a\nlo") == b""
    assert lines.feed(b"ss 1\nb") == b"loss 1\n"
    assert lines.end() == b""


def test_a_line_that_never_ends_is_cut_and_its_parts_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_LINE", 8)
    lines = LineFilter(["loss"])
    assert lines.feed(b"12345678") == b""
    assert lines.feed(b" loss") == b"12345678 loss\n"
    assert lines.feed(b" 12345678") == b""
    assert lines.feed(b"\nloss") == b""
    assert lines.feed(b"\n") == b"loss\n"
