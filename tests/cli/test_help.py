"""What the command says about itself: the help, the version, the completions of shells."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import click
import pytest
from click.exceptions import Exit

from ddplaunch import __version__
from ddplaunch.cli import main
from ddplaunch.cli.command import MOMENTS, TOPICS, VERBS, Page
from ddplaunch.cli.help import _write
from ddplaunch.cli.job import parse
from ddplaunch.cli.main import application
from ddplaunch.spec.options.table import GROUPS, OPTIONS, TORCHRUN
from ddplaunch.system.exitcodes import MEANINGS
from tests.cli.typed import said, shown, typed
from tests.conftest import Job


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))


def test_help_all_has_every_option_group_and_status() -> None:
    text = shown("--help-all")
    assert {option.flag for option in OPTIONS if option.group != TORCHRUN} <= flags_in(text)
    assert {option.flag for option in OPTIONS} <= set(re.findall(r"--[\w-]+\w", text))
    for heading in GROUPS:
        assert f"\n{heading}:\n" in text
    for status in MEANINGS:
        assert re.search(rf"^  {re.escape(status)} ", text, re.MULTILINE), status


def test_help_fits_one_large_screen_and_names_the_rest() -> None:
    """And what helps somebody whose job fails or hangs, or who wants to look into a run."""
    text = shown("--help")
    assert len(flags_in(text) & {option.flag for option in OPTIONS}) == 18
    assert len(text.splitlines()) <= 62
    assert {"--debug-on-error", "--live", "--hang-timeout"} < flags_in(text)
    assert "--help-all" in text
    assert set(TOPICS) <= set(re.findall(r"[\w-]+", text[text.index("More:") :]))


def test_each_verb_stands_below_the_moment_at_which_people_need_it() -> None:
    """The verb that starts a job needs no mention, and the help stands below all."""
    assert {verb for verbs in MOMENTS.values() for verb in verbs} == VERBS.keys() - {"run", "help"}
    text = shown("--help")
    places = [text.index(f"\n{moment}:\n") for moment in MOMENTS]
    assert places == sorted(places)
    for verb in VERBS.keys() - {"run", "help"}:
        assert f"\n  {verb} " in text, verb


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_shows_two_examples_which_the_parser_takes(verb: str) -> None:
    text = shown("help", verb)
    examples = re.findall(
        r"^  (?:eval \"\$\()?(ddplaunch .*?)(?:  .*|\)\".*)?$", text[text.index("\nExamples:\n") :], re.MULTILINE
    )
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(re.split(r" [|>] ", example)[0])[1:]
        command = application.get_command(click.Context(application), verb)
        assert command is not None
        with suppress(Exit):  # of `help`
            command.make_context(verb, words[1:] if words[0] in VERBS else words)


def test_every_verb_that_takes_a_run_says_the_same_about_it() -> None:
    texts = {
        verb: re.sub(
            r"\s+",
            " ",
            re.findall(r"^Arguments:\n  RUN  (.*?)\n\n", shown(verb, "--help"), re.MULTILINE | re.DOTALL)[0],
        )
        for verb, (module, _) in VERBS.items()
        if module == "running" and verb != "warm"
    }
    same = "A run by its name, as `ddplaunch ps` shows it, a part of its long name, its script, or its folder. "
    assert {text.startswith(same) for text in texts.values()} == {True}
    assert len(set(texts.values())) == 4  # the run that is meant without a name


@pytest.mark.parametrize("verb", [verb for verb, (module, _) in VERBS.items() if module == "running"])
def test_r_means_ranks_in_each_verb_that_looks_into_runs(verb: str) -> None:
    named = re.findall(r"^  -r, (--\w+)", shown(verb, "--help"), re.MULTILINE)
    assert named in ([], ["--ranks"], ["--rank"])


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_a_topic_is_a_short_page_for_this_terminal(topic: str, columns: str) -> None:
    text = shown("help", topic, COLUMNS=columns)
    assert text.isascii()
    assert "](" not in text
    assert "**" not in text
    assert "<!--" not in text
    if topic in ("exit-codes", "signals"):  # others show screens, which stay whole
        assert max(map(len, text.splitlines())) <= max(int(columns), 50)


def test_a_topic_is_laid_out_from_what_pages_are_written_in() -> None:
    page = Page(width=40)
    _write(page, MARKDOWN.splitlines())
    assert click.unstyle(page.getvalue()) == LAID_OUT


MARKDOWN = """\
Some **words**
and `code-that-has-hyphens`.

## A title

> **Note.** A quotation.

- an item
  on two lines
- another

1. the first step of two is longer
2. the second

| name | value | to do |
| --- | --- | --- |
| `a\\|b` | one | |
| `c` | two | three |

```sh
# no title
| no table |

- no item
```
"""
LAID_OUT = """\
Some words and `code-that-has-hyphens`.

A title

Note. A quotation.

- an item on two lines
- another

1. the first step of two is longer
2. the second

  name  value -> to do
  a|b   one
  c     two -> three

  # no title
  | no table |

  - no item
"""


def test_the_topic_of_exit_codes_has_each_with_a_remedy() -> None:
    text = shown("help", "exit-codes")
    for status in MEANINGS:
        assert re.search(rf"^  {re.escape(status)} ", text, re.MULTILINE), status
    assert text.count(" -> ") == len(MEANINGS)  # that of the head among them, and none for 0


def test_the_topic_of_torchrun_explains_each_option_that_help_all_only_names() -> None:
    assert {option.flag for option in OPTIONS if option.group == TORCHRUN} <= flags_in(shown("help", "torchrun"))


def test_help_alone_lists_all_verbs_and_topics() -> None:
    text = shown("help")
    assert text == shown("help", "help") == shown("help", "--help")
    assert VERBS.keys() | TOPICS.keys() - {"run", "help"} <= set(re.findall(r"^  (\S+)  ", text, re.MULTILINE)) | {
        "run",
        "help",
    }


def test_help_is_written_for_a_reader_who_goes_away(job: Job) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        job.start("help", "hangs", stdout=closed)
    assert job.wait().status == 128 + signal.SIGPIPE


def test_help_says_which_file_of_the_installation_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddplaunch.cli.help._FOLDER", "/nowhere")
    result = typed("help", "hangs")
    assert result.exit_code != 0
    assert "/nowhere/hangs.md" in result.stderr


def test_no_line_of_a_help_ends_within_the_name_of_an_option() -> None:
    """Where they do, the name cannot be searched for."""
    for columns in ("50", "80"):
        assert not re.search(r"--[\w-]*-$", shown("--help-all", COLUMNS=columns), re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--help",
        "--help-all",
        "help",
        "plan --help",
        "submit --help",
        "completion --help",
        "ps --help",
        "logs --help",
    ],
)
@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("200", 100), ("60", 60), ("40", 40)])
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


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_verbs_have_a_help_of_their_own(verb: str, columns: str) -> None:
    text = shown(verb, "--help", COLUMNS=columns)
    assert text.startswith(f"Usage: ddplaunch {verb} ".replace(" run ", " "))
    assert shown("help", verb, COLUMNS=columns) == text


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
            "plain,help",
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
    ("help ha", {"plain,hangs"}),
    ("help pl", {"plain,plan"}),
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
