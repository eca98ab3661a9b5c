"""The control channel between agents of different nodes: frames and handshake are pure, the rest are sockets in a loop.

Knows nothing of jobs but the messages' types: bytes in, bytes out. Imported only for a job of several nodes.
"""

import sys

# msgspec takes names of typing from typing_extensions where that is installed, as beside torch: to import it, with `inspect` and
# what that imports, takes longer than all else of msgspec, and our Pythons have the names in typing itself
if "typing_extensions" not in sys.modules:
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # an ImportError for who asks
    import msgspec  # noqa: F401 - for the modules of this folder

    del sys.modules["typing_extensions"]
