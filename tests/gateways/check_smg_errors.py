# packages: smg==1.13.0 openai==2.54.0
# programs: openssl
"""What SMG makes of a host that refuses, is full, is gone, stands still or is back: its table of errors, with Hotcell as its engine.

For each row of that table the status that SMG's client hears, how often SMG tried and how long it took; none may be worse than
before engines of vLLM's protocol that do nothing else. Some rows cannot be had: SMG sends no deadline (504), Hotcell ends no call of
this protocol with ABORTED (409), and SMG 1.13 shows neither token nor certificate that a role could be taken from (403).
"""
import atexit
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import openai

import certificates
import check_smg as driven
import hotcell

FLAGS = driven.FLAGS
BODY = {"model": "kjv", "messages": [{"role": "user", "content": driven.PROMPT}], "max_tokens": 4, "temperature": 0}
# What waits is told so after 300 ms, five times.
QUEUE = 5 * 0.3


def host(*more):
    return hotcell.Hotcell(*FLAGS, *more)


def tries(smg):
    """How often it tried so far beyond the first time."""
    return smg.metric("smg_worker_retries_total", worker_type="regular", endpoint="chat")


def row(smg, status, most, seconds, **more):
    """A line of the table: this status, after so many tries at most, within so many seconds."""
    before, began = tries(smg), time.monotonic()
    got, said = smg.post("/v1/chat/completions", {**BODY, **more})
    took = time.monotonic() - began
    count = 1 + tries(smg) - before
    assert got == status, (got, said)
    assert count <= most and took < seconds, (count, took, said)
    return f"{got}, {count:.0f} {'try' if count == 1 else 'tries'} in {took:.2f} s"


def gone(cell):
    """Kills a whole host, its workers with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(cell.process.pid, signal.SIGKILL)
    cell.process.wait()


def again(cell, *flags):
    """The same host, at the same addresses, with other flags."""
    gone(cell)
    cell.flags = [*cell.flags[:2], *FLAGS, *flags]
    cell.__enter__()


def check_smg_speaks_no_tls_to_engines(_):
    """Before an engine at `grpcs://` it opens connections and ends them without a greeting. Once it greets, hosts with certificates
    are to be checked here."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as engine:
        engine.settimeout(60)
        port = hotcell.free_port()
        command = [str(pathlib.Path(sys.executable).parent / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(hotcell.free_port()), "--worker-urls", f"grpcs://127.0.0.1:{engine.getsockname()[1]}"]
        smg = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            told = []
            while len(told) < 3:
                connection, _ = engine.accept()
                with contextlib.closing(connection):
                    connection.settimeout(10)
                    told.append(connection.recv(3))
        finally:
            smg.kill()
            smg.wait()
    # The other thing it says is what it asks engines that speak HTTP.
    assert set(told) <= {b"", b"GET"} and b"" in told, told


def check_invalid_argument(cell):
    return row(driven.one(cell), 400, 1, 2, regex="(")


def check_not_found_unimplemented_and_unauthenticated(_):
    """A host that lost its model; that speaks another protocol from now on; that asks for tokens from now on."""
    with host() as other:
        smg = driven.Smg(other)
        other.command("unload", "kjv")
        told = [f"without its model {row(smg, 404, 1, 2)}"]
        again(other, "--protocols", "openai")
        until(smg, lambda status: status == 501)
        told.append(f"without the protocol {row(smg, 501, 1, 2)}")
        again(other, "--tokens", f"{certificates.secrets()[0]}/tokens.toml")
        until(smg, lambda status: status == 401)
        told.append(f"with tokens {row(smg, 401, 1, 2)}")
        again(other)
        served = until(smg, lambda status: status == 200)
        return "; ".join([*told, f"served {served:.1f} s after it was back as it had been"])


def until(smg, met, seconds=60):
    """How long it takes until requests come to such a status."""
    began = time.monotonic()
    while not met(smg.post("/v1/chat/completions", BODY)[0]):
        assert time.monotonic() - began < seconds, smg.log()[-2000:]
        time.sleep(0.2)
    return time.monotonic() - began


def check_resource_exhausted(cell):
    """It is tried again, here five times, and told as 429; the breaker does not open for it."""
    smg, fillers = driven.one(cell), []
    own = openai.OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=120)
    full = {**BODY, "n": 64, "max_tokens": 900, "temperature": 1.0, "stream": True, "extra_body": {"ignore_eos": True}}
    refused = 'hotcell_requests_total{model="kjv",end="OVERLOADED"}'
    try:
        fillers += [own.chat.completions.create(**full) for _ in range(8)]
        cell.wait(lambda: cell.running() >= 512, 60, "full")
        before = cell.metrics().get(refused, 0)
        told = row(smg, 429, 5, QUEUE + 2)
        assert cell.metrics()[refused] - before == 5
        for _ in range(3):
            row(smg, 429, 5, QUEUE + 2)
        assert smg.metric("smg_worker_cb_state") == 0, "the breaker is open"
    finally:
        for filler in fillers:
            filler.close()
    cell.wait(lambda: cell.running() == 0, 30, "free")
    return f"{told}; then {row(smg, 200, 1, 5)}"


