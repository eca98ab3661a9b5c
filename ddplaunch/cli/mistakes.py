"""The errors for mistakes in a command line, with the line that was probably meant as the hint. Looks at files only."""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from collections.abc import Sequence
from itertools import takewhile

import click
from msgspec import Struct

from ddplaunch.cli.command import TOPICS, VERBS
from ddplaunch.cli.launchers import LAUNCHERS, OPTION_BY_FLAG, PYTHON, first_script, flag_of, translate_line
from ddplaunch.spec.options.parsers import BadValue
from ddplaunch.spec.options.table import BY_NAME, OPTIONS
from ddplaunch.system import fields
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import did_you_mean, some

_TYPOGRAPHIC_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # what editors, chats and PDF files make of - and --
_TYPOGRAPHIC_QUOTES = str.maketrans("", "", "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u200b\ufeff")
_NPROC_FLAG = "--nproc-per-node"

# they run any command
_RUN_OTHERS = ("env", "uv", "poetry", "pipenv", "pdm", "hatch", "conda", "srun", "sudo", "nohup", "time")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
_NUMERAL = re.compile(r"[-+]?\d*\.?\d+")
# what people call our options
_FLAG_MEANT_BY = {
    "nprocs": _NPROC_FLAG, "ngpus": _NPROC_FLAG, "num-workers": _NPROC_FLAG, "workers": _NPROC_FLAG, "world-size": _NPROC_FLAG,
    "rank": "--node-rank", "port": "--master-port", "addr": "--master-addr", "master-ip": "--master-addr",
    "silent": "--quiet", "dry-run": "ddplaunch plan", "json": "ddplaunch plan --json", "sh": "ddplaunch plan --sh",
    "no-color": "NO_COLOR=1 ddplaunch", "bind-to": "--cpu-bind", "cpu": "--devices cpu",
    "procs": _NPROC_FLAG, "gpus-per-node": _NPROC_FLAG, "ngpus-per-node": _NPROC_FLAG, "gpu": "--devices", "cuda": "--devices",
    "cuda-visible-devices": "--devices", "retries": "--max-restarts", "kill-after": "--grace-period", "omp": "--threads",
    **dict.fromkeys(("join-timeout", "start-timeout"), "--rdzv-timeout"),
    "omp-num-threads": "--threads", "log-level": "--verbose", "export": "--env", "e": "--env",
    **dict.fromkeys(("pdb", "ipdb", "post-mortem"), "--debug"), "vscode": "--debugpy",
    **dict.fromkeys(("restart", "restarts"), "--max-restarts"),
}  # fmt: skip
_VERBS_FOR = {
    "kill": "stop", "cancel": "stop", **dict.fromkeys(("list", "ls", "jobs", "status"), "ps"), "watch": "top",
    **dict.fromkeys(("runs", "history", "past"), "ps --all"), "tail": "logs -f",
}  # fmt: skip
# what people call the topics of the help
_TOPICS_FOR = {
    **dict.fromkeys(("exit", "exits", "exit-status", "statuses", "code", "codes"), "exit-codes"),
    **dict.fromkeys(("env", "variables", "vars"), "environment"), **dict.fromkeys(("hanging", "stuck"), "hangs"),
    **dict.fromkeys(("sbatch", "srun", "salloc"), "slurm"), **dict.fromkeys(("ctrl-c", "sigterm", "sigint"), "signals"),
}  # fmt: skip
# verbs that other tools have, and what serves in their place
_HINT_TO_LOOK = "`ddplaunch doctor` examines this machine, `ddplaunch plan train.py` shows what would be started"
_HINT_FOR_FOREIGN_VERB = {
    **dict.fromkeys(("info", "env", "test", "devices", "gpu", "gpus", "health", "diagnose"), _HINT_TO_LOOK),
    **dict.fromkeys(
        ("init", "config", "cfg", "configure", "setup"),
        "nothing has to be set up; options may stand in ddplaunch.toml, and `ddplaunch plan train.py` shows which hold",
    ),
}
# options of other launchers that have no counterpart, and why none is needed
_NEEDLESS = {
    "multi-gpu": "there is a worker for each GPU anyway",
    "mixed-precision": "the script says it, as in Accelerator(mixed_precision=...)",
    "config-file": "the script says it, as in Accelerator(...)",
    **dict.fromkeys(
        ("deepspeed", "use-deepspeed", "deepspeed-config"), "the script says it, as in deepspeed.initialize(...)"
    ),
    "oversubscribe": "there may be more workers than cores anyway",
    "allow-run-as-root": "root needs no option",
    "map-by": "ranks count up node by node anyway",
    **dict.fromkeys(
        ("cwd", "chdir", "workdir", "working-dir", "wdir", "wd"), "workers run in the folder where you type it"
    ),
    **dict.fromkeys(("ssh", "ssh-port", "ssh-args"), "the settings of ssh, in ~/.ssh/config, are used"),
}
# what only sbatch can give to a job
_FLAGS_OF_SBATCH = frozenset({
    "--partition", "--account", "--qos", "--mem", "--gres", "--constraint", "--nodelist", "--job-name", "-A", "-C", "-J",
})  # fmt: skip
# no training script has these by chance
_UNLIKELY_IN_SCRIPTS = frozenset({
    "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "hosts", "hostfile", "max-restarts", "standalone",
    "gpus-per-worker", "workers-per-gpu", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "grace-period",
    "cpu-bind", "no-python", "live", "simulate", "chaos", "spares", "keep-warm", "mps", "health-check", "restart-on",
    "max-no-progress", "hang-timeout", "heartbeat-timeout", "straggler-check", "requeue-on", "max-requeues", "notice-file",
    "notice-command", "stop-file", "debug-on-error", "debugpy", "avoid-bad-nodes", "numa-binding", "shutdown-timeout",
    "wrap-ranks",
})  # fmt: skip


