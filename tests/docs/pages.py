"""Reads the pages of the documentation: their prose, their blocks of code, the commands in these. It runs nothing."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB_SCRIPT = ROOT / "examples/slurm/job.sh"
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

OPERATORS = set("|&;<>()")
_COMMAND = re.compile(r"(?P<before>|[^#]*[\s(])(?P<typed>(?:\w+=\S* )*ddplaunch .*)")
_PROGRAM = re.compile(r"(?P<before>)(?P<typed>(?:python|pytest) .*)")  # those too, where a page shows what comes out
_LIST = re.compile(r"(?:command: |CMD )\[(ddplaunch.*|\"ddplaunch\".*)\].*")  # Kubernetes, Docker
_USAGE = re.compile(r"\[(OPTIONS|SBATCH OPTIONS|bash\||VERB\|)")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: Path
    line: int  # of its first line, from 1
    fence: str  # what stands behind ```; "" if nothing does, or if it is only indented
    lines: Sequence[str]

    @property
    def language(self) -> str:
        """The language that the fence names."""
        return self.fence.partition(" ")[0]

    @property
    def title(self) -> str | None:
        """The file whose content this is."""
        named = re.search(r'title="([^"]+)"', self.fence)
        return named and named[1]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines) + "\n"

    @property
    def is_session(self) -> bool:
        """Whether it shows what was typed behind `$ `, and what came of it."""
        return self.language in ("console", "") and any(line.startswith("$ ") for line in self.lines)

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of ours on a page."""

    block: Block
    line: int
    typed: str  # from the variables, if there are any, to the end of the line
    before: str = ""  # what starts it: srun, mpirun, docker, ...
    shown: Sequence[str] | None = None  # what the page says that it prints; None: nothing is shown
    status: int | None = None  # what the page says that `echo $?` prints

    @cached_property
    def words(self) -> list[str]:
        """The words behind `ddplaunch`, `python` or `pytest`."""
        return words_of(self.typed, self.program)

    @property
    def program(self) -> str:
        """What is run: `ddplaunch`, `python` or `pytest`."""
        first = self.typed.partition(" ")[0]
        return first if first in ("python", "pytest") else "ddplaunch"

    @property
    def variables(self) -> dict[str, str]:
        """Those that stand before `ddplaunch`."""
        words = shlex.split(self.typed.partition(self.program)[0])
        return dict(word.split("=", 1) for word in words)

    @property
    def is_wrong(self) -> bool:
        """Whether it stands there because it is a mistake."""
        return "wrong" in self.block.fence.split()

    def __str__(self) -> str:
        return f"{name_of(self.block.page)}:{self.line}: {self.typed}"


def name_of(page: Path) -> str:
    """A page as the documentation calls it: `guides/devices.md`."""
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def parts(page: Path) -> Iterator[tuple[int, str | None, str]]:
    """The lines of a page by number: those of code with what stands behind the fence, "" if only indented; others with None."""
    fence: str | None = None
    blank = True
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fence = line.removeprefix("```") if fence is None else None
        elif fence is not None:
            yield number, fence, line
        elif line.startswith("    ") and (blank or line.strip()):
            yield number, "", line.removeprefix("    ")
        else:
            yield number, None, line
        blank = not line.strip()


def prose(page: Path) -> str:
    """A page without its code."""
    return "\n".join(line for _, code, line in parts(page) if code is None)


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code of a page; of a script, the script itself."""
    if page.suffix == ".sh":
        yield Block(page, 1, "sh", page.read_text(encoding="utf-8").splitlines())
        return
    fence: str | None = None
    first, lines, blank = 0, list[str](), 0
    for number, code, line in parts(page):
        if code is None and fence == "" and not line.strip():
            blank += 1  # an indented block may go on behind it
        elif code is not None and code == fence and number == first + len(lines) + blank:
            lines += [""] * blank + [line]
            blank = 0
        else:
            if fence is not None:
                yield Block(page, first, fence, lines)
            fence, first, lines, blank = code, number, [line], 0
    if fence is not None:
        yield Block(page, first, fence, lines)


def story(page: Path) -> Iterator[Command | str]:
    """Everything that a page has its reader type, from top to bottom: commands of ours, and lines for the shell."""
    ours = {command.line: command for command in commands(page)}
    for block in blocks(page):
        if block.is_session:
            for number, line in enumerate(block.lines, block.line):
                if line.startswith("$ "):
                    yield ours.get(number, line.removeprefix("$ "))


def commands(page: Path) -> Iterator[Command]:
    """Every command line of ours in the code of a page, those too that are marked as wrong."""
    for block in blocks(page):
        if block.is_session:
            yield from _of_session(block)
        elif block.language in ("", "sh", "yaml", "dockerfile"):
            for number, line in enumerate(block.lines, block.line):
                if (found := _find(line)) is not None:
                    yield Command(block=block, line=number, before=found[0], typed=found[1])


def _of_session(block: Block) -> Iterator[Command]:
    """Each command with what stands below it; also those that run a program of the user's without us."""
    typed = [at for at, line in enumerate(block.lines) if line.startswith("$ ")]
    for at, end in zip(typed, [*typed[1:], len(block.lines)], strict=True):
        line = block.lines[at].removeprefix("$ ")
        if (found := _find(line)) is None:
            if (program := _PROGRAM.fullmatch(line)) is None:
                continue
            found = program["before"], program["typed"]
        asked = block.lines[end : end + 1] == ["$ echo $?"]
        yield Command(
            block=block,
            line=block.line + at,
            before=found[0],
            typed=found[1],
            shown=block.lines[at + 1 : end],
            status=int(block.lines[end + 1]) if asked else None,
        )


def _find(line: str) -> tuple[str, str] | None:
    """What stands before a command of ours, and the command; None if there is none."""
    line = line.strip()
    if (listed := _LIST.fullmatch(line)) is not None:
        return "", " ".join(word.strip(' "') for word in listed[1].split(","))
    if _USAGE.search(line) or (found := _COMMAND.fullmatch(line)) is None:
        return None
    typed = found["typed"]
    if found["before"].endswith("$("):
        typed = typed.partition(")")[0]
    return found["before"].strip(), typed


def words_of(line: str, program: str = "ddplaunch") -> list[str]:
    """The words behind the program, as a shell would split them, up to a pipe or a redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    words = words[words.index(program) + 1 :]
    end = next((at for at, word in enumerate(words) if set(word) <= OPERATORS), len(words))
    return words[:end]
