"""`make dist`: builds the wheel and the source distribution of the commit that is checked out, and proves that they work.

What is built is HEAD as `git archive` gives it, and a folder with changes is refused: a release is a commit, and no file that
only this folder has gets into it. Nothing is uploaded; CONTRIBUTING.md says what follows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "dist"  # removed at the end; not in /tmp, which is too small for torch on many machines
TOOLS = ("build", "twine", "readme-renderer[md]")
DEMO = ("--nproc-per-node", "4", "--devices", "cpu")
NOT_IN_WHEEL = ("tests/", "docs/", "examples/", "benchmarks/", "release/")


class Refused(Exception):
    """The release cannot be made, with the reason."""


def main() -> int:
    """Build, check, install and run; return the exit status."""
    try:
        commit = _clean_commit()
        shutil.rmtree(WORK, ignore_errors=True)
        shutil.rmtree(DIST, ignore_errors=True)
        tools = _environment("tools", *TOOLS)
        wheel, sdist = _build(tools, commit)
        metadata = check_wheel(wheel)
        check_sdist(sdist)
        _run(tools, "-m", "twine", "check", "--strict", wheel, sdist)
        _check_page(tools, metadata)
        _try(wheel)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failed:
        print(f"error: exit status {failed.returncode} of: {' '.join(map(str, failed.cmd))}", file=sys.stderr)
        return 1
    shutil.rmtree(WORK)
    print(f"\nbuilt from {commit[:12]}, checked, installed and run:\n  {wheel}\n  {sdist}")
    for note in _notes(metadata):
        print(f"note: {note}")
    return 0


def _clean_commit() -> str:
    """Return the commit that is checked out; refuse a folder with changes."""
    changes = _git("status", "--porcelain")
    if changes:
        raise Refused(
            f"the folder has changes that no commit has:\n{changes}\nhint: commit them, or `git clean` them away"
        )
    return _git("rev-parse", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip()


def _build(tools: Path, commit: str) -> tuple[Path, Path]:
    """Build the source distribution from the commit, and the wheel from the source distribution."""
    source = WORK / "source"
    source.mkdir(parents=True)
    archive = WORK / "source.tar"
    subprocess.run(["git", "archive", "-o", archive, commit], cwd=ROOT, check=True)
    with tarfile.open(archive) as files:
        files.extractall(source, filter="data")
    _run(tools, "-m", "build", "--outdir", DIST, source)
    return next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))


def check_wheel(wheel: Path) -> Message:
    """Return the metadata of the wheel.

    Raises:
        Refused: it lacks the licence, the mark for type checkers, a text of the help or its version, or it has a file that is not
            for users.
    """
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        metadata = BytesParser().parsebytes(files.read(f"{info}/METADATA"))
    package = ("ddplaunch/py.typed", "ddplaunch/cli/topics/hangs.md")
    for needed in (*package, f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"):
        if needed not in names:
            raise Refused(f"{wheel.name} has no {needed}")
    strange = [name for name in names if not name.startswith(("ddplaunch/", f"{info}/"))]
    strange += [name for name in names if any(f"/{folder}" in f"/{name}" for folder in NOT_IN_WHEEL)]
    if strange:
        raise Refused(f"{wheel.name} has what is not for users: {', '.join(strange[:5])}")
    if metadata["License-Expression"] != "BSD-3-Clause":
        raise Refused(f"{wheel.name} names the licence {metadata['License-Expression']!r}, not BSD-3-Clause")
    return metadata


def check_sdist(sdist: Path) -> None:
    """Refuse a source distribution that lacks a file of the commit, such as the licence or a test."""
    with tarfile.open(sdist) as files:
        there = {name.partition("/")[2] for name in files.getnames()}
    missing = [name for name in _git("ls-files").splitlines() if name not in there]
    if missing:
        raise Refused(f"{sdist.name} lacks {len(missing)} files: {', '.join(missing[:5])}")


def _check_page(tools: Path, metadata: Message) -> None:
    """Have the README rendered as the index renders it, and refuse a link or a picture that leads nowhere there."""
    text, page = WORK / "page.md", WORK / "page.html"
    text.write_text(str(metadata.get_payload()), encoding="utf-8")
    _run(tools, "-m", "readme_renderer", text, "-o", page)
    dead = dead_links(page.read_text(encoding="utf-8"))
    if dead:
        raise Refused(f"README.md would have links on the index that lead nowhere: {', '.join(dead[:5])}")


def dead_links(html: str) -> list[str]:
    """Return the links and pictures of a page that are neither a whole address nor a place on the page."""
    links: list[str] = []
    ids: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            links.extend(value or "" for name, value in attrs if name in ("href", "src"))
            ids.update(value or "" for name, value in attrs if name == "id")

    Reader().feed(html)
    return [
        link for link in links if not link.startswith(("https://", "mailto:")) and link.removeprefix("#") not in ids
    ]


def _try(wheel: Path) -> None:
    """Install the wheel where nothing else of the repository is, and run its command there."""
    python = _environment("installed", f"{wheel}[example]")
    _run(python, "-m", "pip", "--disable-pip-version-check", "check")
    shutil.copy(ROOT / "examples/train_ddp.py", WORK / "train_ddp.py")
    said = _run(python, "-m", "ddplaunch", "--version", text=True, stdout=subprocess.PIPE).stdout
    version = wheel.name.split("-")[1]
    if version not in said.split():
        raise Refused(f"--version of {version} says {said!r}")
    _run(python, "-m", "ddplaunch", *DEMO, "train_ddp.py")
    _run(python.with_name("ddplaunch"), "plan", *DEMO, "train_ddp.py", stdout=subprocess.DEVNULL)


def _environment(name: str, *packages: str) -> Path:
    """Make an environment with these packages, in the versions of constraints.txt, and return its python."""
    folder = WORK / name
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", ROOT / "constraints.txt")
    _run(python, *pip, *packages)
    return python


def _run(program: Path, *words: str | Path, **how: object) -> subprocess.CompletedProcess[str]:
    """Run a command where only the wheel can be imported and nothing of the caller's counts, and show what it does."""
    print("$", program.relative_to(ROOT), *words, flush=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DDPLAUNCH_", "PET_"))}
    env["XDG_STATE_HOME"] = str(WORK / "state")
    return subprocess.run([program, *words], cwd=WORK, env=env, check=True, **how)  # type: ignore[call-overload, no-any-return]


def _notes(metadata: Message) -> Iterator[str]:
    """Yield what has to be done before these files may be uploaded."""
    version = metadata["Version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no date for {version}"
    if not any(url.startswith("Source,") for url in metadata.get_all("Project-URL", [])):
        yield "pyproject.toml has no [project.urls] Source: the index shows README.md without links and pictures"
    if _git("tag", "--points-at", "HEAD") != f"v{version}":
        yield f"this commit has no tag v{version}"


if __name__ == "__main__":
    sys.exit(main())
