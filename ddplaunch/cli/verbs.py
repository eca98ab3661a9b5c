"""The verbs, what each is for, and the options that are not those of a job. Data only."""

from __future__ import annotations

VERBS = {
    "run": "Start a job; may be left out.",
    "plan": "Show what would be started, and why; start nothing.",
    "submit": "Queue the job in Slurm.",
    "ps": "Show your running jobs and their workers.",
    "logs": "Show what the workers of a run write, or have written.",
    "stacks": "Show where the workers of a running job are, and who waits for whom.",
    "attach": "Open a debugger in a worker of a running job.",
    "stop": "Stop a running job as Ctrl-C does, and wait for its end.",
    "warm": "Show what --keep-warm keeps, or end it.",
    "shim": "Write a torchrun that is ddplaunch into a folder.",
    "completion": "Print what completes our options in a shell.",
}
FORMS = (("json", "The plan as JSON."), ("sh", "The commands and variables of each worker, to paste into a shell."))
SUBMIT_OPTIONS = (
    ("--print", "Shows the script and submits nothing. Needs no Slurm."),
    (
        "--wait",
        "Waits until the job ends, reports its states, and exits with its status; of an array, with the worst.",
    ),
    ("--follow", "Shows the output of the job as it comes, too. Ctrl-C ends the waiting, not the job."),
    ("--parsable", "Prints the number of the job and nothing else."),
)
# of the verbs that look into runs: names, the name of the value ("": a flag), help
RUN_OPTIONS: dict[str, tuple[tuple[tuple[str, ...], str, str], ...]] = {
    "ps": ((("--json",), "", "All that is known, as JSON."),),
    "logs": (
        (("-r", "--ranks"), "LIST", "Of these ranks only, as 3 or 0-2,4."),
        (("-f", "--follow"), "", "Shows what is written from now on, too, until the run ends."),
        (("--grep",), "RE", "Lines only in which this is found, a regular expression of Python's."),
        (
            ("--since",),
            "TIME",
            "Since 5m ago, 14:05 (yesterday's if that is to come) or 2026-11-22T14:05; up to 10 s more, in long runs longer.",
        ),
    ),
    "stacks": (
        (("-r", "--ranks"), "LIST", "Of these ranks only, as 3 or 0-2,4."),
        (("--threads",), "", "All threads, not only the main ones."),
        (("--native",), "", "With frames of C, by py-spy."),
        (("--json",), "", "All that is known, as JSON."),
    ),
    "attach": ((("-r", "--rank"), "RANK", "The rank to debug; may be left out where there is one."),),
    "stop": (),
    "warm": ((("--stop",), "", "Ends it: at once, or when the runs that use it have ended."),),
}
NAMES_NO_RUN = ("ps", "warm")
ABOUT = (
    (("-h", "--help"), "The options used most."),
    (("--help-all",), "All options."),
    (("-V", "--version"), "The version."),
)
