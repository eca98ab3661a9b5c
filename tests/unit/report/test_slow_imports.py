"""What is said of imports that a --preload would spare the next run; the lines are a worker's, and may be anything."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.spec.error_file import advice_on_imports


def said(tmp_path: Path, text: bytes) -> str:
    (tmp_path / "imports").write_bytes(text)
    return advice_on_imports(str(tmp_path / "imports"), ("torch",))


def test_the_slowest_come_first_and_what_is_preloaded_is_not_named(tmp_path: Path) -> None:
    text = said(tmp_path, b"lightning 2.7\ntorch 3.0\ntransformers.trainer 4.1\n")
    assert text == (
        "each worker imported transformers.trainer (4.1 s), lightning (2.7 s) itself; "
        "`--preload torch,transformers.trainer,lightning` keeps that warm too"
    )
    assert advice_on_imports(str(tmp_path / "nothing"), ()) == ""


@given(st.binary(max_size=200) | st.text(max_size=50).map(lambda name: f"{name} 1.0\n".encode(errors="replace")))
def test_no_worker_makes_it_say_anything_else(tmp_path_factory, text: bytes) -> None:
    line = said(tmp_path_factory.mktemp("any"), text)
    assert len(line) < 2000
    assert line.isprintable()
