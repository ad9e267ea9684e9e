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
import urllib.request

READY = 60


class Skipped(Exception):
    """Why a check cannot be done on this machine."""


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
        killed = []

        def strike():
            # One that was killed a moment ago has no process yet, or still the one that is gone.
            for one in self.workers():
                if worker in (None, one["id"]) and one["pid"] and not killed:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one["pid"], signal.SIGKILL)
                        killed.append(one["id"])
            return killed

        self.wait(strike, 10, "a worker to kill")
        return killed[0]

    def deaths(self):
        return sum(w["deaths"] for w in self.workers())

    @contextlib.contextmanager
    def dies(self, times=1):
        """Within, so many workers are killed, no more and no fewer, and Hotcell tells so."""
        before = self.deaths()
        yield
        self.wait(lambda: self.deaths() >= before + times, 10, f"told of {times} deaths")
        assert self.deaths() == before + times, (self.deaths(), before, times)
        self.wait(self.is_ready, 30, "ready again")

    def running(self):
        """Requests in the workers' batches."""
        return sum(w["running_requests"] for w in self.workers())

    def metrics(self):
        """The values of `/metrics`, by name and labels as they stand there."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))}

    def freed(self, leave, seconds=1.0, tokens=64, model="kjv"):
        """A line that tells how soon after `leave()`, by which the client of the only request goes, its place is free; in that
        time no more than so many tokens are made, one a step."""
        busy = [f'hotcell_requests_{state}{{model="{model}"}}' for state in ("running", "waiting")]
        whole = f'hotcell_requests_total{{model="{model}",end="length"}}'
        made = f'hotcell_generated_tokens_total{{model="{model}"}}'
        before = self.metrics()
        assert sum(before[name] for name in busy) == 1, "it does not run"
        leave()
        left = time.monotonic()
        while True:
            now = self.metrics()
            took = time.monotonic() - left
            if not any(now[name] for name in busy):
                break
            assert took < seconds, f"its place is not free within {seconds} s of its client's leaving"
            time.sleep(0.002)
        assert now.get(whole) == before.get(whole), "it was over before its client left"
        steps = now[made] - before[made]
        assert steps <= tokens, f"{steps:.0f} more tokens were made after its client had left"
        return f"free after {took * 1e3:.0f} ms and {steps:.0f} tokens"

    @contextlib.contextmanager
    def full(self, branches=64):
        """Within, the model `narrow`, which is kjv's files again, may have one request at once, and has one. Needs a
        short `--queue-timeout`."""
        if "narrow" not in self.command("models"):
            files = pathlib.Path(__file__).resolve().parent.parent.parent / "deploy" / "models" / "kjv"
            self.command("load", str(files), "--name", "narrow", "--max-running", str(branches))
        asked = {"model": "narrow", "prompt": "In the beginning", "max_tokens": 1000, "n": branches, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            # Each has its place for good once it has a token: to be tokenised is a place too, but a short one.
            missing = set(range(branches))
            for line in answer:
                if line.startswith(b"data: {"):
                    missing -= {choice["index"] for choice in json.loads(line[6:]).get("choices", [])}
                if not missing:
                    break
            assert not missing, f"{missing} of those that were to fill it began nothing"
            began = time.monotonic()
            try:
                yield "narrow"
            finally:
                # Whatever went wrong in there is no news if it was not full.
                if (now := self.running()) != branches:
                    took = time.monotonic() - began
                    ended = f"what filled it ended so: {answer.read()[-600:]}"
                    raise AssertionError(f"it was not full all the time, but has {now} after {took:.1f} s; {ended}")
            answer.close()
        self.wait(lambda: self.running() == 0, 10, "free")
        self.command("unload", "narrow")


def readme(cell, client):
    """What README's table says to point a client here, with this Hotcell's addresses."""
    return readme_all(cell, client)[0]


def readme_all(cell, client):
    """All that stands in code's letters there."""
    text = (pathlib.Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
    told = re.findall(rf"^\| {re.escape(client)}[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    assert len(told) == 1, (client, told)
    lines = re.findall("`([^`]*)`", told[0])
    return [line.replace("127.0.0.1:8080", cell.http).replace("127.0.0.1:4100", cell.grpc) for line in lines]


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
            except Skipped as why:
                print(f"   skipped {name}: {why}", flush=True)
            except Exception:  # noqa: BLE001 - whatever it was, the others are run too
                failed += 1
                print(f"   FAILED {name}\n{traceback.format_exc()}", flush=True)
                print("   log: " + "\n   log: ".join(cell.log().splitlines()[-10:]), flush=True)
    sys.exit(1 if failed else 0)
