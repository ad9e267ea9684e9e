"""What passes through a proxy before two hosts of Hotcell, over HTTP and gRPC, with a configuration of `deploy/`.

Hosts serve TLS and ask for tokens, as they have to where a proxy is on another host. A script says how its proxy is started,
and how many requests of those of `rows` may be lost.
"""
import atexit
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import ssl
import subprocess
import tempfile
import time
import uuid

import grpc

import certificates
import hotcell
import rpc

DEPLOY = pathlib.Path(__file__).resolve().parent.parent.parent / "deploy"
FLAGS = ["--restart-backoff", "1ms", "--queue-timeout", "300ms"]
PROMPT = "In the beginning"
LONG = {"model": "kjv", "prompt": PROMPT, "temperature": 0, "max_tokens": 800, "ignore_eos": True}
GENERATE = "hotcell.v1.Tokens/Generate"
made = {}


def flags(budget="1000", delay=None):
    folder, _ = certificates.secrets()
    return [*FLAGS, *(["--drain-delay", delay] if delay else []), "--restart-budget", budget, "--tls-cert", f"{folder}/cert.pem", "--tls-key", f"{folder}/key.pem", "--tokens", f"{folder}/tokens.toml"]


def key():
    return f"Bearer {certificates.secrets()[1]}"


def host(**more):
    """One more host; who makes it ends it."""
    return hotcell.Hotcell(*flags(**more))


def second():
    """The other host of most checks."""
    if "second" not in made:
        made["second"] = host().__enter__()
        atexit.register(made["second"].__exit__)
    return made["second"]


