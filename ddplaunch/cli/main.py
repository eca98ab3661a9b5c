"""The entry point: arguments to a JobSpec, a call, its output, and the exit status. Decides nothing about the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddplaunch import __version__
from ddplaunch.cli import parser
from ddplaunch.cli.parser import FLAGS, NoSuchOption, WrongValue
from ddplaunch.cli.verbs import RUN_OPTIONS, VERBS
from ddplaunch.devices import interpreter
from ddplaunch.errors import LaunchError, below, coloured, not_imported, visible, why_failed, write_stderr
from ddplaunch.exitcodes import BUG, NOT_WRITTEN, OK, USAGE, of_signal
from ddplaunch.options import sources
from ddplaunch.options.resolve import job_spec
from ddplaunch.options.table import SHELLS
from ddplaunch.output.streams import use_colour
from ddplaunch.process.program import check, working_directory
from ddplaunch.spec import JobSpec, ProgramKind

_SIGPIPE = 13  # the status 141 is what a shell shows for any program whose reader went away


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give the exit status; `argv` is without the name of the command."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(argv, dict(os.environ))
    except LaunchError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - whatever else it is, it is a bug of ours
        # what is not needed in each run is imported where it is; what Python itself lacks is no matter of our files
        if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] in sys.stdlib_module_names:
            sys.excepthook(*sys.exc_info())
            write_stderr(f"error: this is a bug in ddplaunch {__version__}; please report it with the lines above\n")
            return BUG
        failure = not_imported(error)
    text = failure.render()
    write_stderr(coloured(text) if use_colour(os.environ, os.isatty(2)) else text)
    return failure.status


def parse(verb: str, argv: Sequence[str]) -> Mapping[str, Any]:
    """Parse arguments into values of options, by name, and "program": SCRIPT and its arguments. Converts no value.

    Raises:
        LaunchError: an argument is no option, or a value is missing.
    """
    try:
        return parser.parse(verb, argv)
    except NoSuchOption as error:
        if verb in RUN_OPTIONS:
            from ddplaunch.cli import run_verbs

            raise run_verbs.wrong(verb, error) from None
        raise _as_launch_error(error, argv) from None


def resolve(parsed: Mapping[str, Any], env: Mapping[str, str], folder: str | None) -> JobSpec:
    """Merge flags, variables and the files found from `folder` upward into the job.

    Raises:
        LaunchError: something in them is wrong.
    """
    given = [*sources.from_command_line(parsed), *sources.from_variables(env)]
    found, remarks = sources.from_files(folder) if folder is not None else ([], [])
    return job_spec([*given, *found], parsed["program"], remarks)


def _main(argv: list[str], env: Mapping[str, str]) -> int:
    if instruction := env.get("_DDPLAUNCH_COMPLETE"):
        from ddplaunch.cli import completion  # only for a shell that completes

        return _print(completion.answer(instruction))
    if not argv:
        from ddplaunch.cli import help_text  # its texts are of no use to a job

        write_stderr(help_text.alone(colour=use_colour(env, os.isatty(2))))
        return USAGE
    argv = _asked_in_words(argv)
    # only the first argument can be a verb, so that a script may have any name
    verb = argv.pop(0) if argv[0] in VERBS else "run"
    if verb == "submit":
        return _submit(argv, env)
    parsed = parse(verb, argv)
    for name in parsed:
        if name in ("help", "help_all", "version"):
            return _about(verb, name, env)
    if verb == "completion":
        return _completion(parsed["program"], env)
    if verb == "shim":
        from ddplaunch.cli import shim  # no other verb needs it

        if len(parsed["program"]) != 1:
            what = "takes one FOLDER" if parsed["program"] else "needs a FOLDER to write torchrun into"
            raise LaunchError(f"ddplaunch shim {what}", hint="type `ddplaunch shim ~/torchrun-shim`")
        return _print(shim.make(parsed["program"][0]))
    if verb in RUN_OPTIONS:
        from ddplaunch.cli import run_verbs

        return run_verbs.call(verb, parsed, env, _print, write_stderr)
    if shell := parsed.get("print_completion"):
        return _completion((shell,), env)
    if not parsed["program"] and len(argv) > 1 and argv[-1].endswith(".py"):
        raise LaunchError(
            f"there is no SCRIPT to run: {argv[-1]} is the value of {argv[-2]}",
            hint="type the value of the option first, then the script",
        )
    spec = interpreter.chosen(resolve(parsed, env, working_directory()), env)
    before = argv[: parser.words_before(argv, parsed["program"])]
    _check(spec, env, before)
    for note in _notes(spec, env, before):
        write_stderr(visible(f"note: {below(note)}\n"))
    # the launcher is heavier than the parser: neither --help nor a mistake needs it
    from ddplaunch.launcher import dispatch

    if verb == "run":
        return dispatch.run(spec, env)
    if "json" in parsed and "sh" in parsed:
        raise LaunchError("--json and --sh do not go together", hint="leave one out")
    return _print(dispatch.show_plan(spec, env, "json" if "json" in parsed else "sh" if "sh" in parsed else "table"))


def _about(verb: str, what: str, env: Mapping[str, str]) -> int:
    """Print the help of a verb, short or in full, or the version."""
    if what == "version":
        return _print(f"ddplaunch {__version__}")
    from ddplaunch.cli import help_text  # its texts are of no use to a job

    return _print(help_text.of(verb, full=what == "help_all", colour=use_colour(env, os.isatty(1))))


def _asked_in_words(argv: list[str]) -> list[str]:
    """`help`, `help plan` and `version` as the options that they stand for; all else as it is."""
    match argv:
        case ["help", verb, *_] if verb in VERBS:
            return [verb, "--help"]
        case ["help", *_]:
            return ["--help"]
        case ["version"]:
            return ["--version"]
    return argv


def _check(spec: JobSpec, env: Mapping[str, str], before: Sequence[str]) -> None:
    """Check the program; `before` are the words before it."""
    target, args = spec.program.target, spec.program.args
    if spec.program.kind is ProgramKind.SCRIPT:
        missing = not os.path.lexists(target)
        if missing or os.path.basename(target).startswith("python"):
            from ddplaunch.cli import mistakes  # most people name a script

            if error := mistakes.in_place_of(before, (target, *args), FLAGS):
                raise error
            if missing and (verb := mistakes.verb_meant(target, tuple(VERBS))):
                meant = (
                    f"a verb comes first: `ddplaunch {verb} ...`" if before else f"did you mean `ddplaunch {verb} ...`?"
                )
                raise LaunchError(f"{target} does not exist", hint=meant)
    check(spec.program, {**env, **dict(spec.env)}.get("PATH"))
    if spec.token_file is not None and not os.path.exists(spec.token_file):
        raise LaunchError(f"{spec.asked('token_file', spec.token_file)}: no such file or directory")


def _notes(spec: JobSpec, env: Mapping[str, str], before: Sequence[str]) -> Iterator[str]:
    """What is no error, and yet hardly meant."""
    if spec.verbosity < 0:
        return
    yield from sources.unknown_variables(env)
    if spec.simulate and spec.nnodes[1] == 1 and not spec.origin("nnodes").startswith("-"):
        yield f"{spec.origin('simulate')} has one node; for two type `--nnodes 2` as well"
    if any(word.startswith("--") and word.partition("=")[0].replace("_", "-") in FLAGS for word in spec.program.args):
        from ddplaunch.cli import mistakes

        if note := mistakes.behind_script((spec.program.target, *spec.program.args), before):
            yield note


def _submit(argv: list[str], env: Mapping[str, str]) -> int:
    from ddplaunch.slurm import submit  # no other verb needs it

    request = submit.split(argv)
    if request.help or request.version:
        return _about("submit", "help" if request.help else "version", env)

    def parse_job(job: Sequence[str], job_env: Mapping[str, str]) -> tuple[int, JobSpec]:
        parsed = parse("run", job)
        return len(job) - parser.words_before(job, parsed["program"]), resolve(parsed, job_env, working_directory())

    made = submit.draft(request, env, _own_command(), parse_job, tuple(VERBS))
    return _print(made.script) if request.print else submit.send(made, request, env, _print)


def _own_command() -> list[str]:
    """The command that starts ddplaunch in a job: the one that was typed if that was ddplaunch, else our interpreter."""
    typed = sys.argv[0]
    if os.path.basename(typed) == "ddplaunch" and os.path.isfile(typed):
        return [os.path.abspath(typed)]
    return [sys.executable, "-P", "-m", "ddplaunch"]  # -P: not a ddplaunch.py that lies where the job runs


def _completion(shells: Sequence[str], env: Mapping[str, str]) -> int:
    from ddplaunch.cli import completion

    shell = shells[0] if shells else os.path.basename(env.get("SHELL", ""))
    if len(shells) > 1 or shell not in SHELLS:
        raise LaunchError(
            f"completion {' '.join(shells)}: expected bash, zsh, fish or tcsh"
            if shells
            else "SHELL is not bash, zsh, fish or tcsh",
            hint="type `ddplaunch completion bash`, zsh, fish or tcsh",
        )
    return _print(completion.script(shell))


def _as_launch_error(error: NoSuchOption, argv: Sequence[str]) -> LaunchError:
    name = error.name
    if isinstance(error, WrongValue):
        option = FLAGS.get(name)
        if option is None or option.is_flag:
            return LaunchError(f"{name} takes no value", hint=f"type `{name}`")
        return LaunchError(f"{name} needs a value", hint=f"type for example `{name} {option.example}`")
    from ddplaunch.cli import mistakes

    at = next((at for at, each in enumerate(argv) if each.startswith(name)), 0)
    typed = name if name.startswith("--") else argv[at]
    if wrong := mistakes.not_typed(argv[at], argv[:at], argv[at + 1 :]):
        return wrong
    if words := mistakes.quoted_option(argv[at]):
        return LaunchError(f"'{argv[at]}' is one word to the shell", hint=f"without the quotes: type `{words}`")
    if why := mistakes.why_needless(typed.replace("_", "-")):
        return LaunchError(f"{name} is not an option", hint=f"leave it out: {why}")
    if whole := mistakes.of_sbatch(argv, at):
        return LaunchError(f"{name} is not an option", hint=f"sbatch has it: type `{whole}`")
    meant = mistakes.option_meant(typed.replace("_", "-"), FLAGS)
    order = "options of the script come after it: ddplaunch [OPTIONS] SCRIPT [ARGS]..."
    return LaunchError(f"{name} is not an option", hint=f"did you mean `{meant}`?" if meant else order)


def _print(text: str) -> int:
    """Write to stdout and give the exit status."""
    if sys.stdout is None:  # closed by the caller
        return OK
    try:
        # names of files that are not UTF-8 are written as they were read
        sys.stdout.buffer.write(f"{text.rstrip()}\n".encode(errors="surrogateescape"))
        sys.stdout.flush()
    except OSError as error:
        # what is left in the buffer would fail once more when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return of_signal(_SIGPIPE)
        raise LaunchError(f"cannot write to stdout: {why_failed(error)}", status=NOT_WRITTEN) from None
    return OK
