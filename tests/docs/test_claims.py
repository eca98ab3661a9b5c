"""What pages claim agrees with the code and with each other: numbers of things, exit codes, what has run, the way to a page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.cli.command import TOPICS, VERBS
from ddplaunch.record.old_runs import _FREE
from ddplaunch.spec.options.table import BY_NAME, OPTIONS
from ddplaunch.system.exitcodes import MEANINGS
from docs.voice import messages, paragraphs
from tests.cli.typed import shown
from tests.docs.pages import PAGES, ROOT, name_of, prose

DOCS = ROOT / "docs"
FRONT = DOCS / "README.md"
README = ROOT / "README.md"
COMPATIBILITY = DOCS / "reference/compatibility.md"
USER_PAGES = [page for page in PAGES if not name_of(page).startswith(("design/", "CONTRIBUTING"))]
each_page = pytest.mark.parametrize("page", USER_PAGES, ids=name_of)

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER = rf"(?P<number>\d+|{'|'.join(WORDS)})"


def rooms() -> int:
    return sum((path / "__init__.py").exists() for path in (ROOT / "ddplaunch").iterdir())


def functions_of_a_script() -> int:
    return sum(name[0].islower() and name != "launch" for name in ddplaunch.__all__)


def programs_that_were_run() -> int:
    part = COMPATIBILITY.read_text(encoding="utf-8").partition("\n## Programs\n")[2].partition("\n## ")[0]
    return len([row for row in re.findall(r"^\| (?!program|---)", part, re.MULTILINE) if row])


COUNTED = {
    r"offers NUMBER functions": functions_of_a_script(),
    r"NUMBER rooms": rooms(),
    r"NUMBER programs and libraries": programs_that_were_run(),
    r"some NUMBER programs": round(programs_that_were_run(), -1),
    r"NUMBER topics": len(TOPICS),
    r"NUMBER verbs": len(VERBS),
    r"--numa-binding` \| the same NUMBER modes": len(BY_NAME["numa_binding"].choices),
}


def miscounted(text: str) -> Iterator[str]:
    """Each number of things that another number is right for."""
    for pattern, count in COUNTED.items():
        for found in re.finditer(pattern.replace("NUMBER", NUMBER), " ".join(text.split()), re.IGNORECASE):
            number = found["number"].lower()
            if (WORDS.index(number) if number in WORDS else int(number)) != count:
                yield f"{found[0]}: {count}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_number_of_things_is_that_of_the_code(page: Path) -> None:
    assert list(miscounted(page.read_text(encoding="utf-8"))) == []


def test_a_wrong_number_of_things_is_found() -> None:
    assert list(miscounted("`import ddplaunch` offers three\nfunctions:")) == ["offers three functions: 4"]
    assert len(list(miscounted("Some 90 programs. Two rooms."))) == 2


# --- exit codes

# the codes that one option is the reason for
OF_OPTIONS = {
    flag: code
    for code, meaning in MEANINGS.items()
    if code.isdigit() and len(flags := re.findall(r"--[\w-]+", meaning)) == 1
    for flag in flags
    if flag != "--rdzv-timeout"  # a meeting after the first start ends with another code
}
_CODE = r"`?(\d+)`?"
_CODES = re.compile(
    rf"(?:exit (?:status|code)e?s?|status)(?: is| of)? {_CODE}(?:(?: to |-){_CODE}(?! ?\+)| to (128 ?\+ ?n))?"
)


def wrong_codes(text: str) -> Iterator[str]:
    """Each sentence or row of a table that gives a code to an option, or to a range, which the code of ddplaunch does not."""
    of_us = {code for code in MEANINGS if code.isdigit() and int(code) >= 120}
    for _, part in paragraphs(text):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\[(`*])", part):
            for first, last, signals in _CODES.findall(sentence):
                if signals or (last and f"{first}-{last}" not in MEANINGS and not {first, last} <= of_us):
                    yield sentence
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for unit in [*rows, *re.split(r"(?<=[.!?])\s+", " ".join(line for line in text.splitlines() if line[:1] != "|"))]:
        flags = {flag for flag in OF_OPTIONS if re.search(rf"{flag}(?![\w-])", unit)}
        codes = set(re.findall(r"(?<![\w.-])12[0-7](?![\w-]|\.\d)", unit))
        if len(flags) == 1 and len(codes) == 1 and codes != {OF_OPTIONS[flag] for flag in flags}:
            yield unit


@each_page
def test_a_page_gives_each_option_the_exit_code_that_it_has(page: Path) -> None:
    assert list(wrong_codes(prose(page))) == []


@pytest.mark.parametrize(
    "text",
    [
        "| exit status 121 to 128+n | ddplaunch ended it |",
        "exit status 1 to 120: that of the worker",
        "With `--timeout`, the status is 123.",
        "| `--hang-timeout` | all nodes stop | 124 |",
    ],
)
def test_a_wrong_exit_code_is_found(text: str) -> None:
    assert list(wrong_codes(text))


@pytest.mark.parametrize("page", ["cheat-sheet.md", "reference/exit-status.md"])
def test_a_page_of_exit_codes_has_all_that_the_code_has(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert "exit code" in text.lower()  # what people search for
    shown_codes = re.findall(r"^\| (?:exit code )?`?(\d+(?: to |-)?\d*|128 ?\+ ?n)`? \|", text, re.MULTILINE)
    codes = [code.replace(" to ", "-").replace(" ", "") for code in shown_codes]
    assert codes == list(MEANINGS)


# --- ways in


@pytest.mark.parametrize(
    "page",
    [page for page in USER_PAGES if page not in (FRONT, README) and not name_of(page).startswith("project/")],
    ids=name_of,
)
def test_the_first_page_leads_to_each_page_of_users(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", FRONT.read_text(encoding="utf-8"))
    assert name_of(page) in links


def test_the_first_page_and_the_help_name_all_that_nobody_else_has() -> None:
    text = FRONT.read_text(encoding="utf-8")
    help_text = shown("--help")
    for name in ("doctor", "check", "report", "profile", "stacks", "--live", "--hang-timeout"):
        assert re.search(rf"(?<![\w-]){name}(?!\w)", text), name
        assert re.search(rf"(?<![\w-]){name}(?!\w)", help_text), name


# --- what has run

_NOT_RUN = re.compile(r"ddplaunch has not run (?:in|on)(?: an?)?(?: real)?(?: cluster of)? (\w+)")


@each_page
def test_what_a_page_says_has_not_run_the_readme_says_too(page: Path) -> None:
    status = README.read_text(encoding="utf-8").partition("Not yet run:")[2].partition("[")[0].lower()
    assert status
    for subject in _NOT_RUN.findall(" ".join(prose(page).replace("\n> ", " ").split())):
        assert subject.lower() in status


@each_page
def test_no_page_says_that_gpus_are_untested_once_one_was_seen(page: Path) -> None:
    seen = json.loads(COMPATIBILITY.with_name("gpu-seen.json").read_text(encoding="utf-8"))
    assert seen
    assert not re.search(r"(NCCL|GPUs?)( and \w+)?\s+(is|are) untested|no GPU was", prose(page))


# --- how long runs stay


@each_page
def test_a_page_that_says_how_long_runs_stay_says_that_room_may_be_short(page: Path) -> None:
    for _, text in paragraphs(page.read_text(encoding="utf-8")):
        if re.search(r"\bkept\b.*\b30 days", text):
            assert "up to" in text or "GiB" in text


def test_the_page_of_the_run_folder_says_when_a_young_run_goes() -> None:
    text = " ".join(prose(DOCS / "reference/run-folder.md").split())
    assert f"less than {_FREE >> 30} GiB free, or less than a twentieth of its size if that is smaller" in text


# --- logs


@each_page
def test_a_page_that_says_the_only_worker_has_no_log_says_that_this_is_so_on_a_terminal(page: Path) -> None:
    for _, text in paragraphs(page.read_text(encoding="utf-8")):
        if re.search(r"\b(only|one|single) worker\b.*\bno logs?\b", text, re.IGNORECASE):
            assert "terminal" in text


# --- the plan


def test_the_plan_says_where_values_come_from_where_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ddplaunch.toml").write_text("max-restarts = 3\n")
    (tmp_path / "hello.py").touch()
    monkeypatch.chdir(tmp_path)
    lines = shown("plan", "--nproc-per-node", "2", "hello.py").splitlines()
    origin = next(at for at, line in enumerate(lines) if "ddplaunch.toml" in line)
    ranks = next(at for at, line in enumerate(lines) if line.startswith("rank "))
    page = (DOCS / "guides/configuration.md").read_text(encoding="utf-8")
    assert ("Above its table of ranks" in page) == (origin < ranks)


# --- one word for each thing


def test_no_message_of_the_code_calls_the_failure_summary_a_report() -> None:
    """A report is the page about a run."""
    texts = [text for file in (ROOT / "ddplaunch").rglob("*.py") for _, text in messages(file.read_text("utf-8"))]
    assert [text for text in texts if re.search(r"(failure|error) reports?|this report|malformed report", text)] == []
    assert [option.flag for option in OPTIONS if re.search(r"\breports\b", option.help)] == []


@each_page
def test_a_page_calls_the_lines_after_a_failure_the_failure_summary(page: Path) -> None:
    text = " ".join(prose(page).split())
    assert not re.search(r"(failure|error) reports?|read the report|line of the report", text, re.IGNORECASE)