class Proxy:
    """A proxy with the configuration of this name, its addresses changed for those of this test."""

    def __init__(self, start, name, cells):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="proxy-"))
        self.folder.chmod(0o755)
        self.told = None
        self.http, self.grpc = hotcell.free_port(), hotcell.free_port()
        self.config = self.folder / name
        self.config.write_text(self.changed((DEPLOY / name).read_text(), cells))
        with open(self.folder / "out.log", "ab") as log:
            self.process = subprocess.Popen(start(self), stdout=log, stderr=log, start_new_session=True)
        atexit.register(self.end)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc}", [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)])
        until = time.monotonic() + 15
        while not self.is_up():
            if self.process.poll() is not None or time.monotonic() > until:
                logs = "\n".join(path.read_text() for path in self.folder.glob("*log"))
                raise RuntimeError(f"the proxy does not serve ({self.told}):\n{logs[-4000:]}")
            time.sleep(0.1)

    def changed(self, text, cells):
        assert len(cells) == 2
        ports = {"8000": self.http, "4000": self.grpc}
        text = re.sub(r"(127\.0\.0\.1(?::|, port_value: ))(8000|4000)\b", lambda m: m[1] + str(ports[m[2]]), text)
        lines = []
        for line in text.splitlines():
            for number, cell in enumerate(cells, 1):
                named = f"192.0.2.{number}"
                if named in line:
                    http_port, grpc_port = (address.rsplit(":", 1)[1] for address in (cell.http, cell.grpc))
                    line = line.replace(named, "127.0.0.1").replace("8080", http_port).replace("4100", grpc_port)
            lines.append(line)
        text = "\n".join(lines) + "\n"
        assert "192.0.2." not in text and "/etc/hotcell/ca.pem" in text
        return text.replace("/etc/hotcell/ca.pem", f"{certificates.secrets()[0]}/ca.pem")

    def is_up(self):
        """Both hosts are in: the proxies that look for themselves have seen them."""
        try:
            for _ in range(4):
                self.told = ask(self, "GET", "/readyz")[0], health(self).status
                if self.told != (200, 1):
                    return False
            return True
        except (OSError, http.client.HTTPException, grpc.RpcError) as error:
            self.told = error
            return False

    def end(self):
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ask(proxy, method, path, body=None, timeout=60):
    """Status, headers and bytes of one request over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=timeout)
    try:
        data = json.dumps(body) if isinstance(body, dict) else body
        connection.request(method, path, data, {"authorization": key(), "content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


class Stream:
    """A completion over SSE, read line by line as it comes; may be left before its end."""

    def __init__(self, connection, **body):
        self.connection = connection
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": True, **body}),
                           {"authorization": key(), "content-type": "application/json"})
        self.answer = connection.getresponse()
        assert self.answer.status == 200, (self.answer.status, self.answer.read())

    def __iter__(self):
        for line in self.answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield "".join(choice["text"] for choice in event["choices"])
            elif line.startswith(b"data: [DONE]"):
                return

    def close(self):
        self.answer.close()
        self.connection.close()


def stream(proxy, **body):
    return Stream(http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=60), **body)


def filler(cell, n=64):
    """A request for so many continuations that goes to a host by itself."""
    context = ssl.create_default_context(cafile=f"{certificates.secrets()[0]}/ca.pem")
    context.check_hostname = False
    address, port = cell.http.split(":")
    return Stream(http.client.HTTPSConnection(address, int(port), timeout=60, context=context), n=n, max_tokens=900, temperature=1)


def methods():
    if "methods" not in made:
        made["methods"] = rpc.Methods(second())
    return made["methods"]


def call(proxy, method, body, **options):
    options = {"timeout": 60, "metadata": [("authorization", key())], **options}
    return methods().call(proxy.channel, method, body, **options)


def health(proxy):
    return call(proxy, "grpc.health.v1.Health/Check", {}, timeout=5)


def generate(proxy, tokens=800, **options):
    body = {"model": "kjv", "prompt": {"text": PROMPT}, "sampling": {"temperature": 0}, "max_tokens": tokens, "ignore_eos": True}
    return call(proxy, GENERATE, body, **options)


def text(events, each=None):
    """The text that a stream of events tells; `each` hears of its pieces."""
    told, pieces = "", 0
    for event in events:
        if event.WhichOneof("event") == "delta":
            told += event.delta.text
            if each:
                each(pieces)
            pieces += 1
    return told


def running(*cells):
    return sum(w["running_requests"] for cell in cells for w in cell.workers())


def kill_busy(cells, killed):
    """SIGKILL to a worker that has a request."""
    for cell in cells:
        for worker in cell.workers():
            if worker["running_requests"] and worker["pid"]:
                os.kill(worker["pid"], signal.SIGKILL)
                killed.append(worker["id"])
                return


def calm(cell):
    """What the long request gives, from a host itself."""
    if "calm" not in made:
        made["calm"] = cell.command("generate", "--model", "kjv", PROMPT, "--temperature", "0", "--max-tokens", "800", "--ignore-eos").removesuffix("\n")
    return made["calm"]


def lost(count, one):
    """How many of so many calls fail; and how."""
    failed = []
    for _ in range(count):
        try:
            one()
        except grpc.RpcError as error:
            failed.append(error.code().name)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            failed.append(type(error).__name__)
    return failed


def grpc_call(proxy, timeout=60):
    return lambda: text(generate(proxy, 4, timeout=timeout))


def http_call(proxy, timeout=60):
    def one():
        status, _, body = ask(proxy, "POST", "/v1/completions", {**LONG, "max_tokens": 4}, timeout)
        assert status == 200, (status, body)

    return one


def vllm_call(proxy, timeout=60):
    """As routers call engines of vLLM: token ids in, one answer."""
    def one():
        sampling = {"maxTokens": 4, "temperature": 0, "ignoreEos": True}
        body = {"requestId": uuid.uuid4().hex, "tokenized": {"inputIds": [0, 5, 6, 7]}, "samplingParams": sampling}
        told = list(call(proxy, "vllm.grpc.engine.VllmEngine/Generate", body, timeout=timeout))
        assert len(told[-1].complete.output_ids) == 4, told

    return one


# gRPC first: a proxy that looks for itself may know better by the time that the others come.
WAYS = {"vLLM's gRPC": vllm_call, "Hotcell's gRPC": grpc_call, "HTTP": http_call}


def row(proxy, count, allowed, timeout=60, ways=tuple(WAYS)):
    """So many requests in each of these ways, of which that many may be lost: the proxies' table is of gRPC."""
    failed = {way: lost(count, WAYS[way](proxy, timeout)) for way in ways}
    told = f"lost of {count}: " + ", ".join(f"{len(words)} ({way})" for way, words in failed.items())
    assert all(len(words) <= allowed for words in failed.values()), f"{told}; at most {allowed}: {failed}"
    return told


def noticed(proxy, allowed):
    """Requests at once, and after a while, in which a proxy that looks for itself has seen that a host is not ready."""
    at_once = row(proxy, 20, allowed[0])
    time.sleep(2)
    return f"{at_once}; two seconds later {row(proxy, 20, allowed[1])}"


