"""`ddplaunch doctor` on several nodes: each is examined there, and pairs measure the network between them."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.tools.doctor import Finding


class Concern(Struct, frozen=True, kw_only=True):
    """A finding, and the nodes that it is about; with `is_link` what is wrong lies between them."""

    finding: Finding
    nodes: tuple[int, ...]  # node ranks
    is_link: bool = False
