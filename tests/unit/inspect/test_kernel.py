"""What /proc says of a process."""

from ddplaunch.launcher.look.stacks import call_name, parse_status

STATUS = b"Name:\tpython\nState:\tD (disk sleep)\nSigPnd:\t0000000000000000\nShdPnd:\t0400000000000000\n"
MASKS = b"SigBlk:\t0000000000000000\nSigIgn:\t0000000001001000\nSigCgt:\t0400000000000002\n"


def test_signals_that_are_caught_blocked_and_pending_are_told_apart():
    status = parse_status(STATUS + MASKS)
    assert status is not None
    assert status.state == "D"
    assert status.catches(59)
    assert not status.catches(58)
    assert status.has_pending(59)
    assert not status.blocks(59)


def test_a_process_without_signals_is_none():
    assert parse_status(STATUS) is None
    assert parse_status(b"") is None


def test_system_calls_have_names_and_what_is_none_has_not():
    assert call_name("0 0x3 0x7f 0x1 0x0 0x0 0x0 0x7ffc 0x7f", "x86_64") == "read"
    assert call_name("999 0x3", "x86_64") == "system call 999"
    assert call_name("running", "x86_64") == ""
    assert call_name("-1 0x0 0x0", "x86_64") == ""
    assert call_name("", "riscv64") == ""