class Line(Struct, frozen=True):
    """A line that was typed for a job: the words before the script, what stands in the script's place, and the words behind."""

    before: Sequence[str]  # without `ddplaunch`; the verb `plan` is among them
    target: str
    rest: Sequence[str] = ()

    def with_target(self, *words: str, how: str = "") -> str:
        """Return the hint to type these words in place of the target; `how` says what else to do."""
        return _hint_to_type(self.before, [*words, *self.rest], how)


def complete_flag(argument: str, following: str) -> str:
    """Complete the beginning of a flag of torchrun's as torchrun's parser does, if no other flag begins so; else change nothing.

    `argument` is no option of ours, `following` the next argument, "" for none.

    Raises:
        LaunchError: it is the flag of another launcher, or lacks a dash.
    """
    typed, equals, value = argument.partition("=")
    name = typed.replace("_", "-")
    lacks_dash = name.startswith("-") and name[1:].replace("-", "_") in BY_NAME
    meant = f"-{name}{equals}{value}" if lacks_dash else _instead_of_foreign_flag(name, value if equals else following)
    if meant is not None:
        raise LaunchError(f"{typed} is not an option", hint=f"did you mean `{meant}`?")
    found = [option for option in OPTIONS if option.flag.startswith(name)] if name.startswith("--") else []
    if len(found) == 1 and found[0].is_torchruns:
        return found[0].flag + equals + value
    return argument


def _instead_of_foreign_flag(name: str, value: str) -> str | None:
    """Return what to type in place of another launcher's flag with this value; None for any other flag."""
    is_number = value.isdecimal()
    match name:
        case "--gpus" | "-g" if value and not is_number:
            return f"--devices {value}"
        case "--gpus" | "-g" | "-j" | "-w" | "-p" if is_number:
            return f"--nproc-per-node {value}"
        case "-j" if re.fullmatch(r"\d+x\d+", value):  # torchx: nodes x workers
            nodes, _, workers = value.partition("x")
            return f"--nnodes {nodes} --nproc-per-node {workers}"
        case "-p" if value:
            return f"ddplaunch submit -p {value} -- ..."
        case "-w" | "-H" | "-host" | "--host" | "--nodelist":
            return f"--hosts {value}"
        case "-N":
            return f"--nnodes {value}"
        case "-x":
            return f"--env {value}"
    return None


