"""A headless Chromium through ChromeDriver's HTTP interface (W3C WebDriver), nothing installed."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# as few connections as possible: the page must not need any
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


class Browser:
    """One browser window of a given width; ``mobile`` makes it a phone."""

    def __init__(self, profile, width, height, mobile=False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        options = {
            "binary": CHROMIUM,
            "args": [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"],
        }
        if mobile:
            metrics = {"width": width, "height": height, "pixelRatio": 2.0}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._wait_until_ready()
        created = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{created['sessionId']}"

    def _wait_until_ready(self):
        deadline = time.monotonic() + 30
        while True:
            try:
                if self._send("GET", "/status")["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, "chromedriver does not answer"
                time.sleep(0.05)

    def _send(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        self._send("POST", f"{self.session}/url", {"url": url})

    def run(self, script):
        return self._send("POST", f"{self.session}/execute/sync", {"script": script, "args": []})

    def console(self):
        return self._send("POST", f"{self.session}/se/log", {"type": "browser"})

    def screenshot(self):
        return base64.b64decode(self._send("GET", f"{self.session}/screenshot"))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        try:
            self._send("DELETE", self.session)
        finally:
            self.process.terminate()
            self.process.wait()
