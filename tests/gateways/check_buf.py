# node: @bufbuild/buf==1.75.0
# quick
"""buf's curl, which knows nothing of Hotcell but what reflection tells."""
import json
import shlex
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
    text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    assert text == cell.command("generate", "--model", "kjv", PROMPT, "--temperature", "0", "--max-tokens", "40").removesuffix("\n")
    return f"{len(events)} events"


def check_errors(cell):
    for method, body, word in [
        ("/hotcell.v1.Tokens/Generate", {"model": "nobody", "prompt": {"text": PROMPT}}, "not_found"),
        ("/hotcell.v1.Tokens/Generate", {"model": "kjv", "prompt": {"text": PROMPT}, "sampling": {"temperature": -1}}, "invalid_argument"),
        ("/inference.GRPCInferenceService/ModelMetadata", {"name": "nobody"}, "not_found"),
    ]:
        code, told, error = buf(cell, method, body)
        assert code != 0 and json.loads(error)["code"] == word and json.loads(error)["message"], (code, told, error)


def check_worker_killed(cell):
    """By the time that the stream is over, its worker is another one."""
    asked = {"model": "kjv", "prompt": {"text": PROMPT}, "sampling": {"temperature": 0.9}, "seed": 4, "max_tokens": 800, "ignore_eos": True}

    def generate():
        code, told, error = buf(cell, "/hotcell.v1.Tokens/Generate", asked)
        assert code == 0, error
        return "".join(event["delta"].get("text", "") for event in values(told) if "delta" in event), told

    calm, _ = generate()
    join = hotcell.in_background(generate)
    cell.wait(lambda: any(w["running_requests"] for w in cell.workers()), 10, "running")
    cell.kill_worker()
    text, told = join()
    assert text == calm and "survived" in told, "the stream was over before its worker was killed"


def check_readme(cell):
    done = subprocess.run(shlex.split(hotcell.readme(cell, "buf")), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and values(done.stdout)[0]["models"][0]["name"] == "kjv", done


hotcell.main(globals())