def in_options(error: click.UsageError, argv: Sequence[str]) -> LaunchError:
    """Return the error for what click has found wrong in the options of a job (`argv`), with what to type instead."""
    match error:
        case click.NoSuchOption(option_name=name):
            return _for_unknown_option(name, argv)
        case click.BadOptionUsage(option_name=name):
            option = OPTION_BY_FLAG.get(name)
            if option is None or option.is_flag:  # None: --help, say
                return LaunchError(f"{name} takes no value", hint=f"type `{name}`")
            return LaunchError(f"{name} needs a value", hint=f"type for example `{name} {option.example}`")
    return LaunchError(error.format_message())


def _for_unknown_option(name: str, argv: Sequence[str]) -> LaunchError:
    """Return the error for a word that looks like an option and is none, with what was probably meant.

    `name` is what click calls it: the flag, without a value, or only the first letter of a word with one dash.
    """
    at = next((at for at, word in enumerate(argv) if word.startswith(name)), None)
    if at is None:  # typed with _, for which click's name has -
        at = next((at for at, word in enumerate(argv) if flag_of(word).startswith(name)), 0)
    line = Line(argv[:at], argv[at], argv[at + 1 :])
    typed = name if name.startswith("--") else line.target
    if wrong := if_from_text_processor(line):
        return wrong
    words = line.target.split()
    if len(words) > 1 and line.target.startswith("-"):
        return LaunchError(
            f"'{line.target}' is one word to the shell", hint=f"without the quotes: type `{' '.join(words)}`"
        )
    what = f"{name} is not an option"
    bare = flag_of(typed).lstrip("-").lower()
    if why := _NEEDLESS.get(bare):
        return LaunchError(what, hint=f"leave it out: {why}")
    flag, equals, _ = line.target.partition("=")
    if flag in _FLAGS_OF_SBATCH:
        end = at + (1 if equals else 2)  # behind its value
        whole = shlex.join(["ddplaunch", "submit", *argv[at:end], "--", *argv[:at], *argv[end:]])
        return LaunchError(what, hint=f"sbatch has it: type `{whole}`")
    if typed[1:].isdecimal():
        return LaunchError(f"{typed} is not an option", hint=line.with_target(_NPROC_FLAG, typed[1:]))
    if typed == "-c":  # as of python
        return LaunchError("-c is not an option: workers run a file", hint="write the code to a file, and name that")
    meant = _FLAG_MEANT_BY.get(bare) or _closest_flag(bare)
    if meant and "ddplaunch" in meant:  # a command of its own, with the rest of the line
        return LaunchError(what, hint=f"type `{meant} {shlex.join([*line.before, *line.rest])}`")
    where = "options of the script come after it: ddplaunch [OPTIONS] SCRIPT [ARGS]..."
    return LaunchError(what, hint=f"did you mean `{meant}`?" if meant else where)


def _closest_flag(bare: str) -> str | None:
    """Return the flag whose name is like this one without dashes; None: none is."""
    # an alias of an option is no name to suggest
    options = {flag: one for flag, one in OPTION_BY_FLAG.items() if one is None or one.flag == flag}
    names = [flag[2:] for flag in options if flag.startswith("--")]
    close = did_you_mean(bare, [*names, "json"], cutoff=0.7)  # --json is an option of `ddplaunch plan`
    return close and f"--{close}"


def in_place_of_script(line: Line) -> LaunchError | None:
    """Return the error for a SCRIPT that is probably meant as something else, such as a launcher or a URL; None: it is one."""
    target = line.target
    name = os.path.basename(target)
    if name.startswith("python") and PYTHON.fullmatch(name):
        hint = _hint_to_type(line.before, _behind_python(line.rest))
        return LaunchError(f"{target} is no script: ddplaunch starts python itself", hint=hint)
    if os.path.lexists(target):
        return None
    if error := _if_command(line) or _if_optional_value(line):
        return error
    if "--" + flag_of(target) in OPTION_BY_FLAG:
        option = OPTION_BY_FLAG["--" + flag_of(target)]  # None: --help, say
        # no value stands at it or behind it
        is_alone = "=" not in target and (not line.rest or os.path.isfile(line.rest[0]))
        lacks_value = option is not None and not option.is_flag and is_alone
        meant = [f"--{target}", option.example] if option is not None and lacks_value else [f"--{target}"]
        hint = line.with_target(*meant)
        return LaunchError(f"{target} is no script, but an option without its dashes", hint=hint)
    if _ASSIGNMENT.fullmatch(target):
        return _for_assignment(line)
    if target not in VERBS and (meant := _with_split_value_joined(line)):
        return LaunchError(f"{target} does not exist", hint=_hint_to_type([], meant, "a value is one word: "))
    if target.isdecimal():
        return LaunchError(f"{target} is a number, not a script", hint=line.with_target(_NPROC_FLAG, target))
    if _NUMERAL.fullmatch(target):  # -1, 0.5: no number of workers, so the hint leaves it out
        return LaunchError(f"{target} is a number, not a script", hint=_hint_to_type(line.before, line.rest))
    return if_from_text_processor(line) or _if_quoted_line(line) or _for_missing_script(line)


