"""What `make dist` refuses, and README.md as a package index shows it."""

import zipfile
from pathlib import Path

import pytest

from release.dist import Refused, check_wheel, dead_links
from release.readme import for_index

INFO = "ddplaunch-0.1.0.dist-info"
WHEEL = {
    "ddplaunch/__init__.py": "",
    "ddplaunch/py.typed": "",
    "ddplaunch/cli/topics/hangs.md": "",
    f"{INFO}/METADATA": "Metadata-Version: 2.4\nName: ddplaunch\nVersion: 0.1.0\nLicense-Expression: BSD-3-Clause\n\nText.\n",
    f"{INFO}/entry_points.txt": "",
    f"{INFO}/licenses/LICENSE": "",
}
README = (
    "# ddplaunch\n\n![Two workers](docs/a.svg)\n\n[how](docs/a.md#x), [docs/](docs/), [c](https://c.org), [up](#a)\n"
)


def wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "ddplaunch-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_whole_wheel_gives_its_metadata(tmp_path: Path) -> None:
    metadata = check_wheel(wheel(tmp_path, WHEEL))
    assert (metadata["Version"], metadata.get_payload()) == ("0.1.0", "Text.\n")


@pytest.mark.parametrize("missing", [name for name in WHEEL if not name.endswith(("METADATA", "__init__.py"))])
def test_a_wheel_without_what_users_need_is_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(Refused, match=f"has no {missing}"):
        check_wheel(wheel(tmp_path, {name: text for name, text in WHEEL.items() if name != missing}))


@pytest.mark.parametrize("strange", ["tests/test_a.py", "ddplaunch/tests/test_a.py", "docs/generate.py", "top.py"])
def test_a_wheel_with_what_is_not_for_users_is_refused(tmp_path: Path, strange: str) -> None:
    with pytest.raises(Refused, match=f"not for users: {strange}"):
        check_wheel(wheel(tmp_path, {**WHEEL, strange: ""}))


def test_a_wheel_of_another_licence_is_refused(tmp_path: Path) -> None:
    metadata = WHEEL[f"{INFO}/METADATA"].replace("BSD-3-Clause", "MIT")
    with pytest.raises(Refused, match="licence 'MIT'"):
        check_wheel(wheel(tmp_path, {**WHEEL, f"{INFO}/METADATA": metadata}))


def test_links_of_the_readme_lead_to_the_repository_at_the_tag_of_the_version() -> None:
    at = "https://example.org/d"
    assert for_index(README, f"{at}/", "0.1.0").splitlines()[2:] == [
        f"![Two workers]({at}/raw/v0.1.0/docs/a.svg)",
        "",
        f"[how]({at}/blob/v0.1.0/docs/a.md#x), [docs/]({at}/blob/v0.1.0/docs/), [c](https://c.org), "
        f"[up]({at}/blob/v0.1.0/README.md#a)",
    ]


def test_without_a_repository_links_of_the_readme_become_paths_and_pictures_their_descriptions() -> None:
    assert for_index(README, None, "0.1.0").splitlines()[2:] == [
        "Paths on this page are those in the source distribution.",
        "",
        "*Two workers*",
        "",
        "how (docs/a.md#x), docs/, [c](https://c.org), up",
    ]


def test_blocks_of_code_in_the_readme_stay_as_they_are() -> None:
    block = "```python\nresults[0](a)\n```\n"
    assert for_index(block, None, "0.1.0") == block


def test_a_link_that_leads_nowhere_on_the_index_is_found() -> None:
    page = '<h2>A<a id="a" href="#a"></a></h2><a href="docs/a.md"><img src="a.svg"></a><a href="#b"></a><a href="https://c">'
    assert dead_links(page) == ["docs/a.md", "a.svg", "#b"]
