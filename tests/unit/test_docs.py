"""The documentation says what is true: pages made from the code are fresh, links lead somewhere, commands parse."""

import re
from pathlib import Path
from typing import get_args

import click
import pytest
from click.exceptions import Exit
from msgspec.structs import replace

from ddplaunch.cli.command import VERBS
from ddplaunch.cli.job import parse, resolve
from ddplaunch.cli.main import application
from ddplaunch.launcher.decide.job.restarts import SHORT_LIFE, pause_after
from ddplaunch.launcher.decide.node import CAUSE_TIMEOUT, KILL_TIMEOUT
from ddplaunch.launcher.decide.node.teardown import HANG_GRACE
from ddplaunch.launcher.job.messages import ToAgent, ToCoordinator
from ddplaunch.launcher.node.start_notice import PATIENCE
from ddplaunch.launcher.output.collapse import WAIT
from ddplaunch.launcher.start.dispatch import _GRACE_WITHIN_OUTER
from ddplaunch.launcher.start.node import _QUIET_CHECK_EVERY
from ddplaunch.plan.cluster.endpoints import STATIC_PORT, ports_beside, ports_of
from ddplaunch.reach.pipes import FULL, READER_TIMEOUT, UNREAD_TIMEOUT
from ddplaunch.reach.startup import MAX_REPEATS, MAX_STARTING
from ddplaunch.record.events import VERSION
from ddplaunch.record.old_runs import ROOM
from ddplaunch.record.run_folder import LOG_LIMIT
from ddplaunch.record.seen.stragglers import LEAST_STEPS
from ddplaunch.spec.job import default
from ddplaunch.spec.options.table import OPTIONS
from ddplaunch.system.console.lines import MAX_LINE, UPDATE_INTERVAL
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import MEANINGS
from ddplaunch.worker.distributed import ENTRIES
from docs import code_map, generate, topics
from tests.docs.pages import PAGES, ROOT, commands, name_of, prose, words_of

NUMBERS = [
    ("guides/failures.md", f"waits up to **{CAUSE_TIMEOUT:g} seconds** while only followers have ended"),
    ("concepts/output.md", f"cuts a line longer than {MAX_LINE >> 20} MiB"),
    ("guides/progress-bars.md", f"at most one every {UPDATE_INTERVAL:g} seconds"),
    ("concepts/output.md", f"keeps about {FULL >> 20} MiB"),
    ("concepts/output.md", f"They wait for at most **{READER_TIMEOUT:g} seconds**"),
    ("concepts/output.md", f"a reader that takes nothing for {UNREAD_TIMEOUT:g} seconds"),
    ("concepts/output.md", f"After {PATIENCE:g} seconds, a row"),
    ("symptoms.md", f"a row on the terminal says so after {PATIENCE:g} seconds"),
    ("concepts/output.md", f"a file holds at most **{LOG_LIMIT >> 30} GiB**"),
    ("concepts/output.md", f"holds each line back for up to {WAIT:g} s"),
    ("concepts/supervision.md", f"not even SIGKILL ends within {KILL_TIMEOUT:g} s"),
    ("concepts/supervision.md", f"One grace period for all, {default('grace_period'):g} s by default"),
    ("design/inspection.md", f"Each agent looks every {_QUIET_CHECK_EVERY:g} s."),
    ("design/inspection.md", f"is on, with {ENTRIES} entries"),
    ("guides/from-torchrun.md", f"The grace period is {default('grace_period'):g} s"),
    ("guides/from-torchrun.md", f"It is {_GRACE_WITHIN_OUTER:g} s in a Slurm job or a pod of Kubernetes"),
    ("guides/hangs.md", f"nothing before {LEAST_STEPS} steps"),
    ("guides/hangs.md", f"One that has not moved {HANG_GRACE:g} s later gets SIGKILL"),
    ("guides/network.md", f"{STATIC_PORT + 1} to {ports_beside(STATIC_PORT)[-1]} without it"),
    (
        "guides/network.md",
        f"one of 8 between {ports_of(0)[0]} and {ports_of(-1)[-1]}, by the number or name of the job",
    ),
    ("guides/several-nodes.md", f"Nodes wait for each other for {default('rdzv_timeout') / 60:g} minutes"),
    ("recipes/containers.md", f"workers have {_GRACE_WITHIN_OUTER:g} s in a pod"),
    ("recipes/slurm.md", f"the grace period in a Slurm job is {_GRACE_WITHIN_OUTER:g} s by default"),
    ("recipes/slurm.md", f"`--max-requeues` times, {default('max_requeues')} by default"),
    ("recipes/ssh.md", f"ddplaunch calls {MAX_STARTING} at a time"),
    ("recipes/ssh.md", f"up to {MAX_REPEATS} times again"),
    ("guides/from-torchrun.md", f"if they fail within {SHORT_LIFE:g} seconds"),
    ("guides/report.md", f"Runs are kept for {default('keep_runs')} days"),
    ("guides/report.md", f"at most {ROOM >> 30} GiB"),
    ("guides/stopping-and-restarting.md", f"the grace period, {default('grace_period'):g} s unless"),
    ("guides/stopping-and-restarting.md", f"A start that fails within {SHORT_LIFE:g} seconds"),
    ("reference/run-folder.md", f"`v` is the version of the format, now {VERSION}."),
    ("guides/stopping-and-restarting.md", f"doubling up to {pause_after(99):g} s"),
]

