# packages: litellm[proxy]==1.106.2 openai==2.54.0
"""LiteLLM's proxy before Hotcell, which it takes for OpenAI's service and for Ollama."""
import atexit
import contextlib
import http.client
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import openai

import hotcell

KEY = f"sk-{secrets.token_hex(20)}"
TALK = [{"role": "user", "content": "Who was Moses?"}]
TOOL = {"type": "function", "function": {"name": "call", "description": "Calls", "parameters": {
    "type": "object", "properties": {"who": {"enum": ["Adam", "Eve"]}}, "required": ["who"], "additionalProperties": False}}}
made = {}


def proxy(cell):
    """LiteLLM's proxy; its models are the one of Hotcell by three ways."""
    if "proxy" in made:
        return made["proxy"]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="litellm-"))
    models = {
        "openai-kjv": json.loads(hotcell.readme(cell, "LiteLLM's proxy")),
        "ollama-kjv": {"model": "ollama_chat/kjv", "api_base": cell.url},
        "anthropic-kjv": {"model": "anthropic/kjv", "api_base": cell.url, "api_key": "none"},
        "openai-narrow": {"model": "openai/narrow", "api_base": f"{cell.url}/v1", "api_key": "none"},
        "ollama-narrow": {"model": "ollama_chat/narrow", "api_base": cell.url},
        "anthropic-narrow": {"model": "anthropic/narrow", "api_base": cell.url, "api_key": "none"},
        "openai-nobody": {"model": "openai/nobody", "api_base": f"{cell.url}/v1", "api_key": "none"},
    }
    config = {
        "model_list": [{"model_name": name, "litellm_params": params} for name, params in models.items()],
        "litellm_settings": {"num_retries": 0, "request_timeout": 120},
        "general_settings": {"master_key": KEY},
    }
    # Any JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps(config))
    port = hotcell.free_port()
    command = [str(pathlib.Path(sys.executable).parent / "litellm"), "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(folder)}
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True)
    atexit.register(lambda: os.killpg(process.pid, signal.SIGKILL))
    made["url"] = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 120
    while not lives(made["url"]):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"LiteLLM does not serve:\n{(folder / 'log').read_text()[-4000:]}")
        time.sleep(0.3)
    made["proxy"] = openai.OpenAI(base_url=f"{made['url']}/v1", api_key=KEY, max_retries=0, timeout=120)
    return made["proxy"]


def lives(url):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return urllib.request.urlopen(f"{url}/health/liveliness", timeout=5).status == 200
    return False


def direct(cell):
    return openai.OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=120)


def chat(client, model, **options):
    return client.chat.completions.create(model=model, messages=TALK, **{"temperature": 0, "max_tokens": 40, **options})


def told(stream, each=None):
    text = ""
    for number, chunk in enumerate(stream):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if each:
            each(number)
    return text


def check_chat(cell):
    calm = chat(direct(cell), "kjv").choices[0].message.content
    for model in ("openai-kjv", "ollama-kjv", "anthropic-kjv"):
        answer = chat(proxy(cell), model)
        assert answer.choices[0].message.content == calm, (model, answer, calm)
        assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0, (model, answer.usage)


def check_stream(cell):
    calm = chat(direct(cell), "kjv").choices[0].message.content
    for model in ("openai-kjv", "ollama-kjv", "anthropic-kjv"):
        chunks = []
        assert told(chat(proxy(cell), model, stream=True), chunks.append) == calm, model
        assert len(chunks) > 10, (model, len(chunks))


def check_completion_and_embedding(cell):
    asked = {"prompt": "In the beginning", "max_tokens": 24, "temperature": 0}
    calm = direct(cell).completions.create(model="kjv", **asked).choices[0].text
    assert proxy(cell).completions.create(model="openai-kjv", **asked).choices[0].text == calm
    vector = proxy(cell).embeddings.create(model="openai-kjv", input=["Moses", "Aaron"]).data
    same = direct(cell).embeddings.create(model="kjv", input=["Moses", "Aaron"]).data
    assert [len(v.embedding) for v in vector] == [len(v.embedding) for v in same]
    assert max(abs(a - b) for v, w in zip(vector, same) for a, b in zip(v.embedding, w.embedding)) < 1e-6


