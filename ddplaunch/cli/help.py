"""`ddplaunch help`: the help of a verb, or a topic.

The text of a topic is a part of a page of the documentation, in Markdown without its links. docs/generate.py copies that part
into `topics/`, from where it is read, and laid out for the width of the terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import click
from click.shell_completion import CompletionItem

from ddplaunch.cli.command import TOPICS, VERBS, Command, Context, Page, page, show
from ddplaunch.system.console.paint import CODE, STRONG, styled
from ddplaunch.system.errors import not_imported

_FOLDER = os.path.join(os.path.dirname(__file__), "topics")
# topics that end with the options of a group of `ddplaunch --help-all`
_OPTION_GROUP_OF_TOPIC = {"output": "Output", "torchrun": "torchrun's own options"}
_ITEM = re.compile(r"(?:-|\d+\.) ")  # before each item of a list
_RULE = re.compile(r"\|( ?:?-+:? ?\|)+")  # below the head of a table


class HelpCommand(Command):
    """A command whose own help lists all verbs and topics."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs and the topics."""
        assert isinstance(formatter, Page)
        formatter.verbs()
        formatter.rows("Topics", list(TOPICS.items()))
        super().format_options(ctx, formatter)


def _completions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    texts = {**{verb: text for verb, (_, text) in VERBS.items()}, **TOPICS}
    return [CompletionItem(word, help=text) for word, text in texts.items() if word.startswith(incomplete)]


@click.command(
    cls=HelpCommand,
    takes="one verb or topic",
    examples=(("ddplaunch help logs", "the options of a verb"), ("ddplaunch help exit-codes", "a topic")),
    # of what looks like an option, the error says where it is explained
    context_settings={"ignore_unknown_options": True},
)
@click.argument("about", metavar="[VERB|TOPIC]", required=False, shell_complete=_completions)
@click.pass_context
def help(ctx: click.Context, about: str | None) -> int:  # noqa: A001 - the name of the verb
    """Shows the help of a verb, as `ddplaunch VERB --help` does, or a topic: a short page of the documentation."""
    if about in TOPICS:
        return show(page(ctx, _topic(ctx, about)))
    about = about if about is not None else "help"
    if about not in VERBS:
        from ddplaunch.cli.mistakes import no_help  # most people know what there is

        raise no_help(about)
    application = ctx.find_root().command
    assert isinstance(application, click.Group)
    command = application.get_command(ctx, about)
    assert command is not None
    return show(
        page(ctx, command.get_help(Context(command, parent=ctx.parent, info_name=about, max_content_width=100)))
    )


def _topic(ctx: click.Context, topic: str) -> str:
    """Return the page of a topic for this terminal.

    Raises:
        LaunchError: its text is not there, or cannot be read: the installation is damaged.
    """
    try:
        with open(os.path.join(_FOLDER, f"{topic}.md"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise not_imported(error) from None  # which says to install ddplaunch again
    formatter = ctx.make_formatter()
    assert isinstance(formatter, Page)
    _write(formatter, lines)
    if group := _OPTION_GROUP_OF_TOPIC.get(topic):
        from ddplaunch.cli.job import rows_of_group

        formatter.rows(group, rows_of_group(group))
    return formatter.getvalue().lstrip("\n")


def _write(formatter: Page, lines: Sequence[str]) -> None:
    """Write Markdown: headings, paragraphs, lists, tables and blocks of code."""
    for kind, block in _blocks(lines):
        match kind:
            case "code":
                formatter.write_paragraph()
                formatter.write("".join(f"  {line}".rstrip() + "\n" for line in block))
            case "heading":
                formatter.write_paragraph()
                formatter.write(styled(block[0].lstrip("# "), STRONG) + "\n")
            case "table":
                formatter.write_paragraph()
                _write_table(formatter, [line for line in block if not _RULE.fullmatch(line)])
            case "list":
                formatter.write_paragraph()
                for item in re.split(rf"\n(?={_ITEM.pattern})", "\n".join(block)):
                    sign, _, text = item.partition(" ")
                    formatter.write_dl([(sign, _plain(text))], col_spacing=1)
            case _:
                formatter.paragraph(_plain(" ".join(line.removeprefix("> ") for line in block)))


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of a text in Markdown, each with its kind, by the first characters of its lines."""
    kinds, is_code, kind = list[str](), False, ""
    for line in lines:
        if line.startswith("```"):
            is_code, kind = not is_code, ""
        elif is_code:
            kind = "code"
        elif not line.strip():
            kind = ""
        elif line.startswith("#"):
            kind = "heading"
        elif line.startswith("|"):
            kind = "table"
        elif _ITEM.match(line):
            kind = "list"
        elif kind != "list":  # the next line of an item is indented
            kind = "paragraph"
        kinds.append(kind)
    at = 0
    for kind, group in groupby(kinds):
        count = len(list(group))
        if kind:
            yield kind, list(lines[at : at + count])
        at += count


def _write_table(formatter: Page, lines: Sequence[str]) -> None:
    """Write a table: the first column, and beside it the others, which an arrow separates."""
    cells = [[_plain(cell.replace(r"\|", "|")) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    (name, *others), *rows = cells
    head = [(styled(name, STRONG), styled(" -> ".join(filter(None, others)), STRONG))] if any(cells[0]) else []
    texts = [(styled(first.replace("`", ""), CODE), " -> ".join(filter(None, rest))) for first, *rest in rows]
    with formatter.indentation():
        formatter.write_dl([*head, *texts], col_max=formatter.width // 3)


def _plain(text: str) -> str:
    """Return a text without what Markdown makes bold; code keeps its marks."""
    return " ".join(text.replace("**", "").split())
