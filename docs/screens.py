"""Draws the terminals in docs/pictures: `python docs/screens.py [FOLDER]` runs the commands and draws what they show.

No font and no style comes from another host, and a picture is a few kilobytes: text in rows, each piece in its colour.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import pexpect

from tests.emulator import Emulator

PICTURES = Path(__file__).parent / "pictures"
_LINES, _COLUMNS = 24, 104
_PATIENCE = 60.0  # seconds
_CELL, _ROW, _MARGIN = 8.4, 19, 14  # pixels
_PLAIN, _DIM, _BEHIND = "#d6dde6", "#8b949e", "#12171d"
_COLOURS = {
    "31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "35": "#d2a8ff", "36": "#76e3ea", "94": "#79c0ff", "95": "#f2a6e0",
}  # fmt: skip

_WAITS = """\
import queue

import torch
import torch.distributed as dist

batches = queue.Queue()
dist.init_process_group("gloo")


def next_batch():
    return batches.get()  # nobody puts one


def average(gradients):
    dist.all_reduce(gradients)


def train_step(step):
    if dist.get_rank() == 2 and step == 3:
        next_batch()
    average(torch.zeros(4, 4))


for step in range(5):
    print(f"step {step}", flush=True)
    train_step(step)
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
    "screen-live": (_TELLS, "ddplaunch --live --nproc-per-node 4 train.py", _is_behind),
    "screen-stacks": (_WAITS, "ddplaunch stacks digits", None),
}


def main(folder: Path = PICTURES) -> None:
    """Draw all pictures into a folder."""
    for name, (script, command, when) in SCREENS.items():
        screen = _run(script, command, when)
        (folder / f"{name}.svg").write_text("".join(_svg(f"$ {command}", screen)), encoding="utf-8")


def _run(script: str, command: str, when: Callable[[list[str]], bool] | None) -> Emulator:
    """Run a command in a terminal, beside a job if it looks at one, and give the screen as it is then."""
    screen = Emulator(_LINES, _COLUMNS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        Path(home, "train.py").write_text(script, encoding="utf-8")
        job = _spawn(_JOB, home) if script is _WAITS else None
        try:
            if job is not None:
                for _ in range(4):
                    job.expect("step 3", timeout=_PATIENCE)
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
