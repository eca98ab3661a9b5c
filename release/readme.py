"""README.md as a package index shows it, where no file of the repository is: hatchling runs this when it builds.

Links and pictures become addresses below `[project.urls] Source`, at the tag of the version. While there is no such address, a
link becomes its text with the path, which the source distribution has, and a picture becomes its description.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # not in the environment of the tests, which need no hook
    MetadataHookInterface = object

_REFERENCE = re.compile(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)")
_BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"\A(# .*\n)")
_PATHS = "\nPaths on this page are those in the source distribution.\n"


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]  # hatchling is only where packages are built
    """Sets the `readme` of the package; its name in pyproject.toml is `custom`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        text = for_index(readme, source, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def for_index(readme: str, source: str | None, version: str) -> str:
    """Return the README with no relative link or picture left; `source` is the address of the repository.

    With https://example.org/d and 0.1.0, `[how](docs/a.md)` gives `[how](https://example.org/d/blob/v0.1.0/docs/a.md)`; without
    an address it gives `how (docs/a.md)`.
    """

    def replace(reference: re.Match[str]) -> str:
        target, text = reference["target"], reference["text"]
        if re.match(r"[a-z]+:", target):
            return reference[0]
        if source:
            kind = "raw" if reference["picture"] else "blob"
            path = f"README.md{target}" if target.startswith("#") else target
            return f"{reference['picture']}[{text}]({source.rstrip('/')}/{kind}/v{version}/{path})"
        if reference["picture"]:
            return f"*{text}*"
        return text if text == target or target.startswith("#") else f"{text} ({target})"

    parts = _BLOCK.split(readme)  # every second part is a block of code
    page = "".join(part if number % 2 else _REFERENCE.sub(replace, part) for number, part in enumerate(parts))
    return page if source else _HEADING.sub(rf"\1{_PATHS}", page)
