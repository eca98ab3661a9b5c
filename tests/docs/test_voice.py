"""The checker of prose finds the habits that make a page hard to read, and the pages, help and messages keep to its budget."""

import pytest

from docs.voice import BUDGET, habits, main, messages, paragraphs


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The job ends. The others stop.", []),
        ("The job ends; the others stop.", ["semicolon"]),
        ("It shows this: the ranks that wait.", ["colon"]),
        ("**Note:** ddplaunch stops them.", []),
        ("- hogwild.py: shared weights", []),
        ("- It shows this, and then all the others: the ranks.", ["colon"]),
        ("Type one of these:", []),
        ("Set it to a value: CODE.", []),
        ("Keep what is printed.", ["what"]),
        ("What is printed is kept.", ["what"]),
        ("It says what failed, and what to do.", []),
        ("What happens then?", []),
        ("All begin alike, but for rank 0, whoever asks.", ["word"] * 3),
        (f"{'word ' * 31}ends.", ["long"]),
        (f"{'word ' * 20}ends. {'Word ' * 20}ends.", []),
    ],
    ids=str,
)
def test_a_habit_is_found(text: str, found: list[str]) -> None:
    assert [finding.habit for finding in habits(text)] == found


def test_a_page_falls_into_paragraphs_items_and_cells_without_titles_and_code() -> None:
    page = "# What is it\n\nOne `a; b` line,\ngoes [on](x.md).\n- item\n\n| cell `a\\|b` | other |\n\n```sh\nnot; this\n```\nend"
    assert [(line, text) for line, text in paragraphs(page) if text] == [
        (3, "One CODE line, goes on."),
        (5, "- item"),
        (7, "cell CODE"),
        (7, "other"),
        (12, "end"),
    ]


def test_messages_are_the_texts_of_a_module_without_docstrings_and_names() -> None:
    module = (
        '"""The text of a docstring; no message."""\nerror(f"rank {rank} has no device; give it one")\nname = "a b"\n'
    )
    assert list(messages(module)) == [(2, "rank X has no device; give it one")]


def test_the_budget_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out


def test_more_than_the_budget_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(BUDGET["pages"], "long", 0)
    monkeypatch.setitem(BUDGET["pages"], "colon", 0)
    assert main([]) == 1
    assert "of 'long', 0 at most: a sentence has at most 30 words" in capsys.readouterr().out


def test_the_habits_of_one_file_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs/design"]) == 0
    assert all(line.startswith("docs/design") for line in capsys.readouterr().out.splitlines())
