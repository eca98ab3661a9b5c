"""How far a worker is: what its script writes is what its agent reads, and nothing else is believed."""

import json
import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.record.window.questions import Answered, NodeStatus, WorkerStatus
from ddplaunch.record.window.requests import encode
from ddplaunch.spec import error_file
from ddplaunch.spec.error_file import ErrorFiles, parse_progress, progress_of_bar
from ddplaunch.system.fields import decoder
from ddplaunch.worker import progress as of_worker


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Error files of this process as rank 3 of generation 1."""
    monkeypatch.setattr(error_file, "_SHM", str(tmp_path))
    monkeypatch.setattr(of_worker, "_file", None)
    made = ErrorFiles("run", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", made.path(1, 3))
    yield made
    made.remove()


def test_the_agent_reads_what_the_script_says_and_the_first_step_of_it(files):
    of_worker.progress(100, 1000, loss=0.75)
    of_worker.progress(101, 1000)
    told = files.progress(1, 3)
    assert told is not None
    assert (told.step, told.total, told.first_step, told.source) == (101, 1000, 100, "script")
    assert told.metrics == (("loss", "0.75"),)  # read at most five times a second
    assert 0 <= told.seconds < 60
    assert files.progress(1, 2) is None
    assert files.written(1) == set()  # it is no error file


def test_a_shorter_line_overwrites_a_longer_one_and_nan_arrives(files):
    of_worker.progress(10**9, 10**9, **{f"m{n}": 0.1 for n in range(40)})
    of_worker._file._converted_at = -math.inf
    of_worker.progress(1, loss=math.nan)
    told = files.progress(1, 3)
    assert (told.step, told.total, told.metrics) == (1, None, (("loss", "nan"),))


def test_a_forked_child_does_not_speak_for_its_worker(files):
    of_worker.progress(7)
    pid = os.fork()
    if pid == 0:
        of_worker.progress(1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert files.progress(1, 3).step == 7


@pytest.mark.parametrize("path", ["", "/nonexistent/ddplaunch-errors-x/0-0.json", "{tmp}/torchelastic_x/error.json"])
def test_without_ddplaunch_nothing_is_written(tmp_path, monkeypatch, path):
    (tmp_path / "torchelastic_x").mkdir()
    monkeypatch.setattr(of_worker, "_file", None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path.format(tmp=tmp_path))
    of_worker.progress(1, 2, loss=3)
    assert list((tmp_path / "torchelastic_x").iterdir()) == []


@pytest.mark.parametrize(("arguments", "error"), [((-1,), ValueError), ((1, -1), ValueError), ((1.5,), TypeError)])
def test_wrong_steps_are_an_error_also_without_ddplaunch(monkeypatch, arguments, error):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(of_worker, "_file", None)
    with pytest.raises(error):
        of_worker.progress(*arguments)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
LINES = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers() | JSON,
        "total": st.integers() | JSON,
        "at": st.floats() | JSON,
        "first": st.tuples(st.integers(), st.floats()) | JSON,
        "metrics": st.dictionaries(st.text(), st.floats() | JSON, max_size=20),
    },
)


@given(LINES.map(lambda line: json.dumps(line).encode()) | st.binary() | st.just(b"[" * 100_000))
def test_whatever_stands_in_the_file_the_answer_is_one_that_no_receiver_refuses(text):
    told = parse_progress(text, time.monotonic())
    worker = WorkerStatus(0, 0, 1, "cpu", "running", "", 1.0, 1.0, 1, None, progress=told)
    answer = Answered(1, NodeStatus((worker,)))
    assert decoder(Answered)(encode(answer)) == answer


@pytest.mark.parametrize(
    ("line", "expected"),
    {
        "tqdm": (" 10%|#         | 41/400 [00:04<00:36,  9.98it/s]", (41, 400)),
        "tqdm of lightning": ("Epoch 1:  50%|#####     | 5/10 [00:01<00:01, 4.9it/s, v_num=3]", (5, 10)),
        "commas": ("1,200/4,000 [", (1200, 4000)),
        "rich of lightning": ("Epoch 0/2 ━━━━╸━━━━━━  59/400 0:00:01 • 0:00:30 12.3it/s v_num: 3", (59, 400)),
        "rich": ("Working... ━━━━━━━━ 100% 400/400", (400, 400)),
        "rich without a count": ("Working... ━━━━╺━━━━  41% 0:00:02", None),
        "rich in bytes": ("model ━━━━╺━━━━ 4.1/9.8 MB", None),
        "a path": ("reading /data/1/2 [ok]", None),
        "a date": ("2026/11/24 [INFO] begins", None),
        "no bar": ("epoch 3/10 loss 0.1", None),
    }.values(),
)
def test_a_bar_says_how_far_a_worker_is(line, expected):
    shown = progress_of_bar(line, 1.0)
    assert (None if shown is None else (shown.step, shown.total)) == expected
    assert shown is None or shown.source == "bar"
