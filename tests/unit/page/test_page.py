"""The page of a run: what it holds, how large it gets, and that nothing of a worker becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ddplaunch.system.fields import clean
from ddplaunch.system.redaction import Redactor
from ddplaunch.tools.page.history import read
from ddplaunch.tools.page.page import page
from ddplaunch.tools.page.pictures import tag
from ddplaunch.tools.page.trace import about, entries
from tests.recorded import (
    BEGAN,
    ended,
    event,
    exited,
    generation,
    recorded,
    restarted,
    sampled,
    started,
    traced,
    worker,
)

EVIL = (
    "</pre></title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[31m\x1b]8;;http://x\x07\u202e"
)
OURS = {
    "html", "head", "meta", "title", "style", "body", "a", "header", "h1", "nav", "ul", "li", "main", "p", "strong", "section",
    "h2", "i", "div", "svg", "text", "g", "path", "rect", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th",
    "td", "pre", "code", "footer", "figure", "figcaption",
}  # fmt: skip


class Elements(HTMLParser):
    """The elements of a page, its attributes and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data += data


def page_of(folder: str) -> str:
    run = read(folder)
    assert run is not None
    return page(run, BEGAN + 100)


def plan(workers: int = 2, /, **variables: str) -> dict[str, Any]:
    rows = [
        {
            "rank": rank,
            "local_rank": rank,
            "host": "alpha",
            "device": "cpu",
            "argv": ["python", "train.py"],
            "variables": variables,
        }
        for rank in range(workers)
    ]
    return {"run_id": "20261124-120000-k7qx", "reasons": {"backend": EVIL}, "origins": {EVIL: "x"}, "workers": rows}


def failure(error: str) -> dict[str, Any]:
    first = {"rank": 1, "host": "alpha", "local_rank": 1, "how": "exit status 3", "error": error}
    return {"status": 3, "first_failure": first, "workers": [{"rank": 0, "peak_rss": 1 << 20, "cpu_seconds": 1.5}]}


def hostile(folder: Path) -> str:
    """A run in whose files everything is hostile that a worker or a host can choose."""
    events = [
        started(host=EVIL, program=EVIL), generation(0, 0), worker(0, 0), worker(0, 1),
        event(1, "worker_raised", rank=1, type=EVIL, message=EVIL), event(1, "notice", text=EVIL),
        event(2, "stop_sent", signal=15, name=EVIL, ranks=EVIL), exited(3, 0, 1, EVIL), exited(3, 1, 3, EVIL), ended(4, 3, EVIL),
    ]  # fmt: skip
    path = recorded(folder, *events, plan=plan(NAME=EVIL, **{EVIL: EVIL}), summary=failure(EVIL))
    (folder / "rank-1.out").write_text(f"{EVIL}\n" * 100)
    (folder / "rank-1.err").write_bytes(b"\xff\x00" + EVIL.encode())
    (folder / "errors/0").mkdir(parents=True)
    (folder / "errors/0/1.json").write_text(json.dumps({"message": {"extraInfo": {"py_callstack": EVIL}}}))
    (folder / "stacks").mkdir()
    (folder / "stacks/0.txt").write_text(EVIL)
    return path


def test_nothing_that_a_worker_says_becomes_markup(tmp_path: Path) -> None:
    text = page_of(hostile(tmp_path / "run"))
    found = Elements(text)
    assert set(found.tags) <= OURS
    assert not found.open
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "style")]
    assert all(value and value.startswith("#") for name, value in found.attributes if name == "href")
    assert not set("\x1b\u202e\x00\x07") & set(text)
    assert found.data.count("<script>alert(1)</script>") > 100


@settings(max_examples=200, deadline=None)
@given(some.text())
def test_any_text_is_one_text_in_an_element_and_in_an_attribute(text: str) -> None:
    found = Elements(tag("p", text, title=text))
    assert found.tags == ["p"]
    assert len(found.attributes) == 1
    assert found.data.replace("\r", "") == clean(text).replace("\r", "")


