"""A headless Chromium that a test talks to over the DevTools protocol: pages as they are shown."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-quic --remote-debugging-port=0"
)
_STARTUP_S = 60


class Tab:
    """A tab; `events` are what the browser has told of it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._sent = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result."""
        self._sent += 1
        await self._socket.send_json({"id": self._sent, "method": method, "params": params})
        while (answer := await self._next()).get("id") != self._sent:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str, width: int, scheme: str, height: int = 800) -> None:
        """Load a page into a window of this size; `scheme` is `light` or `dark`."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=preferred)
        before = self._num_loaded()
        await self.call("Page.navigate", url=url)
        while self._num_loaded() == before:
            self.events.append(await self._next())

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def press(self, key: str) -> None:
        """Press a key, such as `Tab`."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                            windowsVirtualKeyCode={"Tab": 9, "Enter": 13}[key],
                            **({"text": "\r"} if key == "Enter" else {}))  # fmt: skip

    async def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[Any]:
        """Everything that the console and the log say, and uncaught exceptions."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in methods]

    def requests(self) -> list[str]:
        """Every URL that was asked for."""
        asked = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def _num_loaded(self) -> int:
        return sum(event["method"] == "Page.loadEventFired" for event in self.events)

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=30)
        return message


@contextlib.asynccontextmanager
async def tab(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, with its profile in `folder`."""
    assert CHROMIUM
    with subprocess.Popen(
        [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            address = _wait_for(folder / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{address}/json/list") as answer:
                    pages = json.loads(await answer.text())
                place = next(one for one in pages if one["type"] == "page")
                url = place["webSocketDebuggerUrl"]
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            process.terminate()


def _wait_for(file: Path) -> str:
    """The port in the file that the browser writes when it listens."""
    for _ in range(10 * _STARTUP_S):
        if file.is_file() and file.read_text().strip():
            return file.read_text().split()[0]
        time.sleep(0.1)
    raise AssertionError(f"Chromium wrote no {file} in {_STARTUP_S} s")