def _if_quoted_line(line: Line) -> LaunchError | None:
    """Return the error for several words in quotes, such as "train.py --lr 1"; None for anything else."""
    words = line.target.split()
    begins_line = words[:1] in (["python"], ["ddplaunch"])
    if len(words) < 2 or not (begins_line or words[0].startswith("-") or os.path.isfile(words[0])):
        return None
    hint = line.with_target(*words[1 if begins_line else 0 :], how="without the quotes: ")
    return LaunchError(f"{shlex.quote(line.target)} is one word to the shell", hint=hint)


def _if_command(line: Line) -> LaunchError | None:
    """Return the error for a SCRIPT that is another launcher, a command that runs others, a verb, or a URL; else None."""
    target, rest = line.target, line.rest
    if target in LAUNCHERS:
        return _for_launcher(target, line.before, target, rest)
    if target in _RUN_OTHERS and (at := first_script(rest)) is not None:
        words = [word for word in rest[:at] if not PYTHON.fullmatch(word)]
        whole = shlex.join([target, *words, "ddplaunch", *line.before, *rest[at:]])
        return LaunchError(f"{target} is a command that runs others, not a script", hint=f"type `{whole}`")
    names_file_next = bool(rest) and "." in rest[0]  # as in `test train.py`: `_for_missing_script` has a better hint
    if target in _HINT_FOR_FOREIGN_VERB and not names_file_next:
        return LaunchError(f"{target} is no verb of ddplaunch", hint=_HINT_FOR_FOREIGN_VERB[target])
    if re.match(r"\w+://", target):
        hint = line.with_target(os.path.basename(target) or "train.py", how="fetch it first, then ")
        return LaunchError(f"{target} is a URL, not a file", hint=hint)
    return None


def _for_assignment(line: Line) -> LaunchError:
    """Return the error for NAME=VALUE in place of the script: a variable if NAME has capitals, else the script's argument."""
    assigned = [line.target, *takewhile(_ASSIGNMENT.fullmatch, line.rest)]
    script, *arguments = line.rest[len(assigned) - 1 :] or [""]
    if not line.target.partition("=")[0].isupper():
        hint = _hint_to_type(line.before, [script, *assigned, *arguments] if script else [])
        return LaunchError(f"{line.target} is not a script; its arguments come after it", hint=hint)
    env = [word for variable in assigned for word in ("--env", variable)]
    hint = _hint_to_type([*line.before, *env], [script, *arguments] if script else [])
    return LaunchError(f"{line.target} is a variable, not a script", hint=hint)


def _for_missing_script(line: Line) -> LaunchError | None:
    """Return the error for a script that does not exist: half of a name with a blank, a verb, or a word too many; else None."""
    target, rest = line.target, line.rest
    missing = f"{target} does not exist"
    program = [target, *rest]
    for end in range(2, len(program) + 1):
        name = " ".join(program[:end])
        if os.path.isfile(name):
            hint = _hint_to_type(line.before, [name, *program[end:]], "a name with a blank in it is quoted: ")
            return LaunchError(missing, hint=hint)
    if verb := verb_meant(target):
        hint = f"did you mean `ddplaunch {verb} ...`?"
        options_precede = any(word not in VERBS for word in line.before)  # not `plan` alone
        if options_precede:
            options = line.before if verb == "plan" else ()  # those of a job, which no other verb has
            hint = _hint_to_type((), [verb, *options, *rest], "a verb comes first: ")
        return LaunchError(missing, hint=hint)
    # `train train.py`, `go --nnodes 2`; not `train`, where train.py is there: the script's name without its end
    is_word = target.isidentifier() and (not os.path.lexists(f"{target}.py") or f"{target}.py" in rest[:1])
    job_follows = bool(rest) and (
        flag_of(rest[0]) in OPTION_BY_FLAG or (rest[0].endswith(".py") and os.path.isfile(rest[0]))
    )
    if is_word and job_follows:
        return LaunchError(
            f"{target} is neither a verb of ddplaunch nor a script", hint=_hint_to_type(line.before, rest)
        )
    return None