def check_json_schema(cell):
    schema = {"type": "object", "properties": {"name": {"enum": ["Adam", "Eve"]}, "age": {"type": "integer", "minimum": 0, "maximum": 969}},
              "required": ["name", "age"], "additionalProperties": False}
    kind = {"type": "json_schema", "json_schema": {"name": "who", "schema": schema, "strict": True}}
    for model in ("openai-kjv", "ollama-kjv"):
        said = json.loads(chat(proxy(cell), model, response_format=kind, max_tokens=200).choices[0].message.content)
        assert said["name"] in ("Adam", "Eve") and 0 <= said["age"] <= 969, (model, said)


def check_tools(cell):
    named = {"type": "function", "function": {"name": "call"}}
    for model, choice in (("openai-kjv", named), ("openai-kjv", "required"), ("anthropic-kjv", named)):
        # A model that knows one book goes on calling until it may not: the last call may be cut off.
        answer = chat(proxy(cell), model, tools=[TOOL], tool_choice=choice, max_tokens=400).choices[0]
        calls = answer.message.tool_calls
        assert calls and calls[0].function.name == "call" and answer.finish_reason in ("tool_calls", "length"), (model, choice, answer)
        assert json.loads(calls[0].function.arguments)["who"] in ("Adam", "Eve"), (model, calls)


def check_errors(cell):
    c = proxy(cell)
    for model, options, kind in [
        ("openai-nobody", {}, openai.NotFoundError),
        ("no-such-model", {}, openai.BadRequestError),
        ("openai-kjv", {"temperature": -1}, openai.BadRequestError),
        ("openai-kjv", {"temperature": -1, "stream": True}, openai.BadRequestError),
        ("openai-kjv", {"logit_bias": {"word": 1}}, openai.BadRequestError),
    ]:
        try:
            answer = chat(c, model, **options)
            raise AssertionError(f"{model} with {options} went through: {answer}")
        except kind as error:
            assert error.body["message"], error.body


def check_messages_of_anthropic(cell):
    """LiteLLM's own /v1/messages, before the model that it takes for one of Anthropic's."""
    body = {"model": "anthropic-kjv", "max_tokens": 40, "temperature": 0, "messages": TALK}
    proxy(cell)
    headers = {"x-api-key": KEY, "content-type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(f"{made['url']}/v1/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.load(answer)
    assert said["content"][0]["text"] == chat(direct(cell), "kjv").choices[0].message.content, said


def check_cancel(cell):
    told = []
    for model in ("openai-kjv", "ollama-kjv", "anthropic-kjv"):
        # What is drawn may be the end at once; Anthropic's protocol knows no seed.
        drawn = {} if "anthropic" in model else {"temperature": 1.5, "seed": 3}
        stream = chat(proxy(cell), model, stream=True, max_tokens=1000, **drawn)
        next(iter(stream))
        # The proxy needs a moment of its own.
        told.append(cell.freed(stream.close, seconds=10, tokens=800))
    return "; ".join(told)


def check_overload(cell):
    """A model that is full is full behind the proxy, too: 429, and nothing else suffers."""
    c = proxy(cell)
    with cell.full():
        for model in ("openai-narrow", "ollama-narrow", "anthropic-narrow"):
            for stream in (False, True):
                try:
                    told(chat(c, model, max_tokens=2, stream=True)) if stream else chat(c, model, max_tokens=2)
                    raise AssertionError(f"{model} went through")
                except openai.APIStatusError as error:
                    assert error.status_code == 429, (model, stream, error)
        assert chat(c, "openai-kjv", max_tokens=2).choices[0].message.content


def check_worker_killed(cell):
    for model in ("openai-kjv", "ollama-kjv", "anthropic-kjv"):
        asked = {"stream": True, "max_tokens": 300}
        calm = told(chat(proxy(cell), model, **asked))
        killed = []

        def strike(number):
            if number == 5:
                killed.append(cell.kill_worker())

        with cell.dies():
            assert told(chat(proxy(cell), model, **asked), strike) == calm and killed, model


def check_sixteen_streams_and_a_kill(cell):
    def one(index):
        asked = {"stream": True, "max_tokens": 100, "temperature": 0.8, "seed": index}
        return told(chat(proxy(cell), "openai-kjv", **asked))

    calm = [one(index) for index in range(16)]
    with cell.dies():
        joins = [hotcell.in_background(one, index) for index in range(16)]
        cell.wait(lambda: cell.running() >= 4, 30, "busy")
        cell.kill_worker()
        assert [join() for join in joins] == calm
    return "16 streams equal"


hotcell.main(globals(), "--restart-backoff", "1ms", "--restart-budget", "1000", "--queue-timeout", "200ms")
