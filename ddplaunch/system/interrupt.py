"""Ctrl-C during the start ends the command as it ends any program, with no traceback: imported by each entry, before all else.

From the fork of the agent on, `launcher.node.front` handles signals. What Python itself does before our first line is
out of our hands.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own functions, without its enums, which take a few ms

# where the caller has it ignored (a background job of a script), it stays so
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
