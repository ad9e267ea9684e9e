# packages: ollama==0.6.3
# quick
"""Ollama's own client, unmodified."""
import json
import os
import subprocess
import sys
import time
import urllib.request

import ollama

import hotcell
import puppet


def client(cell):
    return ollama.Client(host=cell.url)


GREEDY = {"temperature": 0, "num_predict": 40}
TALK = [{"role": "user", "content": "Who was Moses?"}]


def check_models(cell):
    c = client(cell)
    assert [m.model for m in c.list().models] == ["kjv"]
    assert [m.model for m in c.ps().models] == ["kjv"]
    shown = c.show("kjv")
    assert shown.modelinfo["general.architecture"] == "llama" and "completion" in shown.capabilities
    assert shown.modelinfo["llama.context_length"] == 1024
    return shown.details.parameter_size


def check_generate(cell):
    c = client(cell)
    whole = c.generate("kjv", "In the beginning", raw=True, options=GREEDY)
    text = cell.command("generate", "--model", "kjv", "In the beginning", "--temperature", "0", "--max-tokens", "40")
    assert whole.response == text.removesuffix("\n") and whole.done_reason == "length"
    assert whole.eval_count == 40 and whole.prompt_eval_count > 0 and whole.eval_duration > 0
    lines = list(c.generate("kjv:latest", "In the beginning", raw=True, options=GREEDY, stream=True))
    assert "".join(line.response for line in lines) == whole.response
    assert lines[-1].done and lines[-1].eval_count == 40 and not lines[0].done


