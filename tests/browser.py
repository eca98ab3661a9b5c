"""A real chromium without a screen, over the pipe of its DevTools protocol: what it makes of a page, scripts forbidden or not."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.conftest import PATIENCE, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
NO_SCRIPTS = "--blink-settings=scriptEnabled=false"
# chromium reads questions at descriptor 3 and writes answers to 4
_MOVED = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'


class Page:
    """A page that chromium shows."""

    def __init__(self, asks: IO[bytes], answers: IO[bytes]) -> None:
        """`asks` and `answers` are the pipes to chromium and from it."""
        self._asks = asks
        self._answers = answers
        self._received = bytearray()
        self._seen: list[dict[str, Any]] = []  # messages that were not waited for yet
        self._session: dict[str, str] = {}
        [target] = [one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Performance"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        call = json.dumps({"id": 1, "method": method, "params": params, **self._session})
        self._asks.write(call.encode() + b"\0")
        answer = self._wait("id", 1)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _wait(self, key: str, value: object) -> dict[str, Any]:
        """Return the first message that has this value."""
        while True:
            for message in self._seen:
                if message.get(key) == value:
                    self._seen.remove(message)
                    return message
            while b"\0" not in self._received:
                data = self._answers.read(1 << 16)
                assert data, "chromium has ended"
                self._received += data
            text, _, self._received = self._received.partition(b"\0")
            self._seen.append(json.loads(text))

    def load(self, path: Path) -> None:
        """Show a file, and return once it has loaded."""
        self.ask("Page.navigate", url=path.as_uri())
        self._wait("method", "Page.loadEventFired")

    @property
    def figures(self) -> dict[str, float]:
        """What chromium counts: `Nodes`, `LayoutObjects`, `LayoutDuration` and others."""
        return {each["name"]: each["value"] for each in self.ask("Performance.getMetrics")["metrics"]}

    def drawn(self) -> Iterator[tuple[str, str, tuple[float, float, float, float]]]:
        """Yield what has a place on the page: its element or "#text", its text, and left, top, width and height."""
        found = self.ask("DOMSnapshot.captureSnapshot", computedStyles=[])
        names, layout = found["documents"][0]["nodes"]["nodeName"], found["documents"][0]["layout"]
        texts = found["strings"]
        for node, text, place in zip(layout["nodeIndex"], layout["text"], layout["bounds"], strict=True):
            yield texts[names[node]].lower(), texts[text] if text >= 0 else "", tuple(place)

    def wait_for(self, text: str) -> None:
        """Wait until this text has a place on the page: chromium lays out what is on the screen, and a frame after that."""
        until(lambda: any(each == text for _, each, _ in self.drawn()), f"{text} on the page")

    def colour_at(self, x: float, y: float) -> str:
        """Return the colour of a pixel: "#rrggbb"."""
        clip = {"x": x, "y": y, "width": 1, "height": 1, "scale": 1}
        png = base64.b64decode(self.ask("Page.captureScreenshot", clip=clip)["data"])
        row = zlib.decompressobj().decompress(png.split(b"IDAT")[1][:-8])  # without the checksum and the next length
        return f"#{row[1:4].hex()}"  # behind the filter, which changes nothing where there is one pixel


@contextmanager
def chromium(home: Path, *flags: str) -> Iterator[Page]:
    """Start chromium with an empty page and a profile in this folder; end it afterwards."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={home}/profile", "--remote-debugging-pipe", "about:blank"]
    with subprocess.Popen(
        ["sh", "-c", _MOVED, "sh", *command], env={**os.environ, "HOME": str(home)}, bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            page = Page(process.stdin, process.stdout)
            yield page
            page.ask("Browser.close")
            process.wait(PATIENCE)
        finally:
            process.kill()