def _if_optional_value(line: Line) -> LaunchError | None:
    """Return the error for a word that was meant as the optional value of the option before, but is none; else None."""
    *before, typed = line.before or [""]
    option = OPTION_BY_FLAG.get(typed.replace("_", "-"))
    script_follows = any(map(os.path.isfile, line.rest[:1]))
    if option is None or option.implied_value is None or line.target.endswith(".py") or not script_follows:
        return None
    try:
        option.parse(line.target)
        return None
    except BadValue as error:
        why = error
    numbers = re.findall(r"\d+", line.target)
    if option.name == "simulate" and line.target.isdecimal():
        meant = [typed, "--nnodes", line.target]
    elif option.name == "debug" and len(numbers) > 1:  # one terminal is not for two debuggers
        is_range = re.fullmatch(r"\d+-\d+", line.target)
        meant = ["--debugpy", line.target if is_range else ",".join(numbers)]
    elif len(numbers) == 1 and not option.choices:
        meant = [typed, numbers[0]]
    else:
        meant = [typed, did_you_mean(line.target.lower(), option.choices) or option.example]
    return LaunchError(f"{typed} {line.target}: {why}", hint=_hint_to_type([*before, *meant], line.rest))


def launcher_as_module(line: Line) -> LaunchError | None:
    """Return the error for -m with the module of another launcher; None for any other module."""
    ours = [word for word in line.before if word not in ("-m", "--module")]
    return _for_launcher(f"-m {line.target}", ours, line.target, line.rest) if line.target in LAUNCHERS else None


def _for_launcher(typed: str, before: Sequence[str], launcher: str, words: Sequence[str]) -> LaunchError:
    """Return the error for another launcher, as it was typed, and the words behind it."""
    meant, lost = translate_line(launcher, words)
    left_out = f", which leaves out {' '.join(lost)}" if lost and meant else ""
    hint = _hint_to_type(before, meant) + left_out
    return LaunchError(f"{typed} is a launcher as ddplaunch is: one of them is enough", hint=hint)


def no_help(word: str) -> LaunchError:
    """Return the error for `help` with a word that is neither a verb nor a topic."""
    shown = fields.line(word) or repr(word)  # repr: '' for an empty word
    message = f"{shown} is neither a verb nor a topic of ddplaunch"
    lower, key = word.lower(), word.strip("-").replace("_", "-")
    topic = lower if lower in TOPICS else _TOPICS_FOR.get(lower) or did_you_mean(lower, TOPICS, cutoff=0.75)
    if meant := topic or verb_meant(lower):
        return LaunchError(message, hint=f"did you mean `ddplaunch help {meant.split()[0]}`?")
    if flags := [option.flag for option in OPTIONS if len(key) > 2 and key in option.key]:
        return LaunchError(message, hint=f"`ddplaunch --help-all` has {some(flags, 3)}")
    return LaunchError(message, hint=f"the topics are {', '.join(TOPICS)}, and the verbs {', '.join(VERBS)}")


def error_for_blanks(flag: str, value: str, following: str) -> LaunchError:
    """Return the error for a value with blanks around its =."""
    whole = value.removeprefix("=") or following
    return LaunchError(f"{flag} {value}: a value has no blanks around its =", hint=f"type `{flag} {whole or 'VALUE'}`")


def if_from_text_processor(line: Line) -> LaunchError | None:
    """Return the error for a target that contains a dash or a quote of a text processor; None if it contains none."""
    word = line.target
    body, plain = word.lstrip(_TYPOGRAPHIC_DASHES + "-") or word, word.translate(_TYPOGRAPHIC_QUOTES)
    dashes = word[: -len(body)] if body != word else ""
    if any(dash in dashes for dash in _TYPOGRAPHIC_DASHES):
        is_letter = len(body.partition("=")[0]) == 1
        plain = ("-" if is_letter else "--") + body.translate(_TYPOGRAPHIC_QUOTES)
    if plain == word:
        return None
    foreign = next(
        character for character in word if character in _TYPOGRAPHIC_DASHES or ord(character) in _TYPOGRAPHIC_QUOTES
    )
    return LaunchError(
        f"{word} contains U+{ord(foreign):04X} ({unicodedata.name(foreign).lower()}), as text processors write it",
        hint=line.with_target(plain),
    )


