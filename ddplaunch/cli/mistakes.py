"""What was probably meant by options that are none, a line that names no script, or options behind one. Looks at files only."""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from collections.abc import Sequence
from itertools import takewhile

import click

from ddplaunch.cli.command import VERBS
from ddplaunch.cli.launchers import FLAGS, LAUNCHERS, PYTHON, first_script, flag_of, of_launcher
from ddplaunch.spec.options.parsers import BadValue
from ddplaunch.spec.options.table import BY_NAME, OPTIONS
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import did_you_mean, some

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # what editors, chats and PDF files make of - and --
_QUOTES = str.maketrans("", "", "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u200b\ufeff")
_NUMBER = "--nproc-per-node"

# they run any command
_IN_FRONT = ("env", "uv", "poetry", "pipenv", "pdm", "hatch", "conda", "srun", "sudo", "nohup", "time")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
_NUMERAL = re.compile(r"[-+]?\d*\.?\d+")
# what people call our options
_WORDS_FOR = {
    "nprocs": _NUMBER, "ngpus": _NUMBER, "num-workers": _NUMBER, "workers": _NUMBER, "world-size": _NUMBER,
    "rank": "--node-rank", "port": "--master-port", "addr": "--master-addr", "master-ip": "--master-addr",
    "silent": "--quiet", "dry-run": "ddplaunch plan", "json": "ddplaunch plan --json", "sh": "ddplaunch plan --sh",
    "no-color": "NO_COLOR=1 ddplaunch", "bind-to": "--cpu-bind", "cpu": "--devices cpu",
    "procs": _NUMBER, "gpus-per-node": _NUMBER, "ngpus-per-node": _NUMBER, "gpu": "--devices", "cuda": "--devices",
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
# verbs that other tools have, and what serves in their place
_LOOK = "`ddplaunch doctor` examines this machine, `ddplaunch plan train.py` shows what would be started"
_SERVES = {
    **dict.fromkeys(("info", "env", "test", "devices", "gpu", "gpus", "health", "diagnose"), _LOOK),
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
_SBATCH = frozenset({
    "--partition", "--account", "--qos", "--mem", "--gres", "--constraint", "--nodelist", "--job-name", "-A", "-C", "-J",
})  # fmt: skip
# no training script has these by chance
_OURS_ALONE = frozenset({
    "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "hosts", "hostfile", "max-restarts", "standalone",
    "gpus-per-worker", "workers-per-gpu", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "grace-period",
    "cpu-bind", "no-python", "live", "simulate", "chaos", "spares", "keep-warm", "mps", "health-check", "restart-on",
    "max-no-progress", "hang-timeout", "heartbeat-timeout", "straggler-check", "requeue-on", "max-requeues", "notice-file",
    "notice-command", "stop-file", "debug-on-error", "debugpy", "avoid-bad-nodes", "numa-binding", "shutdown-timeout",
    "wrap-ranks",
})  # fmt: skip


def written_out(argument: str, following: str) -> str:
    """Complete the beginning of a flag of torchrun's as its parser does, if no other flag begins so.

    `argument` is no option, `following` the next argument.
    """
    typed, equals, value = argument.partition("=")
    name = typed.replace("_", "-")
    if meant := _of_others(name, value if equals else following):
        whole = meant + equals + value if meant == f"-{name}" else meant
        raise LaunchError(f"{typed} is not an option", hint=f"did you mean `{whole}`?")
    found = [option for option in OPTIONS if option.flag.startswith(name)] if name.startswith("--") else []
    if len(found) != 1 or not (found[0].pet or found[0].torchruns):
        return argument
    return found[0].flag + equals + value


def _of_others(name: str, value: str) -> str | None:
    """Return what to type in place of another launcher's flag, or of a flag that lacks a dash; "" if nothing is known."""
    if name.startswith("-") and BY_NAME.get(name[1:].replace("-", "_")):
        return f"-{name}"  # with one dash
    counts = value.isdecimal()
    match name:
        case "--gpus" | "-g" if value and not counts:
            return f"--devices {value}"
        case "--gpus" | "-g" | "-j" | "-w" | "-p" if counts:
            return f"--nproc-per-node {value}"
        case "-j" if all(part.isdecimal() for part in value.split("x")) and value.count("x") == 1:
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
    """Return what is wrong with an option of a job, and what to type instead."""
    match error:
        case click.NoSuchOption(option_name=name):
            return _no_option(name, argv)
        case click.BadOptionUsage(option_name=name):
            option = FLAGS.get(name)
            if option is None or option.is_flag:
                return LaunchError(f"{name} takes no value", hint=f"type `{name}`")
            return LaunchError(f"{name} needs a value", hint=f"type for example `{name} {option.example}`")
    return LaunchError(error.format_message())


def _no_option(name: str, argv: Sequence[str]) -> LaunchError:
    """Return the error for a word that looks like an option and is none, with what was probably meant."""
    at = next((at for at, word in enumerate(argv) if word.startswith(name)), None)
    if at is None:  # typed with _
        at = next((at for at, word in enumerate(argv) if flag_of(word).startswith(name)), 0)
    typed = name if name.startswith("--") else argv[at]
    if wrong := not_typed(argv[at], argv[:at], argv[at + 1 :]):
        return wrong
    words = argv[at].split()
    if len(words) > 1 and argv[at].startswith("-"):
        return LaunchError(
            f"'{argv[at]}' is one word to the shell", hint=f"without the quotes: type `{' '.join(words)}`"
        )
    if why := _NEEDLESS.get(flag_of(typed).lstrip("-").lower()):
        return LaunchError(f"{name} is not an option", hint=f"leave it out: {why}")
    flag, equals, _ = argv[at].partition("=")
    if flag in _SBATCH:
        end = at + (1 if equals else 2)
        whole = shlex.join(["ddplaunch", "submit", *argv[at:end], "--", *argv[:at], *argv[end:]])
        return LaunchError(f"{name} is not an option", hint=f"sbatch has it: type `{whole}`")
    if typed[1:].isdecimal():
        return LaunchError(f"{typed} is not an option", hint=_type(argv[:at], [_NUMBER, typed[1:], *argv[at + 1 :]]))
    if typed == "-c":
        return LaunchError("-c is not an option: workers run a file", hint="write the code to a file, and name that")
    bare = flag_of(typed).lstrip("-").lower()
    meant = _WORDS_FOR.get(bare)
    if meant is None:
        known = [flag[2:] for flag, one in FLAGS.items() if flag.startswith("--") and (not one or one.flag == flag)]
        close = did_you_mean(bare, [*known, "json"], cutoff=0.7)
        meant = close and f"--{close}"
    if meant and "ddplaunch" in meant:  # a command of its own, with the rest of the line
        return LaunchError(
            f"{name} is not an option", hint=f"type `{meant} {shlex.join([*argv[:at], *argv[at + 1 :]])}`"
        )
    order = "options of the script come after it: ddplaunch [OPTIONS] SCRIPT [ARGS]..."
    return LaunchError(f"{name} is not an option", hint=f"did you mean `{meant}`?" if meant else order)


def in_place_of(before: Sequence[str], program: Sequence[str]) -> LaunchError | None:
    """Return the error for a SCRIPT that is probably meant as something else, such as a launcher, a number or a URL; else None.

    `before` are the words before the script, the verb `plan` among them.
    """
    target, *rest = program
    name = os.path.basename(target)
    if name.startswith("python") and PYTHON.fullmatch(name):
        return LaunchError(
            f"{target} is no script: ddplaunch starts python itself", hint=_type(before, _of_python(rest))
        )
    if os.path.lexists(target):
        return None
    if error := _of_program(before, target, rest) or _of_optional(before, program):
        return error
    if "--" + flag_of(target) in FLAGS:
        option = FLAGS["--" + flag_of(target)]
        is_alone = "=" not in target and (not rest or os.path.isfile(rest[0]))
        lacks_value = option is not None and not option.is_flag and is_alone
        meant = [f"--{target}", option.example] if option is not None and lacks_value else [f"--{target}"]
        return LaunchError(
            f"{target} is no script, but an option without its dashes", hint=_type([*before, *meant], rest)
        )
    if _ASSIGNMENT.fullmatch(target):
        return _of_assignment(before, program)
    if target not in VERBS and (meant := _of_split_value(before, program)):
        return LaunchError(f"{target} does not exist", hint=_type([], meant, "a value is one word: "))
    if target.isdecimal():
        return LaunchError(f"{target} is a number, not a script", hint=_type([*before, _NUMBER, target], rest))
    if _NUMERAL.fullmatch(target):
        return LaunchError(f"{target} is a number, not a script", hint=_type(before, rest))
    if error := not_typed(target, before, rest):
        return error
    words = target.split()
    if len(words) > 1 and (words[0].startswith("-") or os.path.isfile(words[0]) or words[0] in ("python", "ddplaunch")):
        unquoted = words[1:] if words[0] in ("python", "ddplaunch") else words
        return LaunchError(
            f"{shlex.quote(target)} is one word to the shell",
            hint=_type(before, [*unquoted, *rest], "without the quotes: "),
        )
    return _not_there(before, program)


def _of_program(before: Sequence[str], target: str, rest: Sequence[str]) -> LaunchError | None:
    """Return the error for a SCRIPT that is another launcher, a command that runs others, a verb, or a URL; else None."""
    if target in LAUNCHERS:
        return _of_launcher(target, before, target, rest)
    if target in _IN_FRONT and (at := first_script(rest)) is not None:
        words = [word for word in rest[:at] if not PYTHON.fullmatch(word)]
        whole = shlex.join([target, *words, "ddplaunch", *before, *rest[at:]])
        return LaunchError(f"{target} is a command that runs others, not a script", hint=f"type `{whole}`")
    if target in _SERVES and "." not in "".join(rest[:1]):
        return LaunchError(f"{target} is no verb of ddplaunch", hint=_SERVES[target])
    if re.match(r"\w+://", target):
        return LaunchError(
            f"{target} is a URL, not a file",
            hint=_type(before, [os.path.basename(target) or "train.py", *rest], "fetch it first, then "),
        )
    return None


def _of_assignment(before: Sequence[str], program: Sequence[str]) -> LaunchError:
    """Return the error for NAME=VALUE in place of the script: a variable if NAME has capitals, else the script's argument."""
    target, *rest = program
    assigned = [target, *takewhile(_ASSIGNMENT.fullmatch, rest)]
    behind = rest[len(assigned) - 1 :]
    if not target.partition("=")[0].isupper():
        hint = _type(before, [*behind[:1], *assigned, *behind[1:]] if behind else [])
        return LaunchError(f"{target} is not a script; its arguments come after it", hint=hint)
    env = [word for variable in assigned for word in ("--env", variable)]
    return LaunchError(f"{target} is a variable, not a script", hint=_type([*before, *env], behind))


def _not_there(before: Sequence[str], program: Sequence[str]) -> LaunchError | None:
    """Return the error for a script that does not exist: half of a name with a blank, a verb, or a word before the script."""
    target, *rest = program
    missing = f"{target} does not exist"
    for end in range(2, len(program) + 1):
        if os.path.isfile(" ".join(program[:end])):
            whole = [" ".join(program[:end]), *program[end:]]
            return LaunchError(missing, hint=_type(before, whole, "a name with a blank in it is quoted: "))
    if verb := verb_meant(target):
        late = [word for word in before if word not in VERBS]
        hint = f"did you mean `ddplaunch {verb} ...`?"
        if late:
            options = before if verb == "plan" else ()  # those of a job, which no other verb has
            hint = _type((), [verb, *options, *rest], "a verb comes first: ")
        return LaunchError(missing, hint=hint)
    is_word = target.isidentifier() and (not os.path.lexists(f"{target}.py") or rest[:1] == [f"{target}.py"])
    if is_word and rest and (flag_of(rest[0]) in FLAGS or (rest[0].endswith(".py") and os.path.isfile(rest[0]))):
        return LaunchError(f"{target} is neither a verb of ddplaunch nor a script", hint=_type(before, rest))
    return None


def _of_optional(before: Sequence[str], program: Sequence[str]) -> LaunchError | None:
    """Return the error for a word that was meant as the optional value of the option before; None if it was not."""
    target, *rest = program
    option = FLAGS.get(before[-1].replace("_", "-")) if before else None
    if option is None or option.optional is None or target.endswith(".py") or not any(map(os.path.isfile, rest[:1])):
        return None
    try:
        option.parse(target)
    except BadValue as error:
        why = error
    else:
        return None
    numbers = re.findall(r"\d+", target)
    if option.name == "simulate" and target.isdecimal():
        meant = [before[-1], "--nnodes", target]
    elif option.name == "debug" and len(numbers) > 1:  # one terminal is not for two debuggers
        is_range = re.fullmatch(r"\d+-\d+", target)
        meant = ["--debugpy", target if is_range else ",".join(numbers)]
    elif len(numbers) == 1 and not option.choices:
        meant = [before[-1], numbers[0]]
    else:
        meant = [before[-1], did_you_mean(target.lower(), option.choices) or option.example]
    return LaunchError(f"{before[-1]} {target}: {why}", hint=_type([*before[:-1], *meant], rest))


def launcher_as_module(before: Sequence[str], program: Sequence[str]) -> LaunchError | None:
    """Return the error for -m with the module of another launcher; None: it is none."""
    target, *rest = program
    ours = [word for word in before if word not in ("-m", "--module")]
    return _of_launcher(f"-m {target}", ours, target, rest) if target in LAUNCHERS else None


def _of_launcher(typed: str, before: Sequence[str], launcher: str, words: Sequence[str]) -> LaunchError:
    """Return the error for another launcher, as it was typed, and the words behind it."""
    meant, lost = of_launcher(launcher, words)
    left_out = f", which leaves out {' '.join(lost)}" if lost and meant else ""
    hint = _type(before, meant) + left_out
    return LaunchError(f"{typed} is a launcher as ddplaunch is: one of them is enough", hint=hint)


def no_help(word: str) -> LaunchError:
    """Return the error for `help` with a word that is no verb."""
    if verb := verb_meant(word):
        return LaunchError(f"{word} is no verb of ddplaunch", hint=f"did you mean `ddplaunch help {verb.split()[0]}`?")
    flags = [option.flag for option in OPTIONS if word.strip("-").replace("_", "-") in option.key]
    about = f"`ddplaunch --help-all` has {some(flags, 3)}" if flags else f"`ddplaunch help VERB`, of {', '.join(VERBS)}"
    return LaunchError(f"{word} is no verb of ddplaunch", hint=about)


def apart(flag: str, value: str, following: str) -> LaunchError:
    """Return the error for a value with blanks around its =."""
    whole = value.removeprefix("=") or following
    return LaunchError(f"{flag} {value}: a value has no blanks around its =", hint=f"type `{flag} {whole or 'VALUE'}`")


def not_typed(word: str, before: Sequence[str], rest: Sequence[str]) -> LaunchError | None:
    """Return the error for a word with the dashes and quotes of a text processor; None: it has none."""
    body, plain = word.lstrip(_DASHES + "-") or word, word.translate(_QUOTES)
    if body != word and any(dash in word[: -len(body)] for dash in _DASHES):
        plain = ("--" if len(body.partition("=")[0]) > 1 else "-") + body.translate(_QUOTES)
    if plain == word:
        return None
    foreign = next(character for character in word if character in _DASHES or ord(character) in _QUOTES)
    return LaunchError(
        f"{word} contains U+{ord(foreign):04X} ({unicodedata.name(foreign).lower()}), as text processors write it",
        hint=_type(before, [plain, *rest]),
    )


def verb_meant(word: str) -> str | None:
    """Return the verb that was probably meant by a word that is no file."""
    return None if "." in word or "/" in word else _VERBS_FOR.get(word) or did_you_mean(word, VERBS, cutoff=0.75)


def behind_script(program: Sequence[str], before: Sequence[str], forms: Sequence[str] = ()) -> str | None:
    """Return a note on options of ours that the script gets, unless the script's text has them, too; None for none.

    `forms` are the flags of the verb.
    """
    text = text_of(program[0])
    if text is None:
        return None
    ours = _OURS_ALONE.union(form.removeprefix("--") for form in forms)
    moved, left, names = list[str](), list[str](), list[str]()
    words = list(program[1:])
    while words:
        word = words.pop(0)
        name = flag_of(word)
        is_scripts = name[2:] in text or name[2:].replace("-", "_") in text
        if not word.startswith("--") or name[2:] not in ours or is_scripts:
            left.append(word)
            continue
        names.append(name)
        moved.append(word)
        option = FLAGS.get(name)
        takes_value = name not in forms and (option is None or not option.is_flag)
        if takes_value and "=" not in word and words and not words[0].startswith("-"):
            moved.append(words.pop(0))
    if not names:
        return None
    what = (
        f"{names[0]} after {program[0]} is an option"
        if len(names) == 1
        else f"{some(names)} after {program[0]} are options"
    )
    meant = shlex.join(["ddplaunch", *before, *moved, program[0], *left])
    return f"{what} of the script; for ddplaunch type `{meant}`"


def _of_split_value(before: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the command line that was meant if spaces split a value, so that its rest stands for SCRIPT; else [].

    `--preload torch numpy train.py` gives `--preload torch,numpy train.py`, `--timeout 5 m train.py` `--timeout 5m train.py`.
    """
    option = FLAGS.get(flag_of(before[-2])) if len(before) > 1 else None
    at = next((at for at, word in enumerate(program) if word.startswith("-") or os.path.isfile(word)), 0)
    if option is None or option.is_flag or not at or program[at].startswith("-"):
        return []
    if option.listed:
        value = ",".join(word.strip(",") for word in (before[-1], *program[:at]))
    elif option.metavar == "TIME" and before[-1].isdecimal() and program[0][0] in "smhd":
        value = before[-1] + program[0][0]
    else:
        return []
    return [*before[:-1], value, *program[at:]]


def _of_python(words: Sequence[str]) -> list[str]:
    """Return the words behind `python` as ddplaunch takes them: without Python's own options."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        if words[at].startswith("-m"):
            module = words[at][2:] or "".join(words[at + 1 : at + 2])
            rest = list(words[at + (1 if words[at][2:] else 2) :])
            return of_launcher(module, rest)[0] if module in LAUNCHERS else ["-m", module, *rest]
        if words[at] == "-c":
            return []
        at += 2 if words[at] in ("-W", "-X") else 1
    return list(words[at:])


def _type(before: Sequence[str], meant: Sequence[str], how: str = "") -> str:
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
