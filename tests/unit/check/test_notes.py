"""What is read of a checked rank's notes; that worker/check.py writes such ones, tests/torch/test_check.py shows."""

from pathlib import Path

from ddplaunch.spec.outcome import Frame
from ddplaunch.tools.check.notes import Trace, read_trace

STEP, SAVE = '["train.py",8,"step"]', '["train.py",9,"save"]'
CALL = '"operation":"barrier","group":"0","step":1'


def trace(tmp_path: Path, *lines: str) -> Trace:
    (tmp_path / "notes").write_text("\n".join(lines))
    return read_trace(str(tmp_path / "notes"), rank=0, world_size=4)


def test_a_stack_is_noted_once_and_found_by_its_number(tmp_path: Path) -> None:
    found = trace(
        tmp_path,
        '{"group":{"name":"0","members":"0-3"}}',
        f'{{"call":{{{CALL},"stack":0,"frames":[{STEP}]}}}}',
        f'{{"call":{{{CALL},"stack":0}}}}',
        '{"progress":{"steps":1}}',
        f'{{"progress":{{"steps":1,"end":"saves","stack":1,"frames":[{SAVE}]}}}}',
    )
    step, save = (Frame(file="train.py", line=line, function=name) for line, name in ((8, "step"), (9, "save")))
    assert [call.frames for call in found.calls] == [(step,), (step,)]
    assert (found.end, found.steps, found.frames) == ("saves", 1, (save,))
    assert found.groups["0"].members == (0, 1, 2, 3)


def test_a_line_that_is_no_note_is_left_out(tmp_path: Path) -> None:
    found = trace(
        tmp_path, "[" * 5000, '{"progress":{"steps":2}}', '{"progress":{"steps":9,"end":"bribed"}}', "{}", "\0"
    )
    assert (found.end, found.steps, found.calls) == ("ended", 2, ())