def check_chat(cell):
    c = client(cell)
    whole = c.chat("kjv", TALK, options=GREEDY)
    assert whole.message.role == "assistant" and whole.message.content
    lines = list(c.chat("kjv", TALK, options=GREEDY, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content
    # Who answers with calls alone says nothing.
    silent = [*TALK, {"role": "assistant", "content": None}, *TALK]
    assert c.chat("kjv", silent, options=GREEDY).message.content
    stopped = c.chat("kjv", TALK, options={**GREEDY, "stop": whole.message.content.split()[3]})
    assert whole.message.content.startswith(stopped.message.content) and stopped.done_reason == "stop"


def check_formats(cell):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"], "additionalProperties": False}
    told = client(cell).chat("kjv", TALK, format=schema, options={"temperature": 0, "num_predict": 200})
    assert list(json.loads(told.message.content)) == ["n"]


def check_embed(cell):
    c = client(cell)
    two = c.embed("kjv", ["Moses", "Aaron"])
    assert len(two.embeddings) == 2 and len(two.embeddings[0]) == len(two.embeddings[1])
    assert list(c.embeddings("kjv", "Moses").embedding) == list(two.embeddings[0])
    # A model's vectors have one length.
    length = len(two.embeddings[0])
    assert c.embed("kjv", "Moses", dimensions=length).embeddings[0] == two.embeddings[0]
    try:
        c.embed("kjv", "Moses", dimensions=length + 1)
        raise AssertionError("a length that no vector has was taken")
    except ollama.ResponseError as error:
        assert error.status_code == 400 and "dimensions" in error.error, error


def check_errors(cell):
    c = client(cell)
    for call, status in [
        (lambda: c.generate("nobody", "x"), 404),
        (lambda: c.chat("kjv", TALK, options={"temperature": -1}), 400),
        (lambda: list(c.chat("nobody", TALK, stream=True)), 404),
    ]:
        try:
            call()
            raise AssertionError("it went through")
        except ollama.ResponseError as error:
            assert error.status_code == status and error.error, (error.status_code, error.error)


TOOLS = [{"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": {
    "type": "object", "properties": {what: {"type": "string"}}, "required": [what]}}} for name, what in (("find", "who"), ("count", "what"))]


def called(messages):
    return [(t.function.name, dict(t.function.arguments)) for m in messages for t in m.tool_calls or []]


def check_tools(cell):
    c = client(cell)
    with puppet.loaded(cell) as model:
        assert "tools" in c.show(model).capabilities
        told = c.chat(model, TALK, tools=TOOLS)
        assert called([told.message]) == puppet.CALLED and not told.message.content and told.done_reason == "stop", told
        lines = list(c.chat(model, TALK, tools=TOOLS, stream=True))
        assert called(line.message for line in lines) == puppet.CALLED and not any(line.message.content for line in lines), lines
        assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
        # What a tool answered goes back.
        turn = [*TALK, told.message, {"role": "tool", "content": "in Goshen", "tool_name": "find"}]
        assert c.chat(model, turn).message.content == puppet.SAID
    return f"{len(lines)} lines"


def check_thoughts(cell):
    c = client(cell)
    assert "thinking" not in c.show("kjv").capabilities
    with puppet.loaded(cell) as model:
        assert "thinking" in c.show(model).capabilities
        for think, thought in [(True, puppet.THOUGHT_SAID), ("high", puppet.THOUGHT_SAID), (False, ""), (None, "")]:
            told = c.chat(model, TALK, think=think).message
            assert ((told.thinking or "").strip(), told.content.strip()) == (thought, puppet.SAID), (think, told)
            lines = [line.message for line in c.chat(model, TALK, think=think, stream=True)]
            both = ["".join(piece or "" for piece in pieces).strip() for pieces in zip(*((m.thinking, m.content) for m in lines))]
            assert both == [thought, puppet.SAID], (think, both)
        told = c.generate(model, "Who?", think=True)
        assert (told.thinking.strip(), told.response.strip()) == (puppet.THOUGHT_SAID, puppet.SAID), told


def check_keep_alive(cell):
    """How long a model stays in memory is the client's to say."""
    def kept():
        return {m.model: m.expires_at for m in client(cell).ps().models}

    c = client(cell)
    with puppet.loaded(cell) as model:
        short = dict(model=model, prompt="Who?", options={"num_predict": 1})
        c.generate(**short, keep_alive="10m")
        left = kept()[model].timestamp() - time.time()
        assert 590 < left < 601, left
        c.generate(**short, keep_alive=-1)
        assert kept()[model].timestamp() - time.time() > 1e6
        c.embed(model, "Who?", keep_alive="10m")
        left = kept()[model].timestamp() - time.time()
        assert 590 < left < 601, left
        c.embed(model, "Who?", keep_alive=-1)
        # A request for nothing but that: in memory it is, and then no more.
        assert c.generate(model, keep_alive="1h").done_reason == "load" and model in kept()
        assert c.generate(model, keep_alive=0).done_reason == "unload"
        cell.wait(lambda: model not in kept(), 10, "without the model")
        assert model in [m.model for m in c.list().models], "it is forgotten"
        # The next request has it loaded again.
        assert c.generate(**short, keep_alive="1s").response and model in kept()
        began = time.monotonic()
        cell.wait(lambda: model not in kept(), 15, "without the model, which was to stay for a second")
        return f"gone {time.monotonic() - began:.1f} s after a request with keep_alive=1s"


def check_version(cell):
    """Ollama's clients ask for it to see what they may send: three numbers."""
    told = json.load(urllib.request.urlopen(f"{cell.url}/api/version"))["version"]
    assert len(told.split("-")[0].split(".")) == 3 and all(part.isdigit() for part in told.split("-")[0].split(".")), told
    # `ollama` looks whether it is there.
    assert urllib.request.urlopen(urllib.request.Request(cell.url, method="HEAD")).status == 200
    return told


def check_cancel(cell):
    told = []
    for begin in (lambda c, **o: c.generate("kjv", "In the beginning", raw=True, **o), lambda c, **o: c.chat("kjv", TALK, **o)):
        # This client has no way to leave a stream but to close its connection.
        c = client(cell)
        lines = begin(c, stream=True, options={"num_predict": 900, "temperature": 1.5, "seed": 3})
        next(iter(lines))
        told.append(cell.freed(lines.close))
    return "; ".join(told)


def check_overload(cell):
    c = client(cell)
    with cell.full() as model:
        for call in (
            lambda: c.generate(model, "x", options={"num_predict": 2}),
            lambda: list(c.generate(model, "x", options={"num_predict": 2}, stream=True)),
            lambda: c.chat(model, TALK, options={"num_predict": 2}),
            lambda: list(c.chat(model, TALK, options={"num_predict": 2}, stream=True)),
            lambda: c.embed(model, "x"),
        ):
            try:
                call()
                raise AssertionError("it went through")
            except ollama.ResponseError as error:
                assert error.status_code == 429 and "place" in error.error, (error.status_code, error.error)


def check_worker_killed(cell):
    c = client(cell)
    options = {"temperature": 0.9, "seed": 4, "num_predict": 300}
    whole = c.generate("kjv", "In the beginning", raw=True, options=options).response
    text, killed = "", False
    with cell.dies():
        for line in c.generate("kjv", "In the beginning", raw=True, options=options, stream=True):
            text += line.response
            if not killed and len(text) > 100:
                cell.kill_worker()
                killed = True
    assert killed and text == whole


def check_readme(cell):
    name, value = hotcell.readme(cell, "Ollama's").split("=")
    told = subprocess.run([sys.executable, "-c", "import ollama; print(ollama.list().models[0].model)"],
                          env={**os.environ, name: value}, check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "kjv", told


hotcell.main(globals(), "--queue-timeout", "200ms")
