"""The pictures of terminals: the script that draws them runs, and those in the repository look like what it draws now."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from docs.screens import PICTURES, SCREENS


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pictures as they are drawn now."""
    folder = tmp_path_factory.mktemp("pictures")
    subprocess.run([sys.executable, "docs/screens.py", str(folder)], check=True, cwd=PICTURES.parents[1])
    return folder


def words(picture: Path) -> set[str]:
    """What a picture says, without what differs from run to run: figures, bars, folders, names of run and host."""
    text = " ".join(ET.parse(picture).getroot().itertext())
    names = re.findall(r"(?<=ddplaunch:\s)\w{4}(?=:)", text)
    text = re.sub("|".join([r"/tmp/\S+", r"(?<=\bon\s)\S+(?=:)", *map(re.escape, names)]), "", text)
    return set(re.findall(r"(?<![\w/.-])[a-z]{3,}(?![\w/])", text))


@pytest.mark.parametrize("name", SCREENS)
def test_a_picture_of_a_terminal_is_fresh_small_and_asks_no_other_host(drawn: Path, name: str) -> None:
    picture = PICTURES / f"{name}.svg"
    text = picture.read_text(encoding="utf-8")
    assert len(text) < 6000
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    # the last fact in the row of a job is left out where the others are a digit longer
    assert words(picture) ^ words(drawn / picture.name) <= {"memory"}, "python docs/screens.py"


def test_the_picture_of_the_page_is_small() -> None:
    assert (PICTURES / "report.png").stat().st_size < 300_000
