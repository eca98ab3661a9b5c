import pytest

from ddplaunch.record.seen.stack import frames_of, is_library, location, relevant_frames, short, syntax_error_lines
from ddplaunch.spec.outcome import WorkerError
from tests.unit.builders import frame

LIBRARIES = [
    ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
    ("/home/ada/digits/.venv/lib64/python3.13t/site-packages/a.py", "a.py"),
    ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy/core.py"),
    ("/root/.pyenv/versions/3.11.7/lib/python3.11/json/decoder.py", "json/decoder.py"),
    ("/usr/lib/python311.zip/json/decoder.py", "json/decoder.py"),
    ("<frozen runpy>", "<frozen runpy>"),
    ("<string>", "<string>"),
]


@pytest.mark.parametrize(("file", "shown"), LIBRARIES)
def test_a_library_is_shown_from_its_package_on(file: str, shown: str) -> None:
    assert is_library(frame(file))
    assert short(file, "/home/ada/digits") == shown


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/ada/digits/train.py", "train.py"),
        ("/home/ada/digits/lib/data.py", "lib/data.py"),
        ("/home/ada/digits2/train.py", "/home/ada/digits2/train.py"),
        ("train.py", "train.py"),
    ],
)
def test_the_users_code_is_shown_relative_to_where_the_command_was_typed(file: str, shown: str) -> None:
    assert not is_library(frame(file))
    assert short(file, "/home/ada/digits") == shown


@pytest.mark.parametrize("cwd", ["", "/"])
def test_a_path_stays_absolute_where_all_lies_below(cwd: str) -> None:
    assert short("/srv/train.py", cwd) == "/srv/train.py"


def test_the_modules_own_level_has_no_name() -> None:
    assert location(frame("a.py", 3, "<module>"), "/") == "a.py:3"
    assert location(frame("a.py", 3, "main"), "/") == "a.py:3 in main"


def test_the_innermost_frame_of_the_user_tells_most() -> None:
    main, step = frame("train.py", 9), frame("train.py", 5)
    torch, json = frame(LIBRARIES[0][0]), frame(LIBRARIES[3][0])
    assert relevant_frames([main, torch, step]) == (step, None)
    assert relevant_frames([main, step, torch, json]) == (step, json)
    assert relevant_frames([torch, json]) == (None, json)
    assert relevant_frames([]) == (None, None)


def test_what_has_no_file_tells_nothing() -> None:
    step, frozen = frame("train.py", 5), frame("<frozen importlib._bootstrap>")
    assert relevant_frames([step, frozen]) == (step, None)
    assert relevant_frames([frozen]) == (None, None)


def test_where_pdb_was_quit_the_line_that_it_had_stopped_at_tells_most() -> None:
    step, torch = frame("train.py", 5), frame(LIBRARIES[0][0])
    pdb = [frame(f"/usr/lib/python3.12/{name}.py") for name in ("bdb", "pdb", "cmd")]
    assert relevant_frames([step, *pdb]) == (step, None)
    assert relevant_frames([step, torch, *pdb]) == (step, torch)
    own = frame("src/bdb.py")
    assert relevant_frames([step, own]) == (own, None)


def test_frames_are_read_from_a_traceback_of_which_only_the_text_is_known() -> None:
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "first.py", line 1, in <module>\n    int("a")\n'
        "ValueError: a\n\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/w/train.py", line 12, in main\n    train_step()\n'
        '  File "gone.py", line 7, in <listcomp>\n'
        '  File "/w/train.py", line 88, in train_step\n    loss = model(batch)\n           ^^^^^^^^^^^^\n'
        "RuntimeError: boom\n"
    )
    assert frames_of(WorkerError(type="RuntimeError", message="boom", traceback=traceback)) == (
        frame("/w/train.py", 12, "main", "train_step()"),
        frame("gone.py", 7, "<listcomp>"),
        frame("/w/train.py", 88, "train_step", "loss = model(batch)"),
    )


def test_recorded_frames_go_before_the_text() -> None:
    recorded = (frame("a.py"),)
    error = WorkerError(type="E", message="", traceback='  File "b.py", line 1, in f\n', frames=recorded)
    assert frames_of(error) == recorded


def test_a_syntax_error_shows_where_it_points_to() -> None:
    alone = '  File "/w/bad.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    imported = f'Traceback (most recent call last):\n  File "/w/b.py", line 1, in <module>\n    import bad\n{alone}'
    for text in (alone, imported):
        assert syntax_error_lines(text) == ["/w/bad.py:1", "  def f(:", "        ^"]
    assert syntax_error_lines("SyntaxError: raised by hand\n") == []
