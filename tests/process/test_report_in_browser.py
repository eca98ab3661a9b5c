"""The page of a run in a real browser, chromium without a screen: what workers print breaks out of it in vain."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ddplaunch.page.page import page
from ddplaunch.page.record import read
from tests.conftest import PATIENCE
from tests.recorded import BEGAN, ended, event, exited, generation, recorded, started, worker

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
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
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}/profile", "--dump-dom", path.as_uri()],
        env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, timeout=PATIENCE * 2, check=True,
    )  # fmt: skip
    return done.stdout


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
    run = read(str(folder))
    assert run is not None
    return page(run, BEGAN + 10)


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