def verb_meant(word: str) -> str | None:
    """Return the verb that was probably meant by a word that is no file."""
    return None if "." in word or "/" in word else _VERBS_FOR.get(word) or did_you_mean(word, VERBS, cutoff=0.75)


def behind_script(line: Line, verbs_flags: Sequence[str] = ()) -> str | None:
    """Return a note on options of ours that the script gets, unless the script's text has them, too; None for none.

    `verbs_flags` are those that only the verb has, such as --json of `ddplaunch plan`.
    """
    text = text_of(line.target)
    if text is None:  # it cannot be read
        return None
    ours = {f"--{name}" for name in _UNLIKELY_IN_SCRIPTS}.union(verbs_flags)
    moved, of_script, flags = list[str](), list[str](), list[str]()
    words = list(line.rest)
    while words:
        word = words.pop(0)
        flag = flag_of(word)
        is_of_script = flag[2:] in text or flag[2:].replace("-", "_") in text
        if not word.startswith("--") or flag not in ours or is_of_script:
            of_script.append(word)
            continue
        flags.append(flag)
        moved.append(word)
        option = OPTION_BY_FLAG.get(flag)
        takes_value = flag not in verbs_flags and option is not None and not option.is_flag
        if takes_value and "=" not in word and words and not words[0].startswith("-"):
            moved.append(words.pop(0))
    if not flags:
        return None
    are_options = "is an option" if len(flags) == 1 else "are options"
    meant = shlex.join(["ddplaunch", *line.before, *moved, line.target, *of_script])
    return f"{some(flags)} after {line.target} {are_options} of the script; for ddplaunch type `{meant}`"


def _with_split_value_joined(line: Line) -> list[str]:
    """Return the command line that was meant if spaces split a value, so that its rest stands for SCRIPT; else [].

    `--preload torch numpy train.py` gives `--preload torch,numpy train.py`, `--timeout 5 m train.py` `--timeout 5m train.py`.
    """
    if len(line.before) < 2:
        return []
    *before, typed, value = line.before
    option, program = OPTION_BY_FLAG.get(flag_of(typed)), [line.target, *line.rest]
    # where the script is, behind the rest of the value; 0: there is none, or no such rest
    script_at = next((at for at, word in enumerate(program) if word.startswith("-") or os.path.isfile(word)), 0)
    if option is None or option.is_flag or not script_at or program[script_at].startswith("-"):
        return []
    if option.takes_list:
        value = ",".join(word.strip(",") for word in (value, *program[:script_at]))
    elif option.metavar == "TIME" and value.isdecimal() and program[0][0] in "smhd":  # a unit of time
        value += program[0][0]
    else:
        return []
    return [*before, typed, value, *program[script_at:]]


def _behind_python(words: Sequence[str]) -> list[str]:
    """Return the script or module behind `python`, with its arguments and without Python's own options; [] if there is none."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        if words[at].startswith("-m"):
            module, *rest = [words[at][2:], *words[at + 1 :]] if words[at][2:] else words[at + 1 :] or [""]
            if module in LAUNCHERS:
                meant, _ = translate_line(module, rest)
                return meant
            return ["-m", module, *rest]
        if words[at] == "-c":
            return []
        at += 2 if words[at] in ("-W", "-X") else 1  # these two have a value
    return list(words[at:])


def _hint_to_type(before: Sequence[str], meant: Sequence[str], how: str = "") -> str:
    """Return the hint to type `ddplaunch BEFORE MEANT`; without a script in `meant`, the hint to name one."""
    if not meant:
        return "type `ddplaunch train.py`, with the name of your script"
    return f"{how}type `{shlex.join(['ddplaunch', *before, *meant])}`"


def text_of(path: str) -> str | None:
    """Return the text of a script; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return None