def check_internal(_):
    """A request under which one worker after another dies is at fault, and told so. SMG makes it anew, as it does with any
    whole answer that breaks off, five times in all; a stream, of which its client has heard, it does not."""
    with host("--suspect-after", "2") as other:
        smg = driven.Smg(other)
        stop = threading.Event()

        def strike():
            while not stop.is_set():
                with contextlib.suppress(Exception):
                    for worker in other.workers():
                        # One that is on its way has none yet, and 0 is this script's own group.
                        if worker["running_requests"] and worker["pid"]:
                            os.kill(worker["pid"], signal.SIGKILL)

        join, told = hotcell.in_background(strike), []
        poisoned = 'hotcell_requests_total{model="kjv",end="REQUEST_POISONED"}'
        try:
            for stream, most in ((False, 5), (True, 1)):
                before, deaths = other.metrics().get(poisoned, 0), other.deaths()
                more = {**BODY, "max_tokens": 900, "ignore_eos": True, "stream": stream}
                if stream:
                    try:
                        for _ in smg.client.chat.completions.create(**{**BODY, "max_tokens": 900}, extra_body={"ignore_eos": True}, stream=True):
                            pass
                        raise AssertionError("the stream ended well")
                    except openai.APIError as error:
                        assert "stream_error" in (error.type, (error.body or {}).get("type")) or error.status_code == 500, error
                else:
                    status, said = smg.post("/v1/chat/completions", more)
                    assert status == 500, (status, said)
                count = other.metrics()[poisoned] - before
                assert 1 <= count <= most, count
                told.append(f"{'a stream' if stream else 'whole'}: {count:.0f} tries, {other.deaths() - deaths} deaths")
        finally:
            stop.set()
            join()
        other.wait(other.is_ready, 30, "ready again")
        assert row(smg, 200, 1, 5)
        return "; ".join(told)


def quarantined():
    """A host whose only worker died too often: it answers, and has nobody to compute."""
    other = hotcell.Hotcell("--restart-budget", "1", "--restart-backoff", "1ms", "--continue-timeout", "2s", "--queue-timeout", "300ms").__enter__()
    atexit.register(other.__exit__)
    return other


def let_down(other):
    while other.workers()[0]["state"] != "quarantined":
        with contextlib.suppress(IndexError, ProcessLookupError, TypeError):
            other.kill_worker()
        time.sleep(0.1)


def check_unavailable(_):
    """A host without a worker, and one that is gone: five tries within less than a second."""
    other = quarantined()
    smg = driven.Smg(other)
    let_down(other)
    told = [f"without a worker {row(smg, 503, 5, 2)}"]
    gone(other)
    told.append(f"gone {row(smg, 503, 5, 2)}")
    other.__enter__()
    told.append(f"served {until(smg, lambda status: status == 200, 30):.1f} s after it was back")
    other.__exit__()
    return "; ".join(told)


