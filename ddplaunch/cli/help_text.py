"""What the command says about itself: the help of each verb, short and in full. Takes the options from their table."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from ddplaunch.cli.verbs import FORMS, RUN_OPTIONS, SUBMIT_OPTIONS, VERBS
from ddplaunch.exitcodes import MEANINGS
from ddplaunch.options.option import Option
from ddplaunch.options.table import BY_NAME, GROUPS, OPTIONS

USAGE = {
    "run": "ddplaunch [OPTIONS] SCRIPT [ARGS]...",
    "plan": "ddplaunch plan [--json | --sh] [OPTIONS] SCRIPT [ARGS]...",
    "submit": "ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]...",
    "ps": "ddplaunch ps [--json]",
    "logs": "ddplaunch logs [-r LIST] [-f] [--grep RE] [--since TIME] [RUN]",
    "stacks": "ddplaunch stacks [-r LIST] [--threads] [--native] [--json] [RUN]",
    "attach": "ddplaunch attach [-r RANK] [RUN]",
    "stop": "ddplaunch stop [RUN]",
    "warm": "ddplaunch warm [--stop]",
    "shim": "ddplaunch shim FOLDER",
    "completion": "ddplaunch completion [bash|zsh|fish|tcsh]",
}
_RUN = (
    "RUN is the name of a run, as `ddplaunch ps` shows it, a beginning of that, or its folder. It may be left out where only "
    "one job runs."
)
_ABOUT = {
    "run": "Starts one worker per accelerator, gives each its place, shows what they print, and ends all of them the "
    "moment one fails or you stop the job. Everything after SCRIPT belongs to the script.",
    "plan": "Shows what `ddplaunch` with the same arguments would do: ranks, devices, CPUs, variables, and where each value "
    "came from. Starts nothing. Takes the options of `ddplaunch --help-all`.",
    "submit": "Checks the job, writes a batch script for it and hands that to Slurm's sbatch. Options before -- go to "
    "sbatch, but for those below; what follows it are the arguments of `ddplaunch` on one machine.",
    "ps": "Shows your jobs that run on this host, and their workers on all of their hosts: what each does, the share of a CPU "
    "since its start, its memory, and for how long it has written nothing. Of jobs on other hosts that share this home it shows "
    "where they run. Each job is asked; what does not answer in a second is named.",
    "logs": "Writes what the workers of a run wrote to their stdout and stderr, rank by rank, from the logs of the run; of "
    "several ranks with the rank before each line. RUN is the name of a run or its folder, and the latest run if it is left "
    "out.",
    "stacks": "Shows where all workers of a job are, those at the same place once, and which of them wait in a collective for "
    "which others. The workers are interrupted for a millisecond and go on. " + _RUN,
    "attach": "Opens pdb in a worker of a running job, at the line that it runs just now, and holds it there until you leave "
    "pdb, by `c`, `q` or Ctrl-D: then it goes on. No time limit of the job runs meanwhile. " + _RUN,
    "stop": "Stops a job as Ctrl-C in its terminal does, waits until it has ended, and says how. Typed once more it kills, as "
    "the second Ctrl-C does. " + _RUN,
    "warm": "Shows the interpreters that --keep-warm keeps for your next runs on this machine: what each has imported, how many "
    "runs it has served, and when it ends.",
    "shim": "Writes a torchrun that is ddplaunch into FOLDER, for programs that start torchrun, or python -m "
    "torch.distributed.run, themselves, and prints the line that puts FOLDER first in PATH and PYTHONPATH of your shell. "
    "Nothing else is changed: without that line, torchrun stays torch's.",
    "completion": "Prints the script that makes a shell complete our options. Put the line of your shell into its file.",
}
_ALONE = "ddplaunch starts PyTorch training on all GPUs of one machine or of many, watches over it, and ends all of it together."
_EXAMPLES = (
    ("ddplaunch train.py", "one worker per GPU; one if there is none"),
    ("ddplaunch --nproc-per-node 4 train.py --lr 0.1", "four workers; --lr is the script's"),
    ("ddplaunch --hosts a,b train.py", "on two hosts, over ssh"),
    ("ddplaunch plan --nproc-per-node 4 train.py", "what would be started, and why"),
)
_MORE_EXAMPLES = (
    ("ddplaunch -m pkg.train", "a module"),
    ("ddplaunch --debug 1 train.py", "pdb in rank 1"),
    ("ddplaunch --nnodes 3 --simulate train.py", "three nodes on this one machine, to try it"),
)
# what people use, in the order in which they come to need it; the rest is in --help-all
_COMMON = ("nproc_per_node", "devices", "gpus_per_worker", "module", "env", "backend", "max_restarts", "timeout", "output",
           "log_dir", "quiet", "debug", "nnodes", "hosts", "simulate")  # fmt: skip
_IN_SHORT = {  # where the first sentence of the full text is no summary
    "output": "How to show what workers print: prefix, raw, collapse, rank0 or none.",
    "debug": "breakpoint() and pdb work in this rank.",
    "simulate": "All nodes on this one machine, to try it.",
}
_SUBMIT_EXAMPLES = (
    (
        "ddplaunch submit --nodes 2 --gpus-per-node 4 --time 4:00:00 -- train.py --lr 0.1",
        "on two nodes with four GPUs each",
    ),
    ("ddplaunch submit --follow -p main -N 2 -- --nproc-per-node 4 train.py", "and show its output"),
    ("ddplaunch submit --print --nodes 2 -- train.py > train.sh", "a script to change and keep"),
)
SUBMIT_DEFAULTS = (
    "Unless given, the script has --job-name after SCRIPT, --nodes as in --nnodes if that is given, "
    "--ntasks-per-node=1, --output=%x-%j.out (%x-%A_%a.out for an array) and --open-mode=append."
)
_SHELLS = (
    ('eval "$(ddplaunch completion bash)"', "in ~/.bashrc"),
    ('eval "$(ddplaunch completion zsh)"', "in ~/.zshrc, after `autoload -Uz compinit && compinit`"),
    ("ddplaunch completion fish | source", "in ~/.config/fish/config.fish"),
    ("eval `ddplaunch completion tcsh`", "in ~/.tcshrc"),
)
_SHIM = (('eval "$(ddplaunch shim ~/torchrun-shim)"', "in this shell"),)
_DEFAULTS = (
    "An option may also be set in a variable, --nproc-per-node as DDPLAUNCH_NPROC_PER_NODE, in ddplaunch.toml, or in "
    "[tool.ddplaunch] of pyproject.toml, as nproc-per-node = 4. torchrun's PET_* variables are read too. "
    "Options may be written with _ for -."
)
_SELF = (
    ("-h, --help", "The options used most, in short."),
    ("--help-all", "All options, by topic, and the exit statuses."),
    ("-V, --version", "The version."),
)
_RARE = ("attach", "warm")  # verbs that --help-all has
_WIDEST = 100  # longer lines are hard to read
_NARROW = 78  # below it, examples have their meaning on a line of its own


class _Page(click.HelpFormatter):
    def __init__(self, colour: bool) -> None:
        super().__init__(max_width=_WIDEST)
        self.colour = colour

    def write_heading(self, heading: str) -> None:
        self.write(f"{self.styled(heading + ':', 'bold')}\n")

    def styled(self, text: str, style: str) -> str:
        if not self.colour:
            return text
        return click.style(text, bold=True) if style == "bold" else click.style(text, fg=style)

    def paragraph(self, text: str) -> None:
        self.write_paragraph()
        self.write_text(text)

    def rows(self, heading: str, rows: Sequence[tuple[str, str]]) -> None:
        with self.section(heading):
            self.write_dl([(self.styled(name, "cyan"), text) for name, text in rows], col_max=self.width // 3)

    def examples(self, rows: Sequence[tuple[str, str]]) -> None:
        fits = max(len(example) + len(meaning) for example, meaning in rows) + 4 <= self.width
        coloured = [(self.styled(example, "cyan"), meaning) for example, meaning in rows]
        with self.section("Examples"):
            if fits and self.width >= _NARROW:
                self.write_dl(coloured, col_max=_WIDEST)
            else:
                self.write("".join(f"  {example}\n      {meaning}\n" for example, meaning in coloured))


def alone(*, colour: bool) -> str:
    """What `ddplaunch` without a word shows: what it is, and what to type."""
    page = _Page(colour)
    page.write_text(_ALONE)
    page.examples(_EXAMPLES)
    page.paragraph("`ddplaunch --help` shows the options used most, `ddplaunch --help-all` all of them.")
    return page.getvalue()


def of(verb: str, *, full: bool, colour: bool) -> str:
    """The help of a verb; of `run` the options used most, or all of them."""
    page = _Page(colour)
    page.write(f"{page.styled('Usage:', 'bold')} {USAGE[verb]}\n")
    page.paragraph(_ABOUT[verb])
    match verb:
        case "plan":
            page.rows("Forms", [(f"--{name}", text) for name, text in FORMS])
        case "submit":
            page.rows("Options", SUBMIT_OPTIONS)
            page.examples(_SUBMIT_EXAMPLES)
            page.paragraph(SUBMIT_DEFAULTS)
        case _ if RUN_OPTIONS.get(verb):
            page.rows("Options", [(_names(*row[:2]), row[2]) for row in RUN_OPTIONS[verb]])
        case "stop":
            pass
        case "completion":
            page.examples(_SHELLS)
        case "shim":
            page.examples(_SHIM)
        case _:
            _job(page, full)
    return page.getvalue()


def _job(page: _Page, full: bool) -> None:
    page.examples((*_EXAMPLES, *_MORE_EXAMPLES) if full else _EXAMPLES)
    if full:
        for group in GROUPS:
            page.rows(group, [(_usage_of(option), _help_of(option)) for option in OPTIONS if option.group == group])
        page.rows("Other options", _SELF)
    else:
        shown = (BY_NAME[name] for name in _COMMON)
        page.rows(
            "Options",
            [(_usage_of(option), _IN_SHORT.get(option.name) or _first_sentence(option.help)) for option in shown],
        )
    if full:
        page.rows("Verbs", [*VERBS.items(), ("help, version", "The same as --help and --version.")])
    else:
        shown_alone = [(verb, text) for verb, text in VERBS.items() if verb not in (*RUN_OPTIONS, "run", "shim")]
        into_runs = ", ".join(verb for verb in RUN_OPTIONS if verb not in _RARE)
        page.rows("Verbs", [*shown_alone, (into_runs, "Look into your running jobs, and end them.")])
    if not full:
        page.rows("More", [*_SELF[1:], ("VERB --help", "The help of a verb.")])
        return
    page.paragraph(_DEFAULTS)
    page.rows("Exit status", list(MEANINGS.items()))


def _names(names: Sequence[str], metavar: str) -> str:
    return f"{', '.join(names)} {metavar}".rstrip()


def _usage_of(option: Option) -> str:
    names = f"{option.short}, {option.flag}" if option.short else option.flag
    return names if option.is_flag else f"{names} {option.metavar}"


def _help_of(option: Option) -> str:
    if option.no_effect:
        return f"{option.help} No effect here: {option.no_effect}."
    return f"{option.help} [default: {option.default}]" if option.default else option.help


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) |[:;] ", text, maxsplit=1)[0].rstrip(".") + "."
