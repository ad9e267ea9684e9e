# packages: openai==2.54.0 grpcio==1.76.0 grpcio-reflection==1.76.0
"""Hosts that are full, and tenants that have all they may have: who comes then is told so at once, and nobody else notices."""
import atexit
import http.client
import json
import os
import pathlib
import re
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

import grpc
import openai

import hotcell
import rpc

PROMPT = "In the beginning"
LONG = {"model": "kjv", "prompt": PROMPT, "max_tokens": 200, "temperature": 0.8, "stream": True, "extra_body": {"ignore_eos": True}}
SHORT = {"model": "kjv", "prompt": PROMPT, "max_tokens": 2}
made = {}


def client(cell, key="none", retries=0):
    return openai.OpenAI(base_url=f"{cell.url}/v1", api_key=key, max_retries=retries, timeout=120)


def running(cell):
    return sum(w["running_requests"] for w in cell.workers())


def texts(stream):
    """The text of each continuation."""
    told = {}
    for chunk in stream:
        for choice in chunk.choices:
            told[choice.index] = told.get(choice.index, "") + choice.text
    return told


def refused(call):
    """That a call is turned away for now, in OpenAI's form; and how."""
    try:
        call()
        raise AssertionError("it went through")
    except openai.RateLimitError as error:
        assert error.status_code == 429 and int(error.response.headers["retry-after"]) > 0, error.response.headers
        assert error.body["type"] == "rate_limit_error" and error.body["message"], error.body
        return error.body["code"]


def refused_over_grpc(cell, metadata=()):
    channel = grpc.insecure_channel(cell.grpc)
    asked = {"model": "kjv", "prompt": {"text": PROMPT}, "max_tokens": 2}
    try:
        list(rpc.Methods(cell).call(channel, "hotcell.v1.Tokens/Generate", asked, metadata=list(metadata), timeout=60))
        raise AssertionError("it went through")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and error.details(), error
        # As over HTTP, and in the form that clients of gRPC look for.
        told = dict(error.trailing_metadata())
        assert int(told["retry-after"]) > 0 and b"google.rpc.RetryInfo" in told["grpc-status-details-bin"], told
    finally:
        channel.close()


def fill(cell, count):
    """Requests for 64 continuations each, of which a worker takes four, that go on for as long as anybody needs them."""
    return [client(cell).completions.create(**{**LONG, "max_tokens": 900}, n=64) for _ in range(count)]


def check_a_full_host(cell):
    c = client(cell)
    calm = texts(c.completions.create(**LONG, n=64, seed=3))
    fillers = fill(cell, 3)
    join = hotcell.in_background(lambda: texts(c.completions.create(**LONG, n=64, seed=3)))
    cell.wait(lambda: running(cell) >= 256, 60, "full")
    word = refused(lambda: c.completions.create(**SHORT))
    assert refused(lambda: c.completions.create(**SHORT, stream=True)) == word
    chat = [{"role": "user", "content": PROMPT}]
    assert refused(lambda: c.chat.completions.create(model="kjv", messages=chat, max_tokens=2)) == word
    refused_over_grpc(cell)
    for filler in fillers:
        filler.close()
    assert join() == calm and len(calm) == 64
    assert client(cell).completions.create(**SHORT).choices[0].text
    return f"{word}; 64 continuations equal"


def check_a_client_that_comes_again_gets_in(cell):
    """OpenAI's own client waits as long as it is told to."""
    fillers = fill(cell, 4)
    cell.wait(lambda: running(cell) >= 256, 60, "full")
    join = hotcell.in_background(lambda: client(cell, retries=5).completions.create(**SHORT))
    refused(lambda: client(cell).completions.create(**SHORT))
    for filler in fillers:
        filler.close()
    assert join().choices[0].text


def memory(cell):
    """Bytes that the scheduler has in memory, and that it had at most."""
    told = pathlib.Path(f"/proc/{cell.process.pid}/status").read_text()
    return tuple(int(re.search(rf"{name}:\s+(\d+) kB", told)[1]) << 10 for name in ("VmRSS", "VmHWM"))


def check_memory_stays_where_it_is(cell):
    """Many more requests than there is room for, each with a megabyte that nobody reads: all are told to come again."""
    body = json.dumps({**SHORT, "user": "x" * (1 << 20)}).encode()
    told, lock = {}, threading.Lock()

    def one():
        # As gateways do, over a connection that is kept. One that was never answered would not be borne for long.
        host, port = cell.http.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read()
        for _ in range(16):
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            what = answer.status, int(answer.headers["retry-after"] or 0) > 0
            with lock:
                told[what] = told.get(what, 0) + 1
        connection.close()

    fillers = fill(cell, 4)
    try:
        cell.wait(lambda: running(cell) >= 256, 60, "full")
        # What is made once is made by now.
        one()
        before, _ = memory(cell)
        began = time.monotonic()
        joins = [hotcell.in_background(one) for _ in range(64)]
        most = before
        while not all_done(joins):
            most = max(most, memory(cell)[0])
            time.sleep(0.02)
        took = time.monotonic() - began
        assert running(cell) > 200, "it was not full all the time"
    finally:
        for filler in fillers:
            filler.close()
    assert set(told) == {(429, True)}, told
    grew = most - before
    assert grew < 128 << 20, f"{grew >> 20} MiB more for 64 requests at once"
    count = told[(429, True)]
    return f"{count} requests of 1 MiB refused within {took:.0f} s, 64 at once: {grew / (1 << 20):.0f} MiB more than before at most"


