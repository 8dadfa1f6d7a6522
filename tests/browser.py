"""A headless Chromium and its tabs, over the DevTools protocol: what a test of a page needs of them."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--font-render-hinting=none",
]
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
SHIFT = 8
# Becomes the program with two files under the numbers it wants: first out of the way, then to their places.
EXEC = """import fcntl, os, sys
pipe = [fcntl.fcntl(int(file), fcntl.F_DUPFD, 10) for file in sys.argv[1:3]]
os.dup2(pipe[0], 3), os.dup2(pipe[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""


class Browser:
    """Speaks over the pipe that Chromium reads as file 3 and writes as file 4: no port, no other library."""

    def __init__(self, profile: Path, downloads: Path) -> None:
        assert PROGRAM is not None
        self.downloads = downloads
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox root
        command = [PROGRAM, *FLAGS, *sandbox, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXEC, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        self.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(
            self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        )
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, params, answer["error"])
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._read, 1 << 20)
            assert read, "Chromium ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(30)
        os.close(self._write)
        os.close(self._read)


class Tab:
    """One page; what it kept is forgotten when it is closed."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser, self.url = browser, url
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(1280, 800)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def open(self, path: str = "") -> None:
        self.call("Page.navigate", url=self.url + path)
        self.wait("document.readyState === 'complete'")

    def reload(self) -> None:
        self.js("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Its value, awaited."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        """Its value once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < deadline, f"still not true: {expression}\n{self.text('body')}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        return list(
            self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((n) => n.innerText)")
        )

    def count(self, selector: str) -> int:
        return int(self.js(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is seen of it"""
        found = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{found}.scrollIntoView({{block: 'nearest'}})")
        box = self.js(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, is_shifted: bool = False) -> None:
        code, text = KEYS[key]
        event = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": SHIFT if is_shifted else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int, is_phone: bool = False) -> None:
        size = {"width": width, "height": height, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=2 if is_phone else 1, **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def events(self, method: str) -> list[dict[str, Any]]:
        self.js("0")  # what happened before this call is here after it
        own = (event for event in self.browser.events if event.get("sessionId") == self.session)
        return [event["params"] for event in own if event["method"] == method]

    def requests(self) -> list[str]:
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def problems(self) -> list[str]:
        """Errors of scripts, of the console and of the Content-Security-Policy; not a server's refusals"""
        logged = [event["entry"] for event in self.events("Log.entryAdded")]
        problems = [entry["text"] for entry in logged if entry["source"] != "network"]
        problems += [str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")]
        called = self.events("Runtime.consoleAPICalled")
        return problems + [str(event["args"]) for event in called if event["type"] in ("error", "warning")]

    def close(self) -> None:
        self.call("Storage.clearDataForOrigin", origin=self.url, storageTypes="all")
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.events.clear()
