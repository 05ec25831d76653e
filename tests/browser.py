"""A headless Chromium, driven over its DevTools pipe. No package is needed, only the browser.

    apt-get install chromium
"""
import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
FOUND = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """with Browser(folder) as b: b.open(path); b.js("1 + 1"). folder: for its profile.

    said: what came on the console, and errors. asked: every address that was asked for.
    """

    def __init__(self, folder: Path):
        (mine, theirs), (answers, says) = os.pipe(), os.pipe()
        os.set_inheritable(mine, True)
        os.set_inheritable(says, True)

        def as_3_and_4():
            kept = os.dup(says)
            os.dup2(mine, 3)
            os.dup2(kept, 4)

        self.process = subprocess.Popen(
            [FOUND, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             f"--user-data-dir={folder}", "--disable-dev-shm-usage", "--hide-scrollbars"],
            close_fds=False, preexec_fn=as_3_and_4, stderr=subprocess.DEVNULL)
        os.close(mine)
        os.close(says)
        self.input, self.output = os.fdopen(theirs, "wb", 0), os.fdopen(answers, "rb")
        self.left, self.number, self.session = b"", 0, None
        self.said, self.asked = [], []

    def __enter__(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call(
            "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in "Page", "Runtime", "Network", "Log":
            self.call(f"{name}.enable")
        return self

    def __exit__(self, *error):
        self.input.close()
        self.process.terminate()
        self.process.wait()
        self.output.close()

    def call(self, method: str, **params) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.input.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.note(answer)

    def read(self) -> dict:
        while b"\0" not in self.left:
            more = self.output.read1(1 << 20)
            assert more, "the browser has ended"
            self.left += more
        message, _, self.left = self.left.partition(b"\0")
        return json.loads(message)

    def note(self, event: dict):
        method, params = event.get("method"), event.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded",
                      "Page.javascriptDialogOpening"):
            self.said.append(json.dumps(params)[:1000])
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def js(self, code: str):
        """The value of an expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True,
                          returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def size(self, width: int, height: int = 900, scheme: str = "light"):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path) -> float:
        """A page of tools/report.py → the milliseconds until it is complete."""
        self.said.clear()
        self.asked.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        return float(self.js("""new Promise(done => { const look = () =>
            document.body?.dataset.ready ? done(document.body.dataset.ready) : setTimeout(look, 20);
            look(); })"""))

    def key(self, name: str):
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Tab": 9}[name]
        for kind in "rawKeyDown", "keyUp":
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                      windowsVirtualKeyCode=code)

    def picture(self, path: Path, whole: bool = False):
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": size | {"x": 0, "y": 0, "scale": 1}, "captureBeyondViewport": True}
        found = self.call("Page.captureScreenshot", format="png", **clip)
        path.write_bytes(base64.b64decode(found["data"]))
