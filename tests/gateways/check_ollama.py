# packages: ollama==0.6.3
# quick
"""Ollama's own client, unmodified."""
import json
import os
import subprocess
import sys

import ollama

import hotcell


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


def check_worker_killed(cell):
    c = client(cell)
    options = {"temperature": 0.9, "seed": 4, "num_predict": 300}
    whole = c.generate("kjv", "In the beginning", raw=True, options=options).response
    before, text, killed = cell.deaths(), "", False
    for line in c.generate("kjv", "In the beginning", raw=True, options=options, stream=True):
        text += line.response
        if not killed and len(text) > 100:
            cell.kill_worker()
            killed = True
    assert killed and text == whole
    cell.wait(lambda: cell.deaths() == before + 1, 10, "told of a death")


def check_readme(cell):
    name, value = hotcell.readme(cell, "Ollama's").split("=")
    told = subprocess.run([sys.executable, "-c", "import ollama; print(ollama.list().models[0].model)"],
                          env={**os.environ, name: value}, check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "kjv", told


hotcell.main(globals())
