# node: @bufbuild/buf==1.75.0
# quick
"""buf's curl, which knows nothing of Hotcell but what reflection tells."""
import json
import os
import shlex
import signal
import subprocess

import hotcell

PROMPT = "In the beginning"


def buf(cell, method, body=None, *flags):
    """Exit code, the JSON values that came, and what it complained of."""
    command = ["buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", *flags, f"http://{cell.grpc}{method}"]
    if body is not None:
        command += ["-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def values(told):
    reader, found, at = json.JSONDecoder(), [], 0
    while told[at:].strip():
        at += len(told[at:]) - len(told[at:].lstrip())
        value, at = reader.raw_decode(told, at)
        found.append(value)
    return found


def check_services_and_methods_are_listed(cell):
    code, told, error = buf(cell, "", None, "--list-services")
    assert code == 0, error
    services = set(told.split())
    assert {"hotcell.v1.Tokens", "hotcell.v1.Control", "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine",
            "grpc.health.v1.Health"} <= services, services
    code, told, error = buf(cell, "", None, "--list-methods")
    methods = set(told.split())
    assert code == 0 and {"hotcell.v1.Tokens/Generate", "inference.GRPCInferenceService/ModelInfer"} <= methods, (error, methods)
    return f"{len(services)} services, {len(methods)} methods"


def check_unary(cell):
    code, told, error = buf(cell, "/hotcell.v1.Control/ListModels", {})
    assert code == 0 and [m["name"] for m in values(told)[0]["models"]] == ["kjv"], (told, error)
    code, told, error = buf(cell, "/inference.GRPCInferenceService/ServerMetadata", {})
    assert code == 0 and values(told)[0]["name"], (told, error)
    code, told, error = buf(cell, "/inference.GRPCInferenceService/ModelMetadata", {"name": "kjv"})
    assert code == 0 and [i["name"] for i in values(told)[0]["inputs"]], (told, error)
    code, told, error = buf(cell, "/grpc.health.v1.Health/Check", {})
    assert code == 0 and values(told) == [{"status": "SERVING"}], (told, error)


def check_grpc_web(cell):
    """At the door for HTTP, over HTTP/1.1, as a browser would."""

    def web(method, body):
        command = ["buf", "curl", "--protocol", "grpcweb", f"http://{cell.http}{method}", "-d", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, values(done.stdout), done.stderr

    code, told, error = web("/hotcell.v1.Control/ListModels", {})
    assert code == 0 and [m["name"] for m in told[0]["models"]] == ["kjv"], (told, error)
    asked = {"model": "kjv", "prompt": {"text": PROMPT}, "sampling": {"temperature": 0}, "max_tokens": 9}
    code, told, error = web("/hotcell.v1.Tokens/Generate", asked)
    assert code == 0 and "accepted" in told[0] and "finished" in told[-1], (told, error)
    code, told, error = web("/hotcell.v1.Tokens/Generate", {**asked, "model": "nobody"})
    assert code != 0 and "no model is called nobody" in error, (told, error)


def check_stream(cell):
    asked = {"model": "kjv", "prompt": {"text": PROMPT}, "sampling": {"temperature": 0}, "max_tokens": 40}
    code, told, error = buf(cell, "/hotcell.v1.Tokens/Generate", asked)
    events = values(told)
    assert code == 0 and "accepted" in events[0] and "finished" in events[-1], (events, error)
    assert text(events) == cell.command("generate", "--model", "kjv", PROMPT, "--temperature", "0", "--max-tokens", "40").removesuffix("\n")
    return f"{len(events)} events"


def check_errors(cell):
    for method, body, word in [
        ("/hotcell.v1.Tokens/Generate", {"model": "nobody", "prompt": {"text": PROMPT}}, "not_found"),
        ("/hotcell.v1.Tokens/Generate", {"model": "kjv", "prompt": {"text": PROMPT}, "sampling": {"temperature": -1}}, "invalid_argument"),
        ("/inference.GRPCInferenceService/ModelMetadata", {"name": "nobody"}, "not_found"),
    ]:
        code, told, error = buf(cell, method, body)
        assert code != 0 and json.loads(error)["code"] == word and json.loads(error)["message"], (code, told, error)


LONG = {"model": "kjv", "prompt": {"text": PROMPT}, "sampling": {"temperature": 0.9}, "seed": 4, "max_tokens": 800, "ignore_eos": True}


def check_structured_output(cell):
    schema = {"type": "object", "properties": {"name": {"enum": ["Adam", "Eve"]}}, "required": ["name"], "additionalProperties": False}
    asked = {**LONG, "ignore_eos": False, "grammar": {"json_schema": json.dumps(schema)}}
    code, told, error = buf(cell, "/hotcell.v1.Tokens/Generate", asked)
    assert code == 0 and json.loads(text(values(told)))["name"] in ("Adam", "Eve"), (told, error)


def text(events):
    return "".join(event["delta"].get("text", "") for event in events if "delta" in event)


def check_cancel(cell):
    """It has no way to leave but to end."""
    command = ["buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", f"http://{cell.grpc}/hotcell.v1.Tokens/Generate"]
    process = subprocess.Popen([*command, "-d", json.dumps({**LONG, "max_tokens": 1000})], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def leave():
        # As it comes from npm it is a script that runs the program.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    try:
        assert process.stdout.readline()
        cell.wait(lambda: cell.running() == 1, 10, "running")
        return cell.freed(leave)
    finally:
        if process.poll() is None:
            leave()


def check_overload(cell):
    with cell.full() as model:
        code, told, error = buf(cell, "/hotcell.v1.Tokens/Generate", {"model": model, "prompt": {"text": PROMPT}, "max_tokens": 2})
        assert code != 0 and json.loads(error)["code"] == "resource_exhausted", (told, error)


def check_worker_killed(cell):
    """By the time that the stream is over, its worker is another one."""
    def generate():
        code, told, error = buf(cell, "/hotcell.v1.Tokens/Generate", LONG)
        assert code == 0, error
        return text(values(told)), told

    calm, _ = generate()
    with cell.dies():
        join = hotcell.in_background(generate)
        cell.wait(lambda: cell.running() > 0, 10, "running")
        cell.kill_worker()
        said, told = join()
    assert said == calm and "survived" in told, "the stream was over before its worker was killed"


def check_readme(cell):
    done = subprocess.run(shlex.split(hotcell.readme(cell, "buf")), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and values(done.stdout)[0]["models"][0]["name"] == "kjv", done


hotcell.main(globals(), "--queue-timeout", "200ms")
