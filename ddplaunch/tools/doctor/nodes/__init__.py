"""`ddplaunch doctor` on several nodes: each is examined there, and pairs measure the network between them."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.tools.doctor import Finding


class Concern(Struct, frozen=True, kw_only=True):
    """A finding, and the nodes that it is about; with `blames_link` the link between the two is at fault, not they."""

    finding: Finding
    nodes: tuple[int, ...]  # node ranks
    blames_link: bool = False
