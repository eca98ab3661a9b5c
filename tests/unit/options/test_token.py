"""The secret of a job: where it may stand, which one counts, and that nobody sees it who should not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.spec.options import token
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import typed_spec as spec


def test_without_file_and_variable_there_is_none() -> None:
    assert token.find(spec(), {}) is None
    assert token.find(spec(), {"DDPLAUNCH_TOKEN": " "}) is None


def test_the_variable_is_the_secret_and_stands_in_no_job() -> None:
    env = {"DDPLAUNCH_TOKEN": "abc "}
    assert token.find(spec("", env), env) == "abc"
    assert spec("", env) == spec()


def test_the_file_is_the_secret_without_its_line_break(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    job = spec(f"--token-file {tmp_path}/token")
    assert token.find(job, {}) == "abc"
    assert "abc" not in repr(job)


def test_the_nearer_to_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of the file")
    (tmp_path / "ddplaunch.toml").write_text("token-file = 'token'\n")
    env = {"DDPLAUNCH_TOKEN": "of the variable"}
    assert token.find(spec("", {}, tmp_path), {}) == "of the file"
    assert token.find(spec("", {}, tmp_path), env) == "of the variable"
    assert token.find(spec(f"--token-file {tmp_path}/token"), env) == "of the file"


def test_two_variables_that_differ_are_refused_without_a_word_of_them(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one")
    env = {"DDPLAUNCH_TOKEN": "other", "DDPLAUNCH_TOKEN_FILE": str(tmp_path / "token")}
    with pytest.raises(LaunchError) as caught:
        token.find(spec("", env), env)
    assert caught.value.render() == (
        f"error: DDPLAUNCH_TOKEN_FILE={tmp_path}/token and DDPLAUNCH_TOKEN hold different secrets\n\n"
        "hint: unset one of them\n"
    )
    assert token.find(spec("", env), {**env, "DDPLAUNCH_TOKEN": "one"}) == "one"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or directory"),
        (b" \n", "the file is empty"),
        (b"\xff", "the file is not UTF-8 text"),
        (b"x" * 4097, "it is larger than 4 KiB"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(LaunchError) as caught:
        token.find(spec(f"--token-file {tmp_path}/token"), {})
    assert caught.value.message == f"--token-file {tmp_path}/token: {said}"


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_file_that_every_user_has_access_to_is_warned_of(tmp_path: Path, mode: int, warned: bool) -> None:
    file = tmp_path / "token"
    file.write_text("x" * 16)
    file.chmod(mode)
    said = f"--token-file {file}: every user of this host has access to the file: chmod 600 {file}"
    assert token.weaknesses(spec(f"--token-file {file}"), "x" * 16) == ([said] if warned else [])


def test_a_short_secret_is_warned_of_and_not_shown() -> None:
    assert token.weaknesses(spec(), "x" * 16) == []
    assert token.weaknesses(spec(), "abc") == [
        "the token has 3 characters, and may be guessed: `openssl rand -hex 32` makes a better one"
    ]


def test_workers_may_see_all_variables_but_the_secret() -> None:
    assert token.visible_to_workers({"DDPLAUNCH_TOKEN": "abc", "HOME": "/h"}) == {"HOME": "/h"}


@pytest.mark.parametrize("place", ["--env DDPLAUNCH_TOKEN=abc", "--env-file {folder}/a.env", "file"])
def test_the_secret_among_the_variables_for_workers_is_refused_and_not_shown(tmp_path: Path, place: str) -> None:
    (tmp_path / "a.env").write_text("DDPLAUNCH_TOKEN=abc\n")
    if place == "file":
        (tmp_path / "ddplaunch.toml").write_text("[env]\nDDPLAUNCH_TOKEN = 'abc'\n")
    words = "" if place == "file" else place.format(folder=tmp_path)
    with pytest.raises(LaunchError, match="DDPLAUNCH_TOKEN is a secret that workers do not get") as caught:
        spec(words, {}, tmp_path)
    assert "abc" not in caught.value.render()
