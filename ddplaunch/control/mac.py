"""HMAC-SHA256 (RFC 2104) over the SHA-256 that Python brings: `hmac` and `hashlib` load OpenSSL, which takes milliseconds.

Knows no protocol. A Python built without its own SHA-256, as some distributions do, takes that of OpenSSL.
"""

from __future__ import annotations

from _operator import _compare_digest as is_equal  # what `hmac` takes where OpenSSL lacks one; in constant time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import sha256
else:
    try:
        from _sha2 import sha256
    except ImportError:
        try:
            from _sha256 import sha256  # Python 3.11
        except ImportError:
            from hashlib import sha256

__all__ = ["Mac", "is_equal", "sha256"]

_BLOCK = 64  # bytes
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


class Mac:
    """Makes the MACs of one key."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = (sha256(key).digest() if len(key) > _BLOCK else bytes(key)).ljust(_BLOCK, b"\0")
        self._inner = sha256(block.translate(_INNER))
        self._outer = sha256(block.translate(_OUTER))

    def of(self, *parts: bytes) -> bytes:
        """Return the MAC of these bytes, one after the other."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for part in parts:
            inner.update(part)
        outer.update(inner.digest())
        return outer.digest()