def check_a_connection_for_each_call(cell):
    """Who connects anew for each call is told to come again each time, and is not shut out for it."""
    told, lock = {}, threading.Lock()

    def one():
        for _ in range(20):
            request = urllib.request.Request(f"{cell.url}/v1/completions", json.dumps({**SHORT, "model": "narrow"}).encode())
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    what = answer.status, False
            except urllib.error.HTTPError as error:
                what = error.code, int(error.headers["retry-after"] or 0) > 0
            except OSError as error:
                what = repr(error), False
            with lock:
                told[what] = told.get(what, 0) + 1

    with cell.full():
        for join in [hotcell.in_background(one) for _ in range(16)]:
            join()
        assert client(cell).completions.create(**SHORT).choices[0].text
    assert told == {(429, True): 320}, told
    return "320 calls, each by a connection of its own"


def all_done(joins):
    for join in joins:
        try:
            join(0)
        except TimeoutError:
            return False
    return True


def check_a_deadline_that_passes_in_the_queue(_):
    """Time in the queue counts: who waits longer than it may is told so then, and never gets to a worker."""
    with hotcell.Hotcell("--queue-timeout", "60s") as host, host.full() as model:
        told = rpc.Methods(host)
        asked = {"model": model, "prompt": {"text": PROMPT}, "max_tokens": 2}
        queued = "hotcell_requests_queued"
        with grpc.insecure_channel(host.grpc) as channel:
            began = time.monotonic()
            try:
                list(told.call(channel, "hotcell.v1.Tokens/Generate", asked, timeout=0.4))
                raise AssertionError("it went through")
            except grpc.RpcError as error:
                took = time.monotonic() - began
                assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and 0.35 < took < 2, (error, took)
            host.wait(lambda: host.metrics()[queued] == 0, 2, "rid of it in the queue")
        body = {"text_input": PROMPT, "parameters": {"max_tokens": 2, "timeout": 400_000}}
        began = time.monotonic()
        try:
            urllib.request.urlopen(urllib.request.Request(f"{host.url}/v2/models/{model}/generate", json.dumps(body).encode()), timeout=60)
            raise AssertionError("it went through")
        except urllib.error.HTTPError as error:
            assert error.code == 504 and time.monotonic() - began < 2, error
        # Who leaves the queue is forgotten, too.
        try:
            client(host).with_options(timeout=0.4).completions.create(model=model, prompt=PROMPT, max_tokens=2)
            raise AssertionError("it went through")
        except openai.APITimeoutError:
            host.wait(lambda: host.metrics()[queued] == 0, 2, "rid of it in the queue")
        return f"told after {took * 1e3:.0f} ms of 400"


def tenants():
    """A host whose tenant `small` may have 64 requests at once."""
    if "tenants" not in made:
        made["folder"] = folder = pathlib.Path(tempfile.mkdtemp(prefix="hotcell-tokens-"))
        lines, made["keys"] = ["[tenants.small]\nrequests = 64\n"], {}
        for name in ("small", "large"):
            command = [str(pathlib.Path(os.environ["HOTCELL_BIN_DIR"]) / "hotcell"), "token", "new", name]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            made["keys"][name], rest = told.split("\n", 1)
            lines.append(rest)
        (folder / "tokens.toml").write_text("\n".join(lines))
        (folder / "tokens.toml").chmod(0o600)
        made["tenants"] = hotcell.Hotcell("--tokens", str(folder / "tokens.toml")).__enter__()
        atexit.register(made["tenants"].__exit__)
    return made["tenants"], made["keys"]


def check_a_tenants_limit(_):
    host, keys = tenants()
    small, large = client(host, keys["small"]), client(host, keys["large"])
    calm = texts(large.completions.create(**LONG, seed=3))
    all_it_may = small.completions.create(**{**LONG, "max_tokens": 900}, n=64)
    host.wait(lambda: running(host) >= 64, 60, "busy with all that the tenant may have")
    other = hotcell.in_background(lambda: texts(large.completions.create(**LONG, seed=3)))
    word = refused(lambda: small.completions.create(**SHORT))
    refused_over_grpc(host, [("authorization", f"Bearer {keys['small']}")])
    assert other() == calm
    all_it_may.close()
    host.wait(lambda: running(host) == 0, 10, "free")
    assert small.completions.create(**SHORT).choices[0].text
    return word


hotcell.main(globals(), "--queue-timeout", "300ms")