def check_breaker(cell):
    """A host that has nobody to compute is asked no more after ten failures, nobody hears of it, and it is asked again when it may be well."""
    other = quarantined()
    smg = driven.Smg(cell, other, more=["--cb-timeout-duration-secs", "5"])
    let_down(other)
    worker = hotcell.readme(other, "SMG").split()[3]

    def state():
        return smg.metric("smg_worker_cb_state", worker=worker)

    failed = []
    for number in range(60):
        status, said = smg.post("/v1/chat/completions", BODY)
        if status != 200:
            failed.append((number, status, said))
    assert not failed, failed
    failures = smg.metric("smg_worker_cb_outcomes_total", worker=worker, outcome="failure")
    assert state() == 1 and 10 <= failures <= 16, (state(), failures)
    assert smg.metric("smg_worker_cb_state", worker=hotcell.readme(cell, "SMG").split()[3]) == 0
    other.command("release", other.workers()[0]["id"])
    other.wait(other.is_ready, 30, "ready again")
    began = time.monotonic()
    while state() != 0:
        assert smg.post("/v1/chat/completions", BODY)[0] == 200
        assert time.monotonic() - began < 30, state()
        time.sleep(0.1)
    other.__exit__()
    return f"0 of 60 lost, open after {failures:.0f} failures, closed {time.monotonic() - began:.1f} s after it was well"


def check_a_host_that_is_gone_at_rest(cell):
    with host() as other:
        smg = driven.Smg(cell, other)
        gone(other)
        # Not so many that its breaker opens, which has a time of its own.
        failed = sum(smg.post("/v1/chat/completions", BODY)[0] != 200 for _ in range(12))
        assert failed == 0, f"{failed} of 12 failed"
        other.__enter__()
        name, began = 'hotcell_requests_total{model="kjv",end="length"}', time.monotonic()
        while not other.metrics().get(name):
            assert smg.post("/v1/chat/completions", BODY)[0] == 200
            assert time.monotonic() - began < 30, "it is not asked again"
        return f"0 of 12 requests failed; it was asked again {time.monotonic() - began:.1f} s after it was back"


def on(cell, other, smg, **options):
    """A stream on `other`, not on `cell`."""
    for _ in range(8):
        stream = smg.chat(stream=True, max_tokens=900, extra_body={"ignore_eos": True}, **options)
        begun = iter(stream)
        for _ in range(3):
            next(begun)
        if other.running():
            return begun
        stream.close()
        cell.wait(lambda: cell.running() == 0, 10, "free")
    raise AssertionError("no stream came to the host")


def check_a_host_that_is_gone_in_the_middle(cell):
    """Its streams end with an error, those of the other host do not notice, and whole answers are made there anew."""
    calm = driven.streamed(driven.one(cell), count=400)
    with host() as other:
        smg = driven.Smg(cell, other)
        begun = on(cell, other, smg)
        # Two more, of which one is on each host.
        streams = [hotcell.in_background(driven.streamed, smg, driven.PROMPT, 400) for _ in range(2)]
        wholes = [hotcell.in_background(smg.post, "/v1/chat/completions", {**BODY, "max_tokens": 300}) for _ in range(4)]
        cell.wait(lambda: cell.running() and other.running() > 1, 20, "busy")
        began = time.monotonic()
        gone(other)
        try:
            for _ in begun:
                pass
            raise AssertionError("the stream ended well")
        except openai.APIError as error:
            took = time.monotonic() - began
            assert "stream_error" in str(error.body) or error.type == "stream_error", error.body
        ends = []
        for join in streams:
            try:
                assert join() == calm
                ends.append("whole")
            except openai.APIError:
                ends.append("broken")
        assert "whole" in ends, ends
        assert [join()[0] for join in wholes] == [200] * 4
        return f"told after {took:.2f} s; streams {', '.join(ends)}; 4 of 4 whole answers"


def check_a_host_that_is_stopped(cell):
    """Not its workers, which Hotcell would replace: the host. What is there waits until SMG's own patience ends, and succeeds."""
    with host() as other:
        smg = driven.Smg(cell, other)
        os.kill(other.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            joins = [hotcell.in_background(smg.post, "/v1/chat/completions", BODY) for _ in range(4)]
            statuses = [join(120)[0] for join in joins]
            took = time.monotonic() - began
            assert statuses == [200] * 4 and took < 60, (statuses, took)
            # Streams go where somebody answers.
            began = time.monotonic()
            for _ in range(4):
                assert len(driven.streamed(smg, count=20)[0]) == 20
            after = time.monotonic() - began
            assert after < 10, after
        finally:
            os.kill(other.process.pid, signal.SIGCONT)
        return f"4 of 4 answered, the last after {took:.0f} s; four streams after that in {after:.1f} s"


hotcell.main({name: check for name, check in globals().items() if name != "check_smg"}, *FLAGS, devices="cpu:2")
