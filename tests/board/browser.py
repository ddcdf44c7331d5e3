"""A headless Chromium, driven through WebDriver with the standard library alone."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs chromium and chromedriver (Debian's packages)"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window; ``close`` ends it."""

    def __init__(self, width=1280, height=900):
        self.folder = tempfile.mkdtemp(prefix="chromium")
        self.driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self.driver.stdout:
            if found := re.search(r"on port (\d+)\.", line):
                break
        self.address = f"http://127.0.0.1:{found[1]}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += ["--disable-dev-shm-usage", f"--user-data-dir={self.folder}", "--lang=en-US"]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {
            "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        }
        session = self._ask("POST", "/session", {"capabilities": wanted})
        self.session = f"/session/{session['sessionId']}"
        self.size(width, height)

    def size(self, width, height, *, phone=False):
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def cdp(self, method, **params):
        return self._ask(
            "POST", f"{self.session}/goog/cdp/execute", {"cmd": method, "params": params}
        )

    def open(self, url):
        self._ask("POST", f"{self.session}/url", {"url": url})

    def run(self, script, *values):
        """The value of a script's ``return``."""
        return self._ask(
            "POST", f"{self.session}/execute/sync", {"script": script, "args": list(values)}
        )

    def text(self):
        return self.run("return document.body.innerText")

    def wait(self, script, *values, seconds=20):
        """The first true value of a script."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *values)):
            assert time.monotonic() < end, f"not within {seconds} s: {script}\n{self.text()}"
            time.sleep(0.1)
        return found

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
        found = self._ask("POST", f"{self.session}/se/log", {"type": "browser"})
        return [one["message"] for one in found if one["level"] == "SEVERE"]

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
            self._ask("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(10)
            self.driver.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            self.address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None