# whose paths are those of modules
ABOUT_THE_CODE = ["CONTRIBUTING.md", "docs/design/architecture.md", "docs/design/security.md"]

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def understood(words: list[str]) -> None:
    """Let the real parser, and what settles the values, take these words.

    Raises:
        LaunchError: they mean nothing.
    """
    verb, rest = (words[0], words[1:]) if words and words[0] in VERBS else ("run", words)
    command = application.get_command(click.Context(application), verb)
    assert command is not None
    if verb == "submit":
        verb, rest = "run", rest[rest.index("--") + 1 :]
    try:
        if verb in ("run", "plan") and words[:1] not in (["help"], ["version"]):
            line = parse([word for word in rest if word not in ("--json", "--sh")])
            files_need_not_exist = tuple(one for one in line.given if one.name != "env_file")
            resolve(replace(line, given=files_need_not_exist), {}, None)
        else:
            command.make_context(verb, [word.strip("[]") for word in rest])
    except Exit:
        pass  # --help


def test_generated_pages_are_fresh() -> None:
    assert generate.main(["--check"]) == 0, "python docs/generate.py"


def test_a_stale_page_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "REFERENCE", tmp_path)
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    (tmp_path / "cli.md").write_text("something else")
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/reference/cli.md is stale: python docs/generate.py\n"


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A package of two layers: a folder with a folder in it, above a loose module."""
    package = tmp_path / "made_up"
    (package / "upper" / "inner").mkdir(parents=True)
    for path, docstring in [
        ("__init__.py", "All of it."),
        ("upper/__init__.py", "Does things. And more."),
        ("upper/inner/__init__.py", "Does a part."),
        ("lower.py", "Holds < values."),
    ]:
        (package / path).write_text(f'"""{docstring}"""\n')
    contract(tmp_path, "upper", "lower")
    return package


def contract(folder: Path, *layers: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(f'[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = {list(layers)}\n')
    return path


def test_the_map_of_the_code_has_each_folder_in_its_layer(made_up: Path) -> None:
    layers = code_map.read(made_up, made_up.parent / "pyproject.toml")
    assert code_map.as_text(layers).splitlines() == [
        "upper/    Does things.",
        "  inner/  Does a part.",
        "--------",
        "lower     Holds < values.",
    ]
    picture = code_map.as_picture(layers)
    assert (
        picture.index(">upper/<")
        < picture.index(">Does things.<")
        < picture.index(">inner/<")
        < picture.index(">lower<")
    )
    assert ">Holds &lt; values.<" in picture


def test_the_map_of_the_code_changes_with_a_layer(made_up: Path) -> None:
    before = code_map.read(made_up, made_up.parent / "pyproject.toml")
    after = code_map.read(made_up, contract(made_up.parent, "lower", "upper"))
    assert code_map.as_text(before) != code_map.as_text(after)
    assert code_map.as_picture(before) != code_map.as_picture(after)


def test_a_folder_without_a_layer_has_no_place_on_the_map(made_up: Path) -> None:
    (made_up / "added").mkdir()
    (made_up / "added" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match=r"no layer in .*: added"):
        code_map.read(made_up, made_up.parent / "pyproject.toml")


def test_a_folder_that_is_gone_has_no_place_on_the_map(made_up: Path) -> None:
    (made_up / "lower.py").unlink()
    with pytest.raises(ValueError, match=r"is gone: lower"):
        code_map.read(made_up, made_up.parent / "pyproject.toml")


def test_pages_about_the_code_name_modules_that_are_there() -> None:
    for page in ABOUT_THE_CODE:
        for path in re.findall(r"`([\w*.]+/[\w/*.]*)`", prose(ROOT / page)):
            is_there = any(any(base.glob(path.rstrip("/"))) for base in (ROOT, ROOT / "ddplaunch", ROOT / "tests"))
            assert is_there or path in ("dist/", "errors/"), f"{page}: {path}"  # which `make dist` and a run make


def test_each_file_of_tests_has_its_feature_in_the_table_of_features() -> None:
    table = prose(ROOT / "CONTRIBUTING.md").partition("## Where the tests of a feature are")[2].partition("\n## ")[0]
    paths = re.findall(r"`((?:unit|cli|process|torch|hosts|slurm|docs|gpu|simulator)/[^`]*)`", table)
    places = [place for path in paths for place in (ROOT / "tests").glob(path.rstrip("/"))]
    untold = set((ROOT / "tests").rglob("test_*.py")) - {
        file for place in places for file in (place, *place.rglob("*"))
    }
    assert not untold, "CONTRIBUTING.md does not say which feature these prove"


def test_the_reference_has_every_option_and_every_status() -> None:
    cli, statuses = generate.pages()["cli.md"], generate.pages()["exit-status.md"]
    for option in OPTIONS:
        assert re.search(rf"^### `(-\w, )?{option.flag}\b", cli, re.MULTILINE), option.name
        usual = f"DDPLAUNCH_{option.name.upper()}"
        for name, _ in option.variables:
            assert f"`{name}`" in cli or name == usual
        assert (f"No variable `{usual}`" in cli) == (usual not in [name for name, _ in option.variables])
    for status in MEANINGS:
        assert f"| `{status}` |" in statuses


def test_the_page_about_nodes_has_every_message_between_them() -> None:
    tables = prose(ROOT / "docs/design/control-channel.md")
    for head, messages in [("an agent sends", ToCoordinator), ("the coordinator sends", ToAgent)]:
        rows = tables.partition(f"| {head} |")[2].partition("\n\n")[0]
        named = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
        assert named == {message.__struct_config__.tag for message in get_args(messages)}


def test_the_guide_for_users_of_torchrun_has_every_flag_of_torchrun() -> None:
    guide = (ROOT / "docs/guides/from-torchrun.md").read_text(encoding="utf-8")
    missing = [option.flag for option in OPTIONS if option.is_torchruns and f"`{option.flag}`" not in guide]
    assert not missing


@pytest.mark.parametrize(("page", "words"), NUMBERS)
def test_numbers_are_those_of_the_code(page: str, words: str) -> None:
    assert words in " ".join(prose(ROOT / "docs" / page).split())


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page}: {target}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=name_of)
def test_a_page_of_the_site_leads_to_no_page_about_the_code(page: Path) -> None:
    """The site leaves docs/design out, to which CONTRIBUTING leads."""
    if "design" not in page.parts:
        assert not re.findall(r"\]\(([^)\s]*design/[^)\s]*)\)", prose(page))


@each_page
def test_commands_are_understood(page: Path) -> None:
    for command in commands(page):
        try:
            if command.program == "ddplaunch" and not command.is_wrong:
                understood(command.words)
        except LaunchError as error:
            pytest.fail(f"{command}: {error.message}")


@each_page
def test_commands_in_the_text_are_understood(page: Path) -> None:
    for line in re.findall(r"`(?:srun [^`]*|mpirun [^`]*)?(ddplaunch [^`]*\.py[^`]*)`", prose(page)):
        try:
            understood(words_of(line))
        except LaunchError as error:
            pytest.fail(f"{line}: {error.message}")


def test_the_pages_have_commands_to_check() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 40


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ddplaunch a.py # why", ["a.py"]),
        ("A=1 ddplaunch -q 'b c.py' | tail -1", ["-q", "b c.py"]),
        ("ddplaunch a.py 2>&1", ["a.py", "2"]),
        ("ddplaunch --env A=x,y --devices 0,GPU-1 a.py", ["--env", "A=x,y", "--devices", "0,GPU-1", "a.py"]),
    ],
)
def test_a_command_line_is_split_as_a_shell_splits_it(line: str, words: list[str]) -> None:
    assert words_of(line) == words


def test_a_command_that_is_wrong_is_noticed() -> None:
    with pytest.raises(LaunchError):
        understood(words_of("ddplaunch --nproc-per-nude 4 train.py"))
    with pytest.raises(LaunchError):
        understood(words_of("ddplaunch --pin devise train.py"))


def test_a_mark_of_a_topic_without_its_end_is_noticed() -> None:
    """As a merge of two texts leaves it."""
    text = f"# A\n\n<!-- help: hangs -->\n\n{topics.marked('hangs', 'a')}\n"
    with pytest.raises(ValueError, match=r"a\.md: a part for `ddplaunch help` lacks its begin or its end"):
        topics.read({Path("a.md"): text})


def test_a_topic_has_the_marked_parts_of_all_pages_without_their_links() -> None:
    first = topics.marked("hangs", "See [it](x.md). [Another page](y.md) says more.\n")
    second = topics.marked("hangs", "| `a` | [b](z.md) |")
    pages = {Path("a-b.md"): f"# Second\n\nno\n\n{second}\n", Path("a.md"): f"# First\n\n{first}\n\nno\n"}
    assert topics.read(pages) == {"hangs": "See it.\n\n# Second\n\n| `a` | b |\n"}


def test_a_topic_that_no_page_has_is_noticed(monkeypatch):
    monkeypatch.setattr(generate, "TOPICS", {**generate.TOPICS, "weather": ""})
    with pytest.raises(AssertionError, match="weather"):
        generate._topics({})
