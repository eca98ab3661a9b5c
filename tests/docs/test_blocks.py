"""The blocks of code on the pages are what they say they are: Python, shell, TOML; and files that a command on the page takes."""

import ast
import builtins
import re
import subprocess
import tomllib
from collections.abc import Iterator
from textwrap import indent

import pytest
import yaml

from tests.docs.pages import JOB_SCRIPT, PAGES, ROOT, Block, blocks, commands, name_of
from tests.docs.places import pod
from tests.unit.environments import found

BLOCKS = [block for page in [*PAGES, JOB_SCRIPT] for block in blocks(page)]
SIGNATURES = ROOT / "docs/reference/python.md"  # generated: what stands there is the head of a function


def in_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def tree(block: Block) -> ast.Module:
    text = block.text
    if block.page == SIGNATURES:
        text = text.rstrip() + ": ..." if text.startswith("class ") else f"def {text.rstrip()}: ..."
    return ast.parse(text, str(block))


def is_whole(module: ast.Module) -> bool:
    """Whether a program has all that it uses, and leaves nothing out."""
    nodes = list(ast.walk(module))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    leaves_out = any(isinstance(node, ast.Constant) and node.value is ... for node in nodes)
    imports = any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)
    return imports and not leaves_out and all(node.id in made for node in names)


def test_no_block_begins_or_ends_with_an_empty_line() -> None:
    assert [str(block) for block in BLOCKS if not (block.lines[0].strip() and block.lines[-1].strip())] == []


@pytest.mark.parametrize("block", in_language("python"), ids=str)
def test_python_can_be_compiled(block: Block) -> None:
    if is_whole(module := tree(block)):
        compile(module, str(block), "exec")
    else:  # part of a function, maybe
        compile(f"def part():\n{indent(ast.unparse(module), '    ')}", str(block), "exec")


@pytest.mark.parametrize("block", [block for block in in_language("python") if is_whole(tree(block))], ids=str)
def test_a_whole_program_has_a_name_by_which_the_page_runs_it(block: Block) -> None:
    """What runs it then is test_commands."""
    assert block.title in {word for command in commands(block.page) for word in command.words}


def test_the_pages_have_whole_programs() -> None:
    assert sum(is_whole(tree(block)) for block in in_language("python")) >= 6


@pytest.mark.parametrize("block", in_language("sh"), ids=str)
def test_a_shell_takes_what_is_for_a_shell(block: Block) -> None:
    ended = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("block", in_language("toml"), ids=str)
def test_toml_can_be_read(block: Block) -> None:
    assert tomllib.loads(block.text)


def manifests() -> list[Block]:
    return [block for block in in_language("yaml") if "completionMode: Indexed" in block.text]


@pytest.mark.parametrize("block", manifests(), ids=str)
def test_the_pods_of_a_manifest_meet_at_the_first_of_them(block: Block) -> None:
    """At its name below that of the service: of its own, or the one that a JobSet makes."""
    parts = {part["kind"]: part for part in yaml.safe_load_all(block.text)}
    job = parts["Job"] if "Job" in parts else parts["JobSet"]["spec"]["replicatedJobs"][0]["template"]
    service = job["spec"]["template"]["spec"]["subdomain"] if "Job" in parts else parts["JobSet"]["metadata"]["name"]
    nnodes = job["spec"]["completions"]
    pods = [pod(block, index) for index in range(nnodes)]
    nodes = [found(variables, hostname=variables["HOSTNAME"], nnodes=(nnodes, nnodes)) for variables in pods]
    assert [node.node_rank for node in nodes] == list(range(nnodes))
    assert {node.endpoint.address for node in nodes} == {f"{pods[0]['HOSTNAME']}.{service}"}
    assert all(
        command.words[:2] == ["--nnodes", f"{nnodes}"] for command in commands(block.page) if command.block == block
    )
    assert job["spec"]["parallelism"] == nnodes
    if "Service" in parts:
        assert parts["Service"]["metadata"]["name"] == service
        assert parts["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


@pytest.mark.parametrize("block", in_language("yaml"), ids=str)
def test_yaml_can_be_read(block: Block) -> None:
    assert list(yaml.safe_load_all(block.text))


def flags_of_examples() -> Iterator[tuple[str, str]]:
    """Each flag that a page gives to one of our examples."""
    for page in [*PAGES, JOB_SCRIPT]:
        for command in commands(page):
            words = command.words
            at = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
            for word in words[at + 1 :]:
                in_its_folder = (
                    name_of(page) in ("examples/checkpoints.md", "examples/slurm/job.sh") and words[at] == "train.py"
                )
                path = f"examples/slurm/{words[at]}" if in_its_folder else words[at]
                if word.startswith("--") and path.startswith("examples/"):
                    yield path, word


@pytest.mark.parametrize(("example", "flag"), sorted(set(flags_of_examples())))
def test_an_example_has_the_flags_that_pages_give_it(example: str, flag: str) -> None:
    source = (ROOT / example).read_text(encoding="utf-8")
    assert re.search(rf'add_argument\(\s*"{flag}"', source)
