"""The MAC of the control channel is HMAC-SHA256, whichever SHA-256 Python has."""

from __future__ import annotations

import hmac
import subprocess
import sys

from hypothesis import example, given
from hypothesis import strategies as st

from ddplaunch.control.mac import Mac, is_equal


@given(key=st.binary(max_size=200), parts=st.lists(st.binary(max_size=200), max_size=4))
@example(key=b"k" * 64, parts=[b""])
@example(key=b"k" * 65, parts=[])
def test_it_is_that_of_the_standard_library(key: bytes, parts: list[bytes]) -> None:
    mac = Mac(key)
    expected = hmac.digest(key, b"".join(parts), "sha256")
    assert mac.of(*parts) == expected
    assert mac.of(*parts) == expected, "the first one has changed the key"


def test_it_is_that_of_the_rfc() -> None:
    """RFC 4231, test cases 2 and 6: a short key, and one longer than a block."""
    short = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    long = "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
    assert Mac(b"Jefe").of(b"what do ya want ", b"for nothing?").hex() == short
    assert Mac(b"\xaa" * 131).of(b"Test Using Larger Than Block-Size Key - Hash Key First").hex() == long


def test_only_equal_macs_are_equal() -> None:
    assert is_equal(b"same", bytes(bytearray(b"same")))
    assert not is_equal(b"same", b"sama")
    assert not is_equal(b"same", b"sam")


def test_a_python_without_a_sha256_of_its_own_takes_that_of_openssl() -> None:
    program = (
        "import sys; sys.modules['_sha2'] = sys.modules['_sha256'] = None\n"
        "from ddplaunch.control.mac import Mac, sha256\n"
        "print(sha256.__module__, Mac(b'Jefe').of(b'what do ya want for nothing?').hex()[:8])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "_hashlib 5bdcc146\n"
