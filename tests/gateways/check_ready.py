# packages: grpcio==1.76.0 grpcio-reflection==1.76.0
"""Whether a host serves: what probes, gateways and balancers hear while workers stand still, and while the host drains."""
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request

import grpc

import hotcell
import rpc

PROMPT = "In the beginning"
# A worker that stands still is not killed before that, and long before that it is no reason to send anybody here.
FLAGS = ["--hang-timeout", "600s", "--drain-delay", "3s"]
SECONDS = 12
SERVING, NOT_SERVING = 1, 2
HEALTH = "grpc.health.v1.Health"
made = {}


def methods(cell):
    if "methods" not in made:
        made["methods"], made["channel"] = rpc.Methods(cell), grpc.insecure_channel(cell.grpc)
    return made["methods"]


def call(cell, method, body, **options):
    told = methods(cell)
    return told.call(made["channel"], method, body, **{"timeout": 10, **options})


def services(cell):
    """All that health is told of: the host as a whole, and each of its services."""
    if "services" not in made:
        listed = methods(cell).services()
        assert {"hotcell.v1.Tokens", "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"} <= set(listed), listed
        made["services"] = ["", *(name for name in listed if not name.startswith("grpc."))]
    return made["services"]


def http(cell, path, body=None):
    """Status and body."""
    request = urllib.request.Request(cell.url + path, json.dumps(body).encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def heard(cell):
    """What each probe hears."""
    told = {name: call(cell, f"{HEALTH}/Check", {"service": name}).status for name in services(cell)}
    told |= {path: http(cell, path)[0] for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")}
    told["ServerReady"] = call(cell, "inference.GRPCInferenceService/ServerReady", {}).ready
    told["HealthCheck"] = call(cell, "vllm.grpc.engine.VllmEngine/HealthCheck", {}).healthy
    return told


def expected(cell, serves):
    told = {name: SERVING if serves else NOT_SERVING for name in services(cell)}
    # That the process lives has nothing to do with it.
    told |= {"/healthz": 200, "/v2/health/live": 200, "/readyz": 200 if serves else 503, "/v2/health/ready": 200 if serves else 503}
    return told | {"ServerReady": serves, "HealthCheck": serves}


def until(cell, serves, seconds):
    """How long it takes until every probe hears the same."""
    began, wanted = time.monotonic(), expected(cell, serves)
    while (told := heard(cell)) != wanted:
        wrong = {name: value for name, value in told.items() if value != wanted[name]}
        assert time.monotonic() < began + seconds, f"after {seconds} s still {wrong}"
        time.sleep(0.05)
    return time.monotonic() - began


@contextlib.contextmanager
def stopped(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def stream(cell, count=900):
    asked = {"model": "kjv", "prompt": PROMPT, "max_tokens": count, "temperature": 0, "stream": True, "ignore_eos": True}
    return urllib.request.urlopen(urllib.request.Request(f"{cell.url}/v1/completions", json.dumps(asked).encode()), timeout=120)


def text(lines):
    told = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert not any("error" in event for event in told), told[-1]
    return "".join(event["choices"][0]["text"] for event in told)


def check_all_workers_stopped_at_work(cell):
    """Not ready within seconds, and ready again when they go on: with all their tokens."""
    until(cell, True, 5)
    calm = text(stream(cell, 300))
    with cell.dies(0), stream(cell, 300) as answer:
        first = [answer.readline() for _ in range(9)]
        with stopped([w["pid"] for w in cell.workers() if w["pid"]]):
            down = until(cell, False, SECONDS)
        up = until(cell, True, 10)
        assert text([*first, *answer]) == calm
    return f"not ready after {down:.1f} s, ready {up:.1f} s after they went on"


def check_all_workers_stopped_at_rest(cell):
    """A request would get nowhere, though nobody asks."""
    until(cell, True, 5)
    cell.wait(lambda: cell.running() == 0, 10, "idle")
    with cell.dies(0):
        with stopped([w["pid"] for w in cell.workers() if w["pid"]]):
            down = until(cell, False, SECONDS)
        up = until(cell, True, 10)
    return f"not ready after {down:.1f} s, ready {up:.1f} s after they went on"


def check_one_worker_of_two_stopped(cell):
    """Steps still progress, so the host serves; and who comes is not sent to the one that stands still."""
    with cell.dies(0), stopped([w["pid"] for w in cell.workers() if w["pid"]][:1]):
        time.sleep(SECONDS)
        assert heard(cell) == expected(cell, True)
        for _ in range(4):
            status, told = http(cell, "/v1/completions", {"model": "kjv", "prompt": PROMPT, "max_tokens": 4})
            assert status == 200, told


def check_watchers_are_told(cell):
    """Who watches a service hears of each change, without asking."""
    watch = call(cell, f"{HEALTH}/Watch", {"service": "vllm.grpc.engine.VllmEngine"}, timeout=40)
    changes = iter(watch)
    assert next(changes).status == SERVING
    with stopped([w["pid"] for w in cell.workers() if w["pid"]]):
        assert next(changes).status == NOT_SERVING
    assert next(changes).status == SERVING
    watch.cancel()


def check_a_service_that_there_is_not(cell):
    try:
        call(cell, f"{HEALTH}/Check", {"service": "no.such.Service"})
        raise AssertionError("it is known")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.NOT_FOUND, error


def check_drain_delay(_):
    """SIGTERM: not ready at once, and everything that still comes is served; then it ends by itself."""
    with hotcell.Hotcell(*FLAGS) as other:
        made.clear()
        try:
            until(other, True, 5)
            calm = text(stream(other, 300))
            answer = stream(other, 300)
            first = [answer.readline() for _ in range(5)]
            began = time.monotonic()
            other.process.send_signal(signal.SIGTERM)
            told = until(other, False, 1)
            served = 0
            while time.monotonic() < began + 2:
                status, said = http(other, "/v1/completions", {"model": "kjv", "prompt": PROMPT, "max_tokens": 2})
                assert status == 200 and http(other, "/readyz")[0] == 503, said
                served += 1
            assert text([*first, *answer]) == calm
            assert other.process.wait(40) == 0
            took = time.monotonic() - began
            assert 3 <= took < 20, took
            return f"not ready after {told * 1e3:.0f} ms, {served} requests served in the two seconds after, ended after {took:.1f} s"
        finally:
            made.clear()


hotcell.main(globals(), *FLAGS, devices="cpu:2")