def test_the_page_forbids_scripts_and_requests(tmp_path: Path) -> None:
    text = page_of(restarted(tmp_path / "run"))
    assert 'http-equiv="Content-Security-Policy" content="default-src &#x27;none&#x27;;style-src' in text
    assert "<script" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_a_reader_without_eyes_finds_landmarks_headers_and_the_timeline_as_a_table(tmp_path: Path) -> None:
    text = page_of(restarted(tmp_path / "run", plan=plan(), summary=failure("ValueError: x")))
    found = Elements(text)
    assert {"header", "nav", "main", "footer", "caption"} <= set(found.tags)
    assert ("lang", "en") in found.attributes
    assert ("role", "img") in found.attributes
    assert found.tags.count("table") == found.tags.count("caption")
    assert {value for name, value in found.attributes if name == "scope"} == {"row", "col"}
    ids = {value for name, value in found.attributes if name == "id"}
    assert {value for name, value in found.attributes if name == "aria-labelledby"} <= ids
    assert {str(value)[1:] for name, value in found.attributes if name == "href"} <= ids
    assert "<td>1</td><td>exit status 3</td>" in text


def test_the_key_of_the_timeline_has_pale_bands_only_where_nothing_ran_for_a_time(tmp_path: Path) -> None:
    paused = [worker(0, 0), event(2, "job_suspended"), event(4, "job_resumed"), exited(5, 0), ended(5)]
    assert "pale bands nothing ran" in page_of(recorded(tmp_path / "paused", started(), generation(0, 0), *paused))
    assert "pale bands nothing ran" not in page_of(restarted(tmp_path / "run"))


