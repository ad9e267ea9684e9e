# packages: prometheus-client==0.26.0 opentelemetry-proto==1.45.2 grpcio==1.76.0 grpcio-reflection==1.76.0
# quick
"""Who looks on: Prometheus' own parser, a collector of OpenTelemetry, probes, and web pages; each as README says to point it here."""
import concurrent.futures
import http.client
import json
import pathlib
import re
import shlex
import threading
import time
import urllib.error
import urllib.request

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from prometheus_client import parser

import hotcell
import rpc

DEPLOY = pathlib.Path(__file__).resolve().parent.parent.parent / "deploy"
PROMPT = "In the beginning"


def post(cell, path, body, **headers):
    request = urllib.request.Request(cell.url + path, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, answer.read()


def busy(cell):
    """Some of all that is counted."""
    for body in ({}, {"temperature": -1}, {"max_tokens": 300, "ignore_eos": True, "stream": True}):
        try:
            post(cell, "/v1/completions", {"model": "kjv", "prompt": PROMPT, "max_tokens": 20, **body})
        except urllib.error.HTTPError as error:
            assert error.code == 400, error
    begun = hotcell.in_background(lambda: post(cell, "/v1/completions", {"model": "kjv", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}))
    with cell.dies():
        cell.wait(lambda: cell.running() == 1, 10, "running")
        cell.kill_worker()
        begun()


def check_prometheus(cell):
    """Its own parser reads every line, and finds each metric of the reference page, of its kind and with its labels."""
    busy(cell)
    with urllib.request.urlopen(hotcell.readme(cell, "Prometheus")) as answer:
        text, kind = answer.read().decode(), answer.headers["content-type"]
    assert kind.startswith("text/plain") and "version=0.0.4" in kind, kind
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    samples = [s for f in families.values() for s in f.samples]
    # Nothing was left out, and nothing is there twice.
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(samples) == len(lines) == len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}), (len(samples), len(lines))
    assert all(f.type != "unknown" and f.documentation for f in families.values()), [f for f in families.values() if f.type == "unknown" or not f.documentation]
    page = re.findall(r"^\| `([^`]+)` \| (?:`([^`]+)`|-) \| (\w+) \| (.*?) \|", (DEPLOY / "METRICS.md").read_text(), re.MULTILINE)
    assert len(page) > 30, page
    count = 0
    for name, vllm, kind, labels in page:
        wanted = set(re.findall("`([^`]+)`", labels))
        for told in filter(None, (name, vllm)):
            family = families.get(told.removesuffix("_total") if kind == "counter" else told)
            assert family and family.type == kind, (told, kind, family and family.type)
            if told == name:
                assert {frozenset(set(s.labels) - {"le"}) for s in family.samples} <= {frozenset(wanted)}, (name, family.samples[:2])
            count += 1
    for family in families.values():
        if family.type == "histogram":
            rising(family)
    value = {(s.name, s.labels.get("end")): s.value for s in samples if s.labels.get("model") == "kjv"}
    assert value["hotcell_requests_total", "length"] >= 3 and value["hotcell_requests_total", "INVALID_SAMPLING"] == 1, value
    assert value["hotcell_continuations_total", None] == 1 and value["hotcell_request_seconds_count", None] >= 3
    return f"{len(families)} families, {len(samples)} values, {count} names of the page"


def rising(family):
    """Buckets that hold no fewer than those below, the last of which holds all."""
    by = {}
    for sample in family.samples:
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        by.setdefault((sample.name.removeprefix(family.name), labels), []).append((sample.labels.get("le"), sample.value))
    for (kind, labels), values in by.items():
        if kind == "_bucket":
            edges = [float(le) for le, _ in values]
            counts = [count for _, count in values]
            assert edges == sorted(edges) and edges[-1] == float("inf") and counts == sorted(counts), (family.name, values)
            assert counts[-1] == by["_count", labels][0][1], family.name


