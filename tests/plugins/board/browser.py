"""A headless Chromium, driven through a pipe (DevTools Protocol) by the standard library alone."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium")
MISSING = None if CHROMIUM else "needs chromium (Debian's package)"
SECONDS = 60  # for one answer of the browser


class Browser:
    """One window; ``close`` ends it."""

    def __init__(self, width=1280, height=900):
        self.folder = tempfile.mkdtemp(prefix="chromium")
        (asked, self.asking), (self.hearing, said) = os.pipe(), os.pipe()
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-dev-shm-usage", f"--user-data-dir={self.folder}", "--lang=en-US"]
        words += ["--no-first-run", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(  # the browser's ends of the pipes are 3 and 4
            ["/bin/bash", "-c", f'exec "$0" "$@" 3<&{asked} 4>&{said}', CHROMIUM, *words],
            pass_fds=(asked, said),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(asked)
        os.close(said)
        self.number, self.rest, self.session, self.severe = 0, b"", None, []
        self.loads = 0
        page = next(t for t in self._targets() if t["type"] == "page")
        attached = self.cdp("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.cdp(f"{domain}.enable")
        self.cdp("Emulation.setFocusEmulationEnabled", enabled=True)
        self.size(width, height)

    def _targets(self):
        end = time.monotonic() + SECONDS
        while not (found := self.cdp("Target.getTargets")["targetInfos"]):
            assert time.monotonic() < end
            time.sleep(0.05)
        return found

    def size(self, width, height, *, phone=False):
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def cdp(self, method, **params):
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.asking, data) :]
        while (found := self._hear()).get("id") != self.number:
            self._note(found)
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def _hear(self):
        end = time.monotonic() + SECONDS
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.hearing], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self.hearing, 1 << 20)
            assert data, "the browser has ended"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loads += 1
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", "")
            self.severe.append(f"{details['text']} {thrown}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.severe.append(f"{params['entry'].get('url', '')} {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.severe.append(" ".join(str(one.get("value")) for one in params["args"]))

    def open(self, url):
        """Go there, and wait until the page is loaded."""
        before = self.loads
        found = self.cdp("Page.navigate", url=url)
        assert "errorText" not in found, found
        while "loaderId" in found and self.loads == before:  # else only the part after # differs
            self._note(self._hear())

    def run(self, script, *values):
        """The value of a script's ``return``."""
        call = f"(function () {{ {script} }}).apply(null, {json.dumps(values)})"
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.cdp("Runtime.evaluate", expression=call, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self):
        return self.run("return document.body.innerText")

    def wait(self, script, *values, seconds=20):
        """The first value of a script that is true in JavaScript; an element is None."""
        inner = f"const v = (function () {{ {script} }}).apply(null, arguments);"
        inner += "return [Boolean(v), v instanceof Node ? null : v]"
        end = time.monotonic() + seconds
        while not (found := self.run(inner, *values))[0]:
            assert time.monotonic() < end, f"not within {seconds} s: {script}\n{self.text()}"
            time.sleep(0.1)
        return found[1]

    def wait_for(self, words, seconds=20):
        self.wait("return document.body.innerText.includes(arguments[0])", words, seconds=seconds)

    def click(self, words, tag="button,a"):
        """Click the first visible element with this text."""
        self.wait(
            "const e = [...document.querySelectorAll(arguments[0])].find("
            "e => e.innerText.trim() === arguments[1] && e.offsetParent && !e.disabled);"
            "if (e) e.click(); return Boolean(e)",
            tag,
            words,
        )

    def errors(self):
        """What the console has of errors since the last time."""
        self.run("return 1")  # what was said before is heard before
        found, self.severe = self.severe, []
        return found

    def picture(self, path, *, whole=False):
        """Write a PNG of the window, or of the whole page."""
        options = {"captureBeyondViewport": True} if whole else {}
        if whole:
            size = self.cdp("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {**{k: size[k] for k in ("x", "y", "width", "height")}, "scale": 1}
        data = self.cdp("Page.captureScreenshot", format="png", **options)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        try:
            self.session = None
            self.cdp("Browser.close")
        finally:
            os.close(self.asking)
            os.close(self.hearing)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
            shutil.rmtree(self.folder, ignore_errors=True)