def end_quietly(cell):
    """Ends a host that may be stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(cell.process.pid, signal.SIGCONT)
    cell.__exit__()


def checks(start, config, check_config, rows):
    """The checks of a proxy. `start(proxy)` gives its command line, `check_config(path)` that which checks a configuration;
    `rows` says how many requests may be lost where."""

    def proxy(cell):
        if "proxy" not in made:
            # If it does not serve, the other checks need not wait for it once more.
            made["proxy"] = None
            made["proxy"] = Proxy(start, config, [cell, second()])
        assert made["proxy"], "the proxy does not serve"
        return made["proxy"]

    @contextlib.contextmanager
    def beside(cell, **more):
        """Another host beside this one, and a proxy before both."""
        other = host(**more).__enter__()
        try:
            yield Proxy(start, config, [cell, other]), other
        finally:
            end_quietly(other)

    def check_configuration(cell):
        done = subprocess.run(check_config(proxy(cell)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def check_split(cell):
        both = [cell, second()]
        calls = {"HTTP": http_call(proxy(cell)), "gRPC": grpc_call(proxy(cell))}
        told = []
        for name, one in calls.items():
            before = [served(c) for c in both]
            failed = lost(20, one)
            assert not failed, failed
            parts = [served(c) - b for c, b in zip(both, before)]
            assert sum(parts) == 20 and min(parts) >= 5, (name, parts)
            told.append(f"{name} {parts[0]}:{parts[1]}")
        return ", ".join(told)

    def served(cell):
        """Requests that a host has answered."""
        context = ssl.create_default_context(cafile=f"{certificates.secrets()[0]}/ca.pem")
        context.check_hostname = False
        connection = http.client.HTTPSConnection(*cell.http.split(":"), timeout=10, context=context)
        connection.request("GET", "/metrics", headers={"authorization": key()})
        told = connection.getresponse().read().decode()
        connection.close()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in told.splitlines() if line.startswith("hotcell_requests_total{"))

    def check_streams_are_whole(cell):
        pieces = list(stream(proxy(cell)))
        assert "".join(pieces) == calm(cell) and len(pieces) > 50, len(pieces)
        counted = []
        assert text(generate(proxy(cell)), counted.append) == calm(cell) and len(counted) > 50, len(counted)
        return f"{len(pieces)} pieces over HTTP, {len(counted)} over gRPC"

    def check_nothing_waits_in_the_proxy(cell):
        """The first piece is here while the request still runs; who leaves then frees its place."""
        both = [cell, second()]
        began = stream(proxy(cell), n=16, max_tokens=900, temperature=1)
        next(iter(began))
        assert running(*both) == 16
        began.close()
        cell.wait(lambda: running(*both) == 0, 5, "free of a stream over HTTP whose client is gone")
        called = generate(proxy(cell), 900)
        for _ in range(2):
            next(called)
        assert running(*both) == 1
        called.cancel()
        cell.wait(lambda: running(*both) == 0, 5, "free of a stream over gRPC whose client is gone")

    def check_deadline(cell):
        try:
            text(generate(proxy(cell), 900, timeout=0.1))
            raise AssertionError("900 tokens within 0.1 s")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
        cell.wait(lambda: running(cell, second()) == 0, 5, "free of a request past its deadline")

    def check_errors(cell):
        status, headers, body = ask(proxy(cell), "POST", "/v1/completions", {**LONG, "model": "nobody"})
        assert status == 404 and "nobody" in json.loads(body)["error"]["message"], (status, body)
        status, _, body = ask(proxy(cell), "POST", "/v1/completions", {**LONG, "temperature": -1})
        assert status == 400, (status, body)
        for wrong, code in [({"model": "nobody"}, "NOT_FOUND"), ({"sampling": {"temperature": -1}}, "INVALID_ARGUMENT")]:
            try:
                list(call(proxy(cell), GENERATE, {"model": "kjv", "prompt": {"text": PROMPT}, "max_tokens": 1, **wrong}))
                raise AssertionError(f"{wrong} went through")
            except grpc.RpcError as error:
                assert error.code().name == code and error.details(), error
        try:
            health_of = call(proxy(cell), "hotcell.v1.Control/ListModels", {}, metadata=[])
            raise AssertionError(f"without a token: {health_of}")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED, error

    def check_eight_megabytes(cell):
        # White space before a body's end is no part of a prompt, which may have 4 MiB.
        body = json.dumps({**LONG, "max_tokens": 4}).encode()
        status, _, told = ask(proxy(cell), "POST", "/v1/completions", body[:-1] + b" " * (8 << 20) + b"}")
        assert status == 200, (status, told)
        # Too much. A client that writes on after that was said may hear no more than that the connection is closed.
        with contextlib.suppress(ConnectionError):
            status, _, told = ask(proxy(cell), "POST", "/v1/completions", body[:-1] + b" " * (17 << 20) + b"}")
            assert status == 413, (status, told)
        # What a server does not know it skips.
        asked = methods().message("hotcell.v1.TokenizeRequest")()
        asked.ParseFromString(b"\xf2\x3f" + varint(8 << 20) + bytes(8 << 20))
        asked.model = "kjv"
        asked.prompt.text = PROMPT
        ids = call(proxy(cell), "hotcell.v1.Tokens/Tokenize", asked)
        assert asked.ByteSize() > 8 << 20 and ids.ListFields(), asked.ByteSize()

    def check_worker_killed_in_the_middle(cell):
        both, killed, tries = [cell, second()], [], 0
        before = sum(c.deaths() for c in both)

        def strike(number):
            # As soon as something has come: the rest may be there in a moment.
            if number == 1 and len(killed) < 4:
                kill_busy(both, killed)

        while len(killed) < 4:
            tries += 1
            assert tries <= 20, f"{killed} in {tries} tries"
            told = ""
            for number, piece in enumerate(stream(proxy(cell))):
                told += piece
                strike(number)
            assert told == calm(cell)
            told = text(generate(proxy(cell)), strike)
            assert told == calm(cell)
        cell.wait(lambda: sum(c.deaths() for c in both) >= before + 4, 10, "told of four deaths")
        assert sum(c.deaths() for c in both) == before + 4
        return "4 workers killed, every token there"

    def check_host_killed_in_the_middle(cell):
        """A host, not a worker: the stream cannot go on, and its client hears of it."""
        with beside(cell) as (front, other):
            while True:
                called = generate(front, 900)
                for _ in range(3):
                    next(called)
                if running(other):
                    break
                called.cancel()
                cell.wait(lambda: running(cell) == 0, 5, "free")
            os.killpg(other.process.pid, signal.SIGKILL)
            try:
                text(called)
                raise AssertionError("the stream ended well")
            except grpc.RpcError as error:
                assert error.code().name in rows["dies"], error
                return error.code().name

    def check_idle_host_killed(cell):
        with beside(cell) as (front, other):
            lost(4, grpc_call(front))
            os.killpg(other.process.pid, signal.SIGKILL)
            other.process.wait()
            return row(front, 27, rows["killed"])

    def check_host_stopped(cell):
        with beside(cell) as (front, other):
            lost(4, grpc_call(front))
            os.kill(other.process.pid, signal.SIGSTOP)
            return row(front, 10, rows["stopped"], timeout=5, ways=("vLLM's gRPC", "HTTP"))

    def check_host_full(cell):
        fillers = [filler(second()) for _ in range(4)]
        try:
            cell.wait(lambda: running(second()) >= 256, 30, "full")
            told = row(proxy(cell), 20, rows["full"])
            assert running(second()) > 200, "it was not full all the time"
            return told
        finally:
            for begun in fillers:
                begun.close()
            cell.wait(lambda: running(second()) == 0, 30, "free")

    def check_host_without_a_worker(cell):
        with beside(cell, budget="1") as (front, other):
            while other.workers()[0]["state"] != "quarantined":
                with contextlib.suppress(IndexError, ProcessLookupError):
                    other.kill_worker()
                time.sleep(0.1)
            return noticed(front, rows["unavailable"])

    def check_host_drained(cell):
        """SIGTERM: what runs ends well, what comes goes to the other host."""
        with beside(cell) as (front, other):
            begun = filler(other, n=4)
            next(iter(begun))
            done = hotcell.in_background(lambda: sum(len(piece) for piece in begun))
            other.process.send_signal(signal.SIGTERM)
            told = noticed(front, rows["unavailable"])
            assert done() > 0
            assert other.process.wait(40) == 0
            return told + "; " + row(front, 20, rows["killed"]) + " after it was gone"

    def check_host_drained_after_notice(cell):
        """SIGTERM with `--drain-delay`: a host that says for a while that it is not ready, and still serves, is missed by nobody."""
        with beside(cell, delay="4s") as (front, other):
            lost(4, grpc_call(front))
            other.process.send_signal(signal.SIGTERM)
            began, count, failed = time.monotonic(), 0, []
            while time.monotonic() < began + 6:
                for one in WAYS.values():
                    count += 1
                    failed += lost(1, one(front))
            assert other.process.wait(40) == 0
            assert len(failed) <= rows["killed"], failed
            return f"lost of {count}: {len(failed)}"

    quick = bool(os.environ.get("HOTCELL_QUICK"))
    all_ = {name: check for name, check in locals().items() if name.startswith("check_") and name != "check_config"}
    # What needs hosts of its own takes long.
    return {name: check for name, check in all_.items() if not (quick and "_host_" in name)}


def varint(number):
    """A number as protobuf writes it."""
    told = bytearray()
    while number > 127:
        told.append(number & 127 | 128)
        number >>= 7
    return bytes(told) + bytes([number])
