"""The page of a run in a real browser: what workers print breaks out of it in vain, and it needs no script to be read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddplaunch.tools.page.history import read
from ddplaunch.tools.page.page import page
from tests.browser import CHROMIUM, FLAGS, NO_SCRIPTS, chromium
from tests.conftest import PATIENCE
from tests.recorded import BEGAN, ended, event, exited, generation, recorded, restarted, sampled, started, worker

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium on this machine (apt-get install chromium)"
)

# each would change the title, or add an element with the id `owned`
ATTACKS = [
    "<script>document.title='owned'</script>",
    "</pre></code></details></section></main><script>document.title='owned'</script><p id=owned>",
    "</title><script>document.title='owned'</script>",
    "</style><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\"><svg onload=\"document.title='owned'\">",
    '" autofocus onfocus="document.title=\'owned\'" id="owned',
    "' onmouseover='document.title=\"owned\"' id='owned",
    "&lt;p id=owned&gt; &#60;p id=owned&#62;",
    "<!-- --><p id=owned> ]]><p id=owned>",
    "\x1b]0;owned\x07\x1b[2J\u202e\x00<p id=owned>",
    "<meta http-equiv=refresh content='0;url=data:text/html,owned'><base href=http://127.0.0.1:1/>",
    "<a href=\"javascript:document.title='owned'\">x</a>",
]


def dom(path: Path, home: Path) -> str:
    """Return the document as the browser has it after it ran all that it would run."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={home}/profile", "--dump-dom", path.as_uri()],
        env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, timeout=PATIENCE * 2, check=True,
    )  # fmt: skip
    return done.stdout


def page_of(folder: Path) -> str:
    run = read(str(folder))
    assert run is not None
    return page(run, BEGAN + 10)


def hostile(folder: Path) -> str:
    """Return the page of a run with each attack in names, messages, logs, stacks and exceptions."""
    everywhere = " ".join(ATTACKS)
    recorded(
        folder, started(host=ATTACKS[5], program=everywhere), generation(0, 0), worker(0, 0),
        *(event(1, "notice", text=attack) for attack in ATTACKS), exited(2, 0, 3, everywhere), ended(3, 3, everywhere),
        plan={"workers": [{"rank": 0, "device": everywhere, "variables": {everywhere: everywhere}}]},
        summary={"first_failure": {"rank": 0, "host": everywhere, "error": everywhere}},
    )  # fmt: skip
    (folder / "rank-0.out").write_text("\n".join(ATTACKS) * 3)
    (folder / "stacks").mkdir()
    (folder / "stacks/0.txt").write_text("\n".join(ATTACKS))
    return page_of(folder)


def test_what_workers_print_breaks_out_in_vain(tmp_path: Path) -> None:
    text = hostile(tmp_path / "run")
    assert "Content-Security-Policy" in text
    # escapes alone hold, without the policy that is there besides
    start = text.index('<meta http-equiv="Content-Security-Policy"')
    bare = text[:start] + text[text.index(">", start) + 1 :]
    for name, content in (("page", text), ("bare", bare)):
        file = tmp_path / f"{name}.html"
        file.write_text(content)
        shown = dom(file, tmp_path)
        assert "<title>owned" not in shown
        assert 'id="owned"' not in shown
        assert "<script" not in shown
        assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in shown
        assert shown.count("<section") == text.count("<section")
        assert '<path d="M90 31' in shown


def test_the_browser_would_have_run_such_a_script(tmp_path: Path) -> None:
    file = tmp_path / "open.html"
    file.write_text(f"<!DOCTYPE html><title>x</title>{ATTACKS[0]}")
    assert "<title>owned" in dom(file, tmp_path)


def test_the_policy_of_the_page_stops_a_script_that_is_put_into_it(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(hostile(tmp_path / "run").replace("<main", f"{ATTACKS[0]}<main", 1))
    assert "<title>owned" not in dom(file, tmp_path)


def test_the_page_is_drawn_with_its_sections_and_bars_where_scripts_are_off(tmp_path: Path) -> None:
    probe = "<!DOCTYPE html><p>still</p><script>document.querySelector('p').textContent='ran'</script><noscript>off</noscript>"
    (tmp_path / "probe.html").write_text(probe)
    (tmp_path / "page.html").write_text(page_of(Path(restarted(tmp_path / "run"))))
    with chromium(tmp_path, NO_SCRIPTS) as shown:
        shown.load(tmp_path / "probe.html")
        assert [text for name, text, _ in shown.drawn() if name == "#text"] == ["still", "off"]
        shown.load(tmp_path / "page.html")
        shown.wait_for("rank 1")
        drawn = list(shown.drawn())
        texts = " ".join(text for _, text, _ in drawn)
        assert all(words in texts for words in ("k7qx: train.py", "2 workers finished in 9 s", "Timeline", "rank 0"))
        assert "What became of the workers" not in texts  # which unfolds
        bars = [place for name, _, place in drawn if name == "path" and place[2] > 100 and place[3] > 5]
        colours = [shown.colour_at(left + width / 2, top + height / 2) for left, top, width, height in bars]
        shown.ask("Page.navigate", url=f"{(tmp_path / 'page.html').as_uri()}#workers")
        shown.wait_for("Each rank in its last generation")
    assert sorted(colours) == ["#2e7d4f", "#2e7d4f", "#8a6d00", "#c22f2f"]  # good, good, stopped, failed


def test_of_a_long_page_only_what_is_on_the_screen_is_laid_out(tmp_path: Path) -> None:
    folder = Path(restarted(tmp_path / "run", 256, 3))
    sampled(folder, 256, range(1, 36))
    (tmp_path / "page.html").write_text(page_of(folder))
    with chromium(tmp_path) as shown:
        shown.load(tmp_path / "page.html")
        shown.wait_for("rank 0")
        assert shown.figures["Nodes"] > 8000
        assert shown.figures["LayoutObjects"] < 2000
