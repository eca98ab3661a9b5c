"""What the command says about itself: the help, the version, the completions of shells."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ddplaunch import __version__
from ddplaunch.cli import main
from ddplaunch.cli.job import parse
from ddplaunch.spec.options.table import GROUPS, OPTIONS
from ddplaunch.system.exitcodes import MEANINGS
from tests.cli.typed import said, shown
from tests.conftest import Job


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))


def test_help_all_has_every_option_group_and_status() -> None:
    text = shown("--help-all")
    assert {option.flag for option in OPTIONS} <= flags_in(text)
    for heading in GROUPS:
        assert f"\n{heading}:\n" in text
    for status in MEANINGS:
        assert re.search(rf"^  {re.escape(status)} ", text, re.MULTILINE), status


def test_help_fits_two_screens_and_names_the_rest() -> None:
    """And what helps somebody whose job fails, hangs or starts slowly."""
    text = shown("--help")
    assert len(flags_in(text) & {option.flag for option in OPTIONS}) == 17
    assert len(text.splitlines()) <= 48
    assert {"--debug-on-error", "--keep-warm"} < flags_in(text)
    assert {"check", "doctor", "attach", "report"} <= set(re.findall(r"\w+", text[text.index("Verbs:") :]))
    assert "--help-all" in text


@pytest.mark.parametrize(
    "words",
    ["", "--help", "--help-all", "plan --help", "submit --help", "completion --help", "ps --help", "logs --help"],
)
@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("200", 100), ("60", 60)])
def test_help_keeps_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, columns: str, width: int
) -> None:
    """Without click's runner, which always has 80 columns."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    main.main(words.split())
    text = "".join(capsys.readouterr())
    assert text.isascii()
    assert "\x1b" not in text
    # commands stay whole
    assert [line for line in text.splitlines() if len(line) > width and "ddplaunch" not in line] == []


def test_help_shows_the_underscore_spelling_nowhere() -> None:
    assert not re.search(r"--\w+_", shown("--help-all"))


def test_help_is_coloured_where_colours_are_wanted() -> None:
    plain = shown("--help-all")
    coloured = shown("--help-all", FORCE_COLOR="1")
    assert "\x1b[1mSupervision:\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain


@pytest.mark.parametrize(
    "words",
    [
        "-h",
        "help",
        "-h --nproc-per-node",
        "--nproc-per-node -h",
        "--bogus -h",
        "run --help",
        "help run",
        "--tee 3 --help",
        "--help train.py",
    ],
)
def test_help_is_the_same_wherever_it_is_asked_for(words: str) -> None:
    assert shown(*words.split()) == shown("--help")


def test_without_a_word_it_says_what_it_is_and_four_commands() -> None:
    status, err = said()
    assert status == 2
    assert err.startswith("ddplaunch starts PyTorch training on ")
    assert err.count("\n  ddplaunch ") == 4


@pytest.mark.parametrize("verb", ["plan", "submit", "shim", "completion"])
def test_verbs_have_a_help_of_their_own(verb: str) -> None:
    assert shown(verb, "--help").startswith(f"Usage: ddplaunch {verb} ")
    assert shown("help", verb) == shown(verb, "--help")


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version(word: str) -> None:
    assert shown(word) == f"ddplaunch {__version__}\n"


def test_help_after_the_script_is_the_scripts() -> None:
    assert parse(["train.py", "--help"]).program == ("train.py", "--help")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str) -> None:
    assert f"_DDPLAUNCH_COMPLETE={shell}_complete" in shown("completion", shell)


def test_completion_takes_the_callers_shell() -> None:
    assert shown("completion", SHELL="/usr/bin/zsh").startswith("#compdef ddplaunch")


COMPLETIONS = [
    (
        "",
        {
            "plain,run",
            "plain,plan",
            "plain,top",
            "plain,report",
            "plain,check",
            "plain,doctor",
            "plain,shim",
            "plain,submit",
            "plain,completion",
            "plain,ps",
            "plain,logs",
            "plain,attach",
            "plain,profile",
            "plain,stacks",
            "plain,stop",
            "plain,warm",
            "file,",
        },
    ),
    ("pl", {"plain,plan", "file,pl"}),
    ("--nn", {"plain,--nnodes"}),
    ("--cluster s", {"plain,static", "plain,slurm", "plain,ssh"}),
    ("plan --js", {"plain,--json"}),
    ("--backend n", {"plain,nccl"}),
    ("--tee 3 --cpu-bind ", {"plain,none", "plain,cores", "plain,numa"}),
    ("--log-dir ", {"dir,"}),
    ("--debug tr", {"file,tr"}),
    ("--simulate s", {"plain,share", "file,s"}),
    ("--token-file t", {"file,t"}),
    ("train.py --nn", {"file,--nn"}),
    ("completion b", {"plain,bash"}),
    ("ps --", {"plain,--all", "plain,--json", "plain,--help", "plain,--help-all", "plain,--version"}),
    ("stop no-such-run", {"dir,no-such-run"}),
    ("logs --f", {"plain,--follow"}),
    ("submit ", {"plain,--"}),
    ("submit --part", {"plain,--partition"}),
    ("submit --nodes 2 --pa", {"plain,--parsable", "plain,--partition"}),
    ("submit --nodes 2 --fo", {"plain,--follow"}),
    ("submit --nodes 2 -- --nn", {"plain,--nnodes"}),
    ("submit -- --output r", {"plain,raw", "plain,rank0"}),
    ("submit -- tr", {"file,tr"}),
]


@pytest.mark.parametrize(("words", "found"), COMPLETIONS)
def test_completions(words: str, found: set[str]) -> None:
    """As bash asks for them: its words, and the index of the one where the cursor is."""
    line = f"ddplaunch {words}"
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    assert set(shown(_DDPLAUNCH_COMPLETE="bash_complete", **asked).split()) == found


def test_help_and_version_import_nothing_heavy(job: Job) -> None:
    code = (
        "import sys; from ddplaunch.cli import main as cli; cli.main(['--help'])\n"
        "heavy = {'subprocess', 'tempfile', 'asyncio', 'logging', 'pathlib', 'tomllib', 'difflib', 'rich',\n"
        "         'psutil', 'pynvml', 'torch', 'ddplaunch.launcher.start'}\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], env=job.env, capture_output=True, text=True, check=True)
    assert found.stderr == "\n"