class Collector(otlp_grpc.TraceServiceServicer):
    """Takes what it is sent."""

    def __init__(self):
        self.spans, self.lock = [], threading.Lock()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request, context):  # noqa: N802 - as the protocol says it
        with self.lock:
            for of in request.resource_spans:
                resource = {a.key: a.value.string_value for a in of.resource.attributes}
                self.spans += [(resource, span) for scope in of.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def trace(self, id):
        with self.lock:
            return [span for _, span in self.spans if span.trace_id.hex() == id]


def attributes(span):
    def plain(value):
        return getattr(value, value.WhichOneof("value"))

    return {a.key: plain(a.value) for a in span.attributes}


def check_states_of_models(cell):
    """One state at a time, the same by command and by metrics: asleep, awake with the first request, and asleep again."""
    def state():
        told, = (m for m in json.loads(cell.command("models", "--json"))["models"] if m["name"] == "drowsy")
        return told["state"], len(told["workers"])

    def measured():
        mine = {name: value for name, value in cell.metrics().items() if name.startswith('hotcell_model_state{model="drowsy"')}
        assert len(mine) == 6 and sorted(mine.values()) == [0, 0, 0, 0, 0, 1], mine
        return next(re.search('state="(.*)"', name)[1] for name, value in mine.items() if value)

    cell.command("load", str(DEPLOY / "models" / "kjv"), "--name", "drowsy", "--on-request", "--keep-alive", "2s")
    assert state() == ("asleep", 0) and measured() == "asleep", (state(), measured())
    assert cell.command("generate", "In the beginning", "--model", "drowsy", "--max-tokens", "4")
    assert state() == ("loaded", 1) and measured() == "loaded", (state(), measured())
    cell.wait(lambda: state() == ("asleep", 0) and measured() == "asleep", 20, "asleep again")
    cell.command("unload", "drowsy")
    assert "drowsy" not in str(cell.metrics())


def check_opentelemetry(cell):
    """A request's trace goes on from its client's, through the scheduler into each worker that it had, and comes to a collector."""
    collector = Collector()
    words = shlex.split(hotcell.readme(cell, "OpenTelemetry").replace("127.0.0.1:4317", f"127.0.0.1:{collector.port}"))
    assert words[:2] == ["hotcell", "serve"], words
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with hotcell.Hotcell(*words[2:]) as host:
        body = {"model": "kjv", "prompt": PROMPT, "max_tokens": 400, "temperature": 0.5, "ignore_eos": True}
        with host.dies():
            join = hotcell.in_background(lambda: post(host, "/v1/completions", body, traceparent=f"00-{trace}-{parent}-01"))
            host.wait(lambda: host.running() == 1, 10, "running")
            host.kill_worker()
            headers, _ = join()
        version, told, own, _ = headers["traceparent"].split("-")
        assert (version, told) == ("00", trace), headers["traceparent"]
        host.wait(lambda: any(not s.parent_span_id or s.parent_span_id.hex() == parent for s in collector.trace(trace)), 20, "through with the trace")
        time.sleep(1)
        spans = collector.trace(trace)
        root, = (s for s in spans if s.parent_span_id.hex() == parent)
        assert root.span_id.hex() == own and root.name == "text_completion kjv", root
        of = attributes(root)
        assert of["gen_ai.operation.name"] == "text_completion" and of["gen_ai.request.model"] == "kjv", of
        assert of["gen_ai.usage.output_tokens"] == 400 and of["gen_ai.request.max_tokens"] == 400, of
        names = [s.name for s in spans]
        assert [s.parent_span_id for s in spans if s.name == "worker"].count(root.span_id) == 2, names
        assert {"admission", "tokenize", "placement", "prefill", "decode"} <= set(names), names
        assert [e.name for e in root.events].count("worker_died") == 1, root.events
        ids = {s.span_id for s in spans}
        assert all(s.parent_span_id in ids for s in spans if s is not root), "a span without its parent"
        assert all(root.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in spans)
        # No word of prompt or answer is among it.
        assert not any("beginning" in str(s) for s in spans)
        assert not collector.trace("1" * 32)
        post(host, "/v1/completions", {**body, "max_tokens": 2}, traceparent=f"00-{'1' * 32}-{parent}-00")
        time.sleep(2)
        assert not collector.trace("1" * 32), "its client does not record the trace"
        assert host.metrics()["hotcell_spans_sent_total"] >= len(spans) and host.metrics()["hotcell_spans_dropped_total"] == 0
    collector.server.stop(None)
    return f"{len(spans)} spans: {', '.join(sorted(set(names)))}"


def check_probes(cell):
    live, ready, health = hotcell.readme_all(cell, "probes")
    for path in (live, ready):
        with urllib.request.urlopen(cell.url + path) as answer:
            assert answer.status == 200, path
    with grpc.insecure_channel(cell.grpc) as channel:
        told = rpc.Methods(cell).call(channel, f"{health}.Health/Check", {}, timeout=10)
    assert told.status == 1, told


def page(address, method, path, origin, body=None, **headers):
    """As a browser calls for a page from `origin`."""
    host, port = address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request(method, path, body, {"origin": origin, **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def check_web_pages(cell):
    """Pages of the origin that is named may call and read, gRPC-Web and the HTTP APIs; others may not."""
    url, flag = hotcell.readme_all(cell, "web pages")
    assert url == cell.url, url
    origin = shlex.split(flag)[1]
    with hotcell.Hotcell(*shlex.split(flag)) as host:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,authorization,x-grpc-web"}
        status, headers, _ = page(host.http, "OPTIONS", "/v1/completions", origin, **asked)
        assert status in (200, 204) and headers["access-control-allow-origin"] == origin, headers
        assert "authorization" in headers["access-control-allow-headers"] and "POST" in headers["access-control-allow-methods"], headers
        body = json.dumps({"model": "kjv", "prompt": PROMPT, "max_tokens": 2})
        status, headers, told = page(host.http, "POST", "/v1/completions", origin, body, **{"content-type": "application/json"})
        assert status == 200 and headers["access-control-allow-origin"] == origin and json.loads(told)["choices"], (status, told)
        # A message of no bytes, in its frame.
        frame = {"content-type": "application/grpc-web+proto", "x-grpc-web": "1"}
        status, headers, told = page(host.http, "POST", "/hotcell.v1.Control/ListModels", origin, b"\0\0\0\0\0", **frame)
        assert status == 200 and headers["access-control-allow-origin"] == origin and b"kjv" in told, (status, told)
        assert b"grpc-status:0" in told.replace(b" ", b"") or headers["grpc-status"] == "0", told
        for stranger in ("https://evil.example", "https://app.example.com.evil.example", "http://app.example.com", "null"):
            for path, data, more in (("/v1/completions", body, {"content-type": "application/json"}), ("/hotcell.v1.Control/ListModels", b"\0\0\0\0\0", frame)):
                status, headers, told = page(host.http, "POST", path, stranger, data, **more)
                assert status == 403 and headers["access-control-allow-origin"] is None, (stranger, path, status, told)
            _, headers, _ = page(host.http, "OPTIONS", "/v1/completions", stranger, **asked)
            assert headers["access-control-allow-origin"] is None, (stranger, headers)


def check_every_client_of_the_table_is_run(_):
    """Each line of README's table is read by a script of this folder."""
    folder = pathlib.Path(__file__).resolve().parent
    text = (folder.parent.parent / "README.md").read_text()
    table = text.split("| client | point it here |\n|---|---|\n")[1].split("\n\n")[0]
    clients = [row.split("|")[1].strip() for row in table.splitlines()]
    read = set()
    for script in folder.glob("check_*.py"):
        read |= set(re.findall(r'readme(?:_all)?\(\w+, f?"([^"{]+)', script.read_text()))
    missing = [client for client in clients if not any(client.startswith(name) for name in read)]
    assert len(clients) > 10 and not missing, missing
    return f"{len(clients)} clients"


def check_the_table_of_checks_is_true(_):
    """README.md beside this file names checks that there are, for each client something in each column."""
    folder = pathlib.Path(__file__).resolve().parent
    known = {p.stem.removeprefix("check_"): set(re.findall(r"def check_(\w+)\(", p.read_text())) for p in folder.glob("check_*.py")}
    shared = set(re.findall(r"def check_(\w+)\(", (folder / "proxied.py").read_text()))
    for proxy in ("envoy", "nginx", "haproxy"):
        known[proxy] |= shared
    text = (folder / "README.md").read_text()
    rows = [row.split("|")[2:-1] for row in text.split("| client | script |")[1].split("\n\n")[0].splitlines()[2:]]
    count = 0
    for script, *cells in rows:
        own = script.strip().strip("`")
        assert len(cells) == 7 and all(cell.strip() for cell in cells), (own, cells)
        for name in re.findall("`([^`]+)`", " ".join(cells)):
            where, what = name.split(".") if "." in name else (own, name)
            assert what in known[where], f"{where} has no check {what}"
            count += 1
    named = {script for script in known if f"`{script}`" in text or f"`{script}." in text}
    assert named == set(known), set(known) - named
    return f"{count} checks of {len(rows)} clients"


hotcell.main(globals())
