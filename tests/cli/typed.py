"""A command line that is typed, in this process: for tests in which no real process is the point."""

from __future__ import annotations

from click.testing import CliRunner, Result

from ddplaunch.cli.main import application


def typed(*words: str, **env: str | None) -> Result:
    """Run `ddplaunch WORDS` in 80 columns, with these variables besides the environment, without those that are None."""
    return CliRunner().invoke(application, words, env={"FORCE_COLOR": None, "COLUMNS": "80", **env})


def said(*words: str, **env: str | None) -> tuple[int, str]:
    """Return the exit status and what is said on stderr, where nothing is shown."""
    result = typed(*words, **env)
    assert result.stdout == ""
    return result.exit_code, result.stderr


def shown(*words: str, **env: str | None) -> str:
    """Return what is shown, where nothing is wrong."""
    result = typed(*words, **env)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout
