"""Draws the terminals in docs/pictures: `python docs/screens.py [FOLDER]` runs the commands and draws what they show.

No font and no style comes from another host, and a picture is a few kilobytes: text in rows, each piece in its colour.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import pexpect

from ddplaunch.tools.page.history import read
from ddplaunch.tools.page.page import page
from tests.emulator import Emulator
from tests.recorded import BEGAN, ended, event, exited, generation, recorded, sampled, started, worker

PICTURES = Path(__file__).parent / "pictures"
_LINES, _COLUMNS = 24, 104
_PAGE = "1000,1150"  # pixels of the page that are shown
_PATIENCE = 60.0  # seconds
_CELL, _ROW, _MARGIN = 8.4, 19, 14  # pixels
_ENDS = "command:"  # of the plan, what is before it is the shorter part
_PLAIN, _DIM, _BEHIND = "#d6dde6", "#8b949e", "#12171d"
_COLOURS = {
    "31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "35": "#d2a8ff", "36": "#76e3ea", "94": "#79c0ff", "95": "#f2a6e0",
}  # fmt: skip

_TRAIN = """\
import os
import time

from tqdm import tqdm

rank = int(os.environ["RANK"])


def train_step(step):
    time.sleep(0.02 + 0.015 * rank)


print(f"rank {rank} has its part of the data", flush=True)
for step in tqdm(range(200), desc="epoch 1"):
    train_step(step)
"""
_FAILS = """\
import os
import time

rank = int(os.environ["RANK"])


def train_step(step):
    loss = 1.0 / (step + 1)
    if step == 2 and rank == 3:
        raise ValueError(f"loss is nan at step {step}")
    return loss


for step in range(3):
    loss = train_step(step)
    if rank == 0 and step < 2:
        print(f"step {step}: loss {loss:.3f}", flush=True)
    time.sleep(0.3)
time.sleep(600)
"""


def _moves(rows: list[str]) -> bool:
    """Whether the bars are far enough apart for all to be seen."""
    shares = [int(found[1]) for row in rows if (found := re.search(r"(\d+)%", row))]
    return len(shares) == 3 and "slowest" in "".join(rows) and max(shares) >= 60


_WAITS = """\
import os
import queue
import socket

batches = queue.Queue()
one, other = socket.socketpair()


def next_batch():
    return batches.get()  # nobody puts one


def exchange(gradients):
    return one.recv(len(gradients))


def train_step():
    if os.environ["RANK"] == "2":
        next_batch()
    exchange(b"gradients")


print("ready", flush=True)
train_step()
"""
_TELLS = """\
import os
import time

import ddplaunch

rank = int(os.environ["RANK"])
for step in range(1, 5001):
    time.sleep(0.05 if rank == 2 else 0.04)
    loss = 2.3 / (1 + step / 40)
    ddplaunch.progress(step, 5000, loss=loss)
    if rank == 0 and step % 20 == 0:
        print(f"step {step}: loss {loss:.3f}", flush=True)
"""


def _is_behind(rows: list[str]) -> bool:
    """Whether the rows of --live tell of a rank that has fallen behind."""
    return len(rows) > 12 and "behind" in rows[-2] and "left" in rows[-3]


_JOB = "ddplaunch --nproc-per-node 4 --run-id digits train.py"  # at which a command looks

# name: the script, the command, and when to look; None: when it has ended
SCREENS: dict[str, tuple[str, str, Callable[[list[str]], bool] | None]] = {
    "screen-run": (_TRAIN, "ddplaunch --nproc-per-node 4 train.py", _moves),
    "screen-failure": (_FAILS, "ddplaunch --nproc-per-node 4 train.py", None),
    "screen-live": (_TELLS, "ddplaunch --live --nproc-per-node 4 train.py", _is_behind),
    "screen-stacks": (_WAITS, "ddplaunch stacks digits", None),
    "screen-plan": (_TRAIN, "ddplaunch plan --nnodes 2 --nproc-per-node 2 --simulate train.py", None),
}


def main(folder: Path = PICTURES) -> None:
    """Draw all pictures into a folder."""
    for name, (script, command, when) in SCREENS.items():
        screen = _run(script, command, when)
        (folder / f"{name}.svg").write_text("".join(_svg(f"$ {command}", screen)), encoding="utf-8")
    draw_page(folder)


def draw_page(folder: Path) -> None:
    """Have chromium draw the page of a made-up run of a day with a restart, if there is a chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("there is no chromium to draw report.png")
        return
    with tempfile.TemporaryDirectory() as home:
        run = read(_a_day(Path(home, "run")))
        assert run is not None
        file = Path(home, "page.html")
        file.write_text(page(run, BEGAN), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={home}/profile"]
        shot = [f"--window-size={_PAGE}", f"--screenshot={folder}/report.png", file.as_uri()]
        subprocess.run(
            [chromium, *flags, *shot], env={**os.environ, "HOME": home}, stderr=subprocess.DEVNULL, check=True
        )


def _a_day(folder: Path) -> str:
    """Write a run of four ranks: rank 1 fails after nine hours and again in the last, and its memory grows until then."""
    hours = [range(60, 33_000, 300), range(33_200, 80_000, 300)]
    events = [
        started(),
        generation(0, 0),
        *(worker(1, rank) for rank in range(4)),
        exited(33_000, 1, 137, "killed by SIGKILL"),
    ]
    events += [exited(33_001, rank, 143, "killed by SIGTERM", stopped_with=15) for rank in (0, 2, 3)]
    events += [event(33_002, "generation_failed", generation=0, rank=1, wait=2.0), generation(33_100, 1)]
    events += [worker(33_101, rank) for rank in range(4)]
    events += [exited(80_000, rank) for rank in range(4)] + [
        ended(80_001, 0, "4 workers finished in 22 h 13 min after 1 restart")
    ]
    recorded(folder, *events)
    for number, times in enumerate(hours):
        for at in times:
            grown = (at - times[0]) // 3
            wave = [round(8 * math.sin(at / 2000 + rank)) for rank in range(4)]
            sampled(
                folder, 4, range(at, at + 1), number, cpu=[95 + one for one in wave], gpu=[84 + one for one in wave],
                memory=[21_000, 21_000 + (grown if number == 0 else 0), 21_000, 21_000],
            )  # fmt: skip
    return str(folder)


def _run(script: str, command: str, when: Callable[[list[str]], bool] | None) -> Emulator:
    """Run a command in a terminal, beside a job if it looks at one, and give the screen as it is then."""
    screen = Emulator(_LINES, _COLUMNS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        Path(home, "train.py").write_text(script, encoding="utf-8")
        job = _spawn(_JOB, home) if script is _WAITS else None
        try:
            if job is not None:
                for _ in range(4):
                    job.expect("ready", timeout=_PATIENCE)
            child = _spawn(command, home)
            by = time.monotonic() + _PATIENCE
            while when is None or not when(screen.shown):
                if time.monotonic() > by:
                    raise TimeoutError(f"{command}:\n" + "\n".join(screen.shown))
                try:
                    screen.feed(child.read_nonblocking(1 << 16, timeout=1))
                except pexpect.TIMEOUT:
                    continue
                except pexpect.EOF:
                    break
            child.terminate(force=True)
        finally:
            if job is not None:
                job.sendintr()
                job.expect(pexpect.EOF, timeout=_PATIENCE)
    return screen


def _spawn(command: str, home: str) -> pexpect.spawn:
    env = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
    return pexpect.spawn(
        sys.executable,
        ["-m", *command.split()],
        cwd=home,
        env={**env, "HOME": home, "TERM": "xterm"},
        dimensions=(_LINES, _COLUMNS),
        encoding="utf-8",
    )


def _svg(typed: str, screen: Emulator) -> Iterator[str]:
    rows = [[(char, "1") for char in typed], *screen.styled]
    if _ENDS in screen.shown:
        rows = [*rows[: screen.shown.index(_ENDS) + 1], [("…", "")]]
    width = 2 * _MARGIN + _CELL * max(map(len, rows))
    height = 2 * _MARGIN + _ROW * len(rows)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    yield ' font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14">\n'
    yield f'<rect width="100%" height="100%" rx="8" fill="{_BEHIND}"/>\n'
    for number, row in enumerate(rows):
        y = _MARGIN + _ROW * (number + 0.75)
        column = 0
        for style, cells in groupby(row, key=lambda cell: cell[1]):
            chars = [char for char, _ in cells]
            text = "".join(chars)
            if text.strip():
                before = len(text) - len(text.lstrip())
                shown = text.strip().replace(" ", "\u00a0")  # browsers draw several blanks as one
                x = _MARGIN + _CELL * (column + before)
                length = f'textLength="{_CELL * len(shown):.1f}"'
                yield f'<text x="{x:.1f}" y="{y:.1f}" {length} {_look(style)}>{escape(shown)}</text>\n'
            column += len(chars)
    yield "</svg>\n"


def _look(style: str) -> str:
    codes = style.split(";")
    colour = next((_COLOURS[code] for code in codes if code in _COLOURS), _PLAIN)
    colour = _DIM if "2" in codes else colour
    return f'fill="{colour}"' + (' font-weight="bold"' if "1" in codes else "")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