def test_the_page_says_what_happened(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    text = page_of(restarted(folder, generations=3, plan=plan(), summary=failure("ValueError: bad batch")))
    for words in ("k7qx: train.py", "2 workers finished in 9 s", "2 restarts", "Rank 1 on alpha: ValueError: bad batch",
                  "SIGTERM to rank 0", "1 MiB", "rank 1: exit status 3"):  # fmt: skip
        assert words in text
    assert text.count('class="restart"') == 2


def test_restarts_have_the_exception_and_its_line_or_why_the_job_hung(tmp_path: Path) -> None:
    hung = "the job hangs: rank 1 has not reached all_reduce #4"
    events = [
        started(), generation(0, 0), worker(0, 0),
        exited(5, 0, 1, "exit status 1", error="KeyError: 'labels'", where="train.py:12"),
        event(6, "generation_failed", generation=0, rank=0, wait=0.0, text="rank 0 failed: KeyError: 'labels'"),
        generation(7, 1), event(8, "generation_failed", generation=1, rank=None, wait=0.0, text=hung), generation(9, 2),
    ]  # fmt: skip
    text = Elements(page_of(recorded(tmp_path / "run", *events))).data
    assert "rank 0: KeyError: 'labels', at train.py:12" in text
    assert text.count(hung) == 2  # among the restarts, and in what happened
    assert "not known" not in text.partition("Where the time went")[0].partition("What happened")[0]


def test_the_page_says_where_the_workers_were_and_how_the_job_ended(tmp_path: Path) -> None:
    where = ["rank 0 waits in all_reduce #4 of group 0", "  rank 1 has not reached it: it is in train.py:8"]
    summary = {"status": 130, "locations": where}
    outcome = "stopped by SIGINT (Ctrl-C) after 1 h; rank 1 has not reached all_reduce #4"
    signal = event(5, "signal_received", signal=2, name="SIGINT")
    events = [started(), generation(0, 0), worker(0, 0), signal, ended(6, 130, outcome)]
    run = recorded(tmp_path / "run", *events, summary=summary)
    text = Elements(page_of(run)).data
    assert all(line in text for line in where)
    assert text.count(outcome) == 2  # in the first line, and in what happened


def test_secrets_are_not_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    content = plan(HF_TOKEN="hush-1", AWS_SECRET_ACCESS_KEY="hush-2", OMP_NUM_THREADS="7")
    content["workers"][0]["argv"] = ["python", "train.py", "--api-key", "hush-3", "--wandb-token=hush-4", "--lr", "0.5"]
    text = page_of(restarted(folder, plan=content))
    assert "hush" not in text
    assert "<td>7</td>" in text
    assert "--lr 0.5" in text


def test_what_an_older_version_or_a_program_wrote_of_a_secret_is_not_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    raised = event(2.0, "worker_raised", rank=0, type="ValueError", message="password='hush-1' is wrong")
    recorded(
        folder, started(), generation(0, 0), raised, exited(0, 1), ended(5),
        summary={"v": 1, "first_failure": {"rank": 0, "local_rank": 0, "error": "ValueError: https://me:hush-2@host"}},
    )  # fmt: skip
    (folder / "rank-0.err").write_text("\x1b[31mlogin with hf_hushhushhushhush\x1b[0m\nexport API_KEY=hush-3\n")
    (folder / "errors" / "0").mkdir(parents=True)
    (folder / "errors" / "0" / "0.json").write_text(json.dumps({"message": {"message": "token = 'hush-4'"}}))
    redactor = Redactor(("known-hush",))
    run = read(str(folder), redactor=redactor)
    assert run is not None
    text = page(run, BEGAN, redactor)
    assert "hush" not in text
    assert f"{redactor.hidden} values hidden" in text
    assert "hush" not in str(traced(entries(run), about(run)))


def with_changes(folder: Path, **more: Any) -> Path:
    diff = "diff --git a/a.py b/a.py\n+lr = 0.2\n+token = 'hush'\n"
    code = {"folder": "/a", "commit": "c", "branch": "b", "changed": [" M a.py"], "diff": diff, **more}
    restarted(folder)
    (folder / "about.json").write_text(json.dumps({"v": 1, "code": code}))
    return folder


@pytest.mark.parametrize("more", [{}, {"diff": "diff --git a/a.py b/a.py\n+lr = 0.2\n+token = '...'\n", "hidden": 1}])
def test_changes_with_a_hidden_value_are_on_the_page_only_if_asked_for(tmp_path: Path, more: dict[str, Any]) -> None:
    run = read(str(with_changes(tmp_path / "run", **more)))
    assert run is not None
    without, whole = page(run, BEGAN), page(run, BEGAN, shows_diff=True)
    assert "lr = 0.2" not in without
    assert "1 value hidden: the changes since the commit are left out" in without
    assert "ddplaunch report --diff" in without
    assert "+lr = 0.2\n+token = &#x27;...&#x27;" in whole
    assert "Changes since the commit, 1 value hidden" in whole


def test_changes_without_a_hidden_value_are_on_the_page(tmp_path: Path) -> None:
    run = read(str(with_changes(tmp_path / "run", diff="diff --git a/a.py b/a.py\n+lr = 0.2\n", hidden=0)))
    assert run is not None
    assert "+lr = 0.2" in page(run, BEGAN)
    assert "value hidden" not in Elements(page(run, BEGAN)).data


def test_what_is_wrong_with_the_files_is_on_the_page(tmp_path: Path) -> None:
    text = page_of(recorded(tmp_path / "run", started(), "{", generation(0, 0)))
    assert "is damaged: 1 line of 3 cannot be read" in text
    assert "The run was killed" in text


@pytest.mark.parametrize(
    "content", [{"workers": 3}, {"workers": [1, {"rank": []}, {"rank": 0, "argv": 3}]}, {"reasons": []}]
)
def test_files_of_a_strange_shape_give_a_page(tmp_path: Path, content: dict[str, Any]) -> None:
    strange = {**content, "first_failure": {"rank": [], "error": {}}, "time_spent": {"total": []}}
    assert "</html>" in page_of(restarted(tmp_path / "run", plan=content, summary=strange))


@pytest.mark.parametrize(("ranks", "generations", "most"), [(8, 300, 1_000_000), (256, 40, 3_000_000)])
def test_the_page_is_small_however_much_there_is_to_say(
    tmp_path: Path, ranks: int, generations: int, most: int
) -> None:
    folder = tmp_path / "run"
    restarted(folder, ranks, generations, plan=plan(ranks, NAME="x" * 100_000), summary=failure("<" * 100_000))
    for rank in range(ranks):
        (folder / f"rank-{rank}.out").write_text('<"&>\n' * 100_000)
    (folder / "stacks").mkdir()
    (folder / f"stacks/{generations - 1}.txt").write_text("<" * 1_000_000)
    with open(folder / "events.jsonl", "a") as events:
        events.writelines(f"{json.dumps(event(1, 'notice', text='<' * 900))}\n" for _ in range(5000))
    sampled(folder, ranks, range(1, generations * 12), gpu=[97] * ranks, gpu_memory=[70_000] * ranks)
    code = {"folder": "/", "commit": "0" * 40, "changed": ["<" * 900] * 200, "diff": "<" * 64_000}
    about = {"v": 1, "code": code, "packages": {f"p{n}{'<' * 90}": "1" for n in range(1000)}}
    (folder / "about.json").write_text(json.dumps(about))
    assert len(page_of(str(folder)).encode()) < most


@pytest.mark.parametrize(("ranks", "lines", "bands"), [(3, 3, 0), (40, 1, 1)])
def test_a_chart_has_a_line_for_each_of_few_ranks_and_a_band_for_many(
    tmp_path: Path, ranks: int, lines: int, bands: int
) -> None:
    folder = tmp_path / "run"
    restarted(folder, ranks)
    sampled(folder, ranks, range(1, 9))
    text = page_of(str(folder))
    memory = text[text.index("<figcaption>Memory") : text.index("<figcaption>Step time")]
    assert len(re.findall('<path [^>]*class="line', memory)) == lines
    assert memory.count('class="band"') == bands
    assert "<td>1004.5 MiB</td><td>1008 MiB</td>" in text  # the mean and the highest value in the table


def test_the_page_has_the_code_the_packages_and_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    restarted(folder, plan=plan())
    code = {"folder": "/src", "commit": "abc123", "branch": "trunk", "changed": [" M a.py"], "diff": "+<b>x"}
    machine = {
        "cpus": 64,
        "cpu": "EPYC",
        "memory": 1 << 40,
        "devices": ["H100", "H100"],
        "driver": "580.1",
        "kernel": "Linux",
    }
    about = {"v": 1, "code": code, "machine": machine, "python": "3.12.1", "packages": {"torch": "2.13.0"}}
    (folder / "about.json").write_text(json.dumps(about))
    text = page_of(str(folder))
    for words in (
        "abc123",
        "1 changed file",
        "+&lt;b&gt;x",
        "64 EPYC",
        "1 TiB",
        "2 x H100",
        "580.1",
        "3.12.1",
        "2.13.0",
    ):
        assert words in text
    (folder / "about.json").write_text(
        json.dumps({"v": 1, "code": {"changed": [], "diff": []}, "machine": [], "packages": 3})
    )
    assert "clean" in page_of(str(folder))


@pytest.mark.parametrize("number", [10**400, float("nan"), float("inf"), -1, "much", None])
def test_a_quantity_that_is_none_is_left_out(tmp_path, number):
    summary = {"workers": [{"rank": 0, "peak_rss": number, "cpu_seconds": number}]}
    restarted(tmp_path, summary=summary, about={"machine": {"memory": number, "cpu": "EPYC"}})
    assert "EPYC" in page_of(str(tmp_path))


def test_a_run_whose_nodes_have_disks_of_their_own_says_how_many_they_were_and_where_their_record_is(
    tmp_path: Path,
) -> None:
    plan = {"world_size": 6, "nnodes": 3, "workers": []}
    run = read(recorded(tmp_path / "run", started(host="login1"), generation(0, 0), ended(9), plan=plan))
    assert run is not None
    shown = page(run, BEGAN + 10)
    assert "It had 6 workers on 3 nodes" in shown
    assert "What the nodes recorded is on their hosts." in shown
    assert "No worker was started" not in shown
    assert "its plan is missing" not in shown


@pytest.mark.parametrize(
    ("nnodes", "said"),
    [
        (1, ""),
        (
            2,
            "Only what alpha recorded is here. The other one has files on other disks: type `ddplaunch report k7qx` there.",
        ),
        (
            3,
            "Only what alpha recorded is here. The other 2 have files on other disks: type `ddplaunch report k7qx` there.",
        ),
    ],
)
def test_on_a_node_with_a_disk_of_its_own_the_page_counts_the_job_and_says_whose_files_it_has(tmp_path, nnodes, said):
    workers = [{"rank": 0, "host": "alpha"}]
    restarted(tmp_path / "node-0", ranks=2, plan={"world_size": 2 * nnodes, "nnodes": nnodes, "workers": workers})
    shown = page_of(str(tmp_path))
    assert f"It had {2 * nnodes} workers on {nnodes} node" in shown
    assert said in shown
    assert ("on other disks" in shown) == bool(said)
