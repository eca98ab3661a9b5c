"""Histories of signals to stop, and which of them are a second request; no process, no clock.

`1 INT!` is SIGINT after a second, by a keyboard; `1 INT?` the same, on a terminal whose keyboard is not stdin.
"""

from __future__ import annotations

from signal import Signals

import pytest

from ddplaunch.reach.repeated_stop import ECHO_WINDOW, SAME_REQUEST, Meaning, StopRequests, Typed

TYPED = {"!": Typed.YES, "?": Typed.PERHAPS}


def meanings(history: str, sent_again: frozenset[int] = frozenset(), lasts: float = 90.0) -> str:
    """Return what each signal of a history means, a word each."""
    requests, found = StopRequests(sent_again, lasts=lasts), []
    for came in history.split(", "):
        at, name = came.split()
        typed = TYPED.get(name[-1], Typed.NO)
        found.append(requests.take(Signals[f"SIG{name.rstrip('!?')}"], float(at), typed).name)
    return " ".join(found).replace("INSISTS", "KILLS")


SENDERS = {
    "uv passes on a SIGINT that the group has had": ("0 INT, 0.2 INT", "FIRST SAME"),
    "uv passes on a SIGTERM at once": ("0 TERM, 0.01 TERM", "FIRST DUPLICATE"),
    "timeout sends the same twice at once, and again": ("0 TERM, 0.001 TERM, 6 TERM", "FIRST DUPLICATE KILLS"),
    "an entry point with a trap": ("0 TERM, 0.15 TERM", "FIRST SAME"),
    "LSF's bkill": ("0 INT, 10 TERM", "FIRST SAME"),
    "LSF's bkill of uv run": ("0 INT, 0.2 INT, 10 TERM, 10.2 TERM", "FIRST SAME SAME SAME"),
    "a runner of GitHub": ("0 INT, 7.5 TERM", "FIRST SAME"),
    "a terminal that is closed": ("0 HUP, 0.1 HUP, 0.2 HUP, 1 TERM, 1 HUP", "FIRST SAME SAME SAME SAME"),
    "systemd ends a session": ("0 TERM, 0 HUP", "FIRST SAME"),
    "Ctrl-C of uv run with another stdin": ("0 INT?, 0.2 INT", "FIRST SAME"),
    "the same on the terminal itself": ("0 INT?, 0.2 INT?", "FIRST SAME"),
}


@pytest.mark.parametrize(("history", "found"), SENDERS.values(), ids=SENDERS)
def test_a_sender_that_asks_twice_by_itself_makes_one_request(history, found):
    assert meanings(history) == found


INSISTENT = {
    "SIGQUIT": ("0 TERM, 0.3 QUIT", "FIRST KILLS"),
    "SIGQUIT as the first, too": ("0 QUIT, 0.3 QUIT", "FIRST KILLS"),
    "a third": ("0 TERM, 0.3 TERM, 0.6 TERM", "FIRST SAME KILLS"),
    "a slow third": ("0 TERM, 3 TERM, 4 TERM", "FIRST SAME KILLS"),
    "a third that is the first signal again": ("0 INT, 1 TERM, 2 INT", "FIRST SAME KILLS"),
    "a third that is the second signal again": ("0 INT, 3 TERM, 4 TERM", "FIRST SAME KILLS"),
    "the same signal much later": ("0 TERM, 6 TERM", "FIRST KILLS"),
    "a second Ctrl-C": ("0 INT!, 0.3 INT!", "FIRST KILLS"),
    "a second Ctrl-C, stdin being a pipe": ("0 INT?, 1 INT?", "FIRST KILLS"),
    "Ctrl-C after a program has sent SIGINT": ("0 INT, 1 INT!", "FIRST KILLS"),
    "a signal of the user's own that stops": ("0 TERM, 1 USR1", "FIRST KILLS"),
}


@pytest.mark.parametrize(("history", "found"), INSISTENT.values(), ids=INSISTENT)
def test_who_insists_has_the_workers_killed(history, found):
    assert meanings(history) == found


def test_on_a_terminal_the_second_signal_may_still_be_sent_by_a_program():
    assert meanings("0 INT!, 1 TERM, 2 INT!") == "FIRST SAME KILLS"
    assert meanings("0 TERM, 1 INT!, 2 INT!") == "FIRST SAME KILLS"


def test_slurm_sends_sigterm_at_the_start_of_the_grace_time_and_at_its_end():
    slurm = frozenset({Signals.SIGTERM})
    assert meanings("0 TERM, 60 TERM, 61 TERM", slurm) == "FIRST SAME SAME"
    assert meanings("0 TERM, 60 TERM, 61 INT, 62 INT", slurm) == "FIRST SAME SAME KILLS"
    assert meanings("0 TERM!, 60 TERM!", slurm) == "FIRST KILLS"  # `ddplaunch stop` where SIGINT is ignored


def test_the_windows_begin_with_the_signal_that_is_repeated():
    assert meanings(f"0 INT, 4 TERM, {4 + SAME_REQUEST} TERM") == "FIRST SAME KILLS"
    assert meanings(f"0 TERM, {SAME_REQUEST - 0.1} TERM") == "FIRST SAME"
    assert (
        meanings(f"0 TERM, {ECHO_WINDOW} TERM, 1 INT") == "FIRST SAME KILLS"
    )  # the second is no echo, so this is the third


def test_a_signal_after_the_time_that_a_stop_takes_begins_anew():
    """As when Ctrl-C went to a debugger before."""
    assert meanings("0 INT!, 1 INT!, 95 TERM, 95.3 TERM") == "FIRST KILLS FIRST SAME"


def test_who_sends_without_a_pause_is_heard_in_the_end():
    many = ", ".join(f"{tenth / 100} TERM" for tenth in range(25))
    assert "KILLS" in meanings(many)
    assert Meaning.FIRST.name == meanings(many).split()[0]
