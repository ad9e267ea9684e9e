"""Starts Hotcell for a script of this folder, and runs the script's checks.

A script defines functions named `check_...`, each with one argument, the running Hotcell, and ends with
`hotcell.main(globals())`. A check passes if it returns; it may return a line to be printed.
"""
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

READY = 60


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Hotcell:
    """A scheduler of its own in a temporary folder, with the bundled model `kjv`; gone at the end."""

    def __init__(self, *flags, devices="cpu:1", env=None):
        self.bin = pathlib.Path(os.environ["HOTCELL_BIN_DIR"])
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="hotcell-"))
        self.socket = self.folder / "hotcell.sock"
        self.grpc = f"127.0.0.1:{free_port()}"
        self.http = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.http}"
        self.log_path = self.folder / "log"
        self.flags = ["--devices", devices, *flags]
        self.env = {**os.environ, "HOTCELL_SOCKET": str(self.socket), **(env or {})}
        self.process = None

    def __enter__(self):
        command = [str(self.bin / "hotcell"), "serve", "--listen", self.grpc, "--http", self.http, *self.flags]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)
        try:
            self.wait(lambda: self.is_ready(), READY, "ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait(self, met, seconds, what):
        until = time.monotonic() + seconds
        while not met():
            if self.process.poll() is not None:
                raise RuntimeError(f"the scheduler ended with {self.process.returncode}:\n{self.log()[-4000:]}")
            if time.monotonic() > until:
                raise TimeoutError(f"not {what} within {seconds} s:\n{self.log()[-4000:]}")
            time.sleep(0.05)

    def command(self, *args, check=True):
        """The output of `hotcell ARGS`."""
        done = subprocess.run([str(self.bin / "hotcell"), *args], env=self.env, capture_output=True, text=True)
        if check and done.returncode != 0:
            raise RuntimeError(f"hotcell {' '.join(args)}: {done.stderr}")
        return done.stdout

    def workers(self):
        return json.loads(self.command("ps", "--json"))["workers"]

    def is_ready(self):
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            workers = self.workers()
            return bool(workers) and all(w["state"] == "ready" and w["models"] for w in workers)
        return False

    def kill_worker(self, worker=None):
        """SIGKILL to a worker; its id."""
        chosen = [w for w in self.workers() if worker in (None, w["id"]) and w["pid"]]
        os.kill(chosen[0]["pid"], signal.SIGKILL)
        return chosen[0]["id"]

    def deaths(self):
        return sum(w["deaths"] for w in self.workers())


def readme(cell, client):
    """What README's table says to point a client here, with this Hotcell's addresses."""
    text = (pathlib.Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
    told = re.findall(rf"^\| {re.escape(client)}[^|]*\| `([^`]*)`", text, re.MULTILINE)
    assert len(told) == 1, (client, told)
    return told[0].replace("127.0.0.1:8080", cell.http).replace("127.0.0.1:4100", cell.grpc)


def in_background(work, *args):
    """Runs `work` on a thread; the returned function waits for it and gives its result, or raises what it raised."""
    box = {}

    def body():
        try:
            box["result"] = work(*args)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            box["error"] = error

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def join(seconds=120):
        thread.join(seconds)
        if thread.is_alive():
            raise TimeoutError("the call did not end")
        if "error" in box:
            raise box["error"]
        return box["result"]

    return join


def main(names, *flags, **options):
    """Runs every check of a script against one Hotcell, all of them even if one fails."""
    checks = [(n.removeprefix("check_"), f) for n, f in names.items() if n.startswith("check_")]
    only = sys.argv[1:]
    unknown = [name for name in only if name not in dict(checks)]
    if unknown or not checks:
        sys.exit(f"no check named {', '.join(unknown)}; there are {', '.join(name for name, _ in checks)}")
    failed = 0
    with Hotcell(*flags, **options) as cell:
        for name, check in checks:
            if only and name not in only:
                continue
            began = time.monotonic()
            try:
                told = check(cell)
                print(f"   ok     {name} ({time.monotonic() - began:.1f} s){': ' + told if told else ''}", flush=True)
            except Exception:  # noqa: BLE001 - whatever it was, the others are run too
                failed += 1
                print(f"   FAILED {name}\n{traceback.format_exc()}", flush=True)
                print("   log: " + "\n   log: ".join(cell.log().splitlines()[-10:]), flush=True)
    sys.exit(1 if failed else 0)
