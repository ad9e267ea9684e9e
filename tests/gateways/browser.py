"""A headless Chromium without a driver: its DevTools protocol over two pipes (https://chromedevtools.github.io/devtools-protocol)."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time


class Browser:
    """One page. What it complained of is in `complaints`, what it asked for in `asked`."""

    def __init__(self, dark=False):
        self.folder = tempfile.mkdtemp(prefix="chromium-")
        (theirs_in, self.out), (self.back, theirs_out) = os.pipe(), os.pipe()

        def fds():
            # High ones first, so that neither is overwritten.
            high = [os.dup2(fd, number) for fd, number in ((theirs_in, 103), (theirs_out, 104))]
            for fd, number in zip(high, (3, 4)):
                os.dup2(fd, number)

        command = [
            "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={self.folder}", "--window-size=1280,1600", "about:blank",
        ]
        self.process = subprocess.Popen(
            command, preexec_fn=fds, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.rest, self.number, self.session = b"", 0, None
        self.complaints, self.asked = [], []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")
        scheme = "dark" if dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.back)
        shutil.rmtree(self.folder, ignore_errors=True)

    def message(self, until):
        while b"\0" not in self.rest:
            if not select.select([self.back], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("Chromium says nothing")
            more = os.read(self.back, 1 << 20)
            if not more:
                raise RuntimeError("Chromium is gone")
            self.rest += more
        one, self.rest = self.rest.split(b"\0", 1)
        return json.loads(one)

    def note(self, said):
        method, about = said.get("method"), said.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(about["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(about["entry"]["text"] + " " + about["entry"].get("url", ""))
        elif method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])

    def send(self, method, **params):
        self.number += 1
        asked = {"id": self.number, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.out, json.dumps(asked).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            said = self.message(until)
            if said.get("id") == self.number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                return said["result"]
            self.note(said)

    def open(self, url):
        self.send("Page.navigate", url=url)

    def js(self, code):
        done = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{code}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, code, seconds, what):
        """Until this is true in the page."""
        until = time.monotonic() + seconds
        while not self.js(f"!!({code})"):
            if time.monotonic() > until:
                raise TimeoutError(f"not {what} within {seconds} s; it shows:\n{self.js('document.body.innerText')[:3000]}\n{self.complaints}")
            time.sleep(0.1)

    def press(self, key, text=None):
        code = {"Tab": 9, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            down = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **down)

    def tree(self):
        """What a screen reader is told: roles with names."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        seen = [n for n in nodes if not n.get("ignored")]
        return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in seen]

    def screenshot(self, path):
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))
