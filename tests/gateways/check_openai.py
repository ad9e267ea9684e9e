# packages: openai==2.54.0
# quick
"""OpenAI's own client, unmodified."""
import json
import urllib.error
import urllib.request

import openai

import hotcell


def client(cell, **more):
    return openai.OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=120, **more)


PROMPT = "In the beginning"
GREEDY = dict(model="kjv", prompt=PROMPT, temperature=0, max_tokens=48)
TALK = [{"role": "user", "content": "Who was Moses?"}]


def check_models(cell):
    ids = [m.id for m in client(cell).models.list()]
    assert ids == ["kjv"], ids
    assert client(cell).models.retrieve("kjv").id == "kjv"
    try:
        client(cell).models.retrieve("nobody")
        raise AssertionError("a model that is not there was found")
    except openai.NotFoundError as error:
        assert "nobody" in str(error)


def check_completion(cell):
    done = client(cell).completions.create(**GREEDY)
    text = cell.command("generate", "--model", "kjv", PROMPT, "--temperature", "0", "--max-tokens", "48")
    assert done.choices[0].text == text.removesuffix("\n"), (done.choices[0].text, text)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 48 and done.usage.prompt_tokens > 0
    assert done.usage.total_tokens == done.usage.prompt_tokens + 48


def check_completion_streams(cell):
    whole = client(cell).completions.create(**GREEDY).choices[0].text
    chunks = list(client(cell).completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 48 and chunks[-1].choices == []
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    return f"{len(chunks)} chunks"


def check_several_prompts_and_choices(cell):
    c = client(cell)
    asked = dict(model="kjv", prompt=["And God said", "In the beginning"], n=2, seed=3, temperature=1, max_tokens=8)
    done = c.completions.create(**asked)
    assert [x.index for x in done.choices] == [0, 1, 2, 3]
    assert done.usage.completion_tokens == 32
    texts = {i: "" for i in range(4)}
    for chunk in c.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {x.index: x.text for x in done.choices}
    alone = c.completions.create(**{**asked, "prompt": "In the beginning", "n": 1})
    assert alone.choices[0].text == done.choices[2].text


def check_echo_stop_and_logprobs(cell):
    c = client(cell)
    assert c.completions.create(**GREEDY, echo=True).choices[0].text.startswith(PROMPT)
    whole = c.completions.create(**GREEDY).choices[0].text
    word = whole.split()[5]
    stopped = c.completions.create(**GREEDY, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == whole[: whole.index(word)]
    told = c.completions.create(**GREEDY, logprobs=2).choices[0]
    assert "".join(told.logprobs.tokens) == told.text
    assert len(told.logprobs.top_logprobs) == 48 and all(len(t) <= 2 for t in told.logprobs.top_logprobs)
    assert told.logprobs.text_offset[0] == 0 and all(p <= 0 for p in told.logprobs.token_logprobs)


def check_chat(cell):
    c = client(cell)
    done = c.chat.completions.create(model="kjv", messages=TALK, temperature=0, max_completion_tokens=24)
    assert done.choices[0].message.role == "assistant" and done.choices[0].message.content
    assert done.system_fingerprint.startswith("cpu/")
    chunks = list(c.chat.completions.create(model="kjv", messages=TALK, temperature=0, max_completion_tokens=24,
                                            stream=True, stream_options={"include_usage": True}))
    text = "".join(k.choices[0].delta.content or "" for k in chunks if k.choices)
    assert text == done.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == done.usage.completion_tokens


def check_chat_logprobs_and_choices(cell):
    c = client(cell)
    done = c.chat.completions.create(model="kjv", messages=TALK, n=3, seed=5, max_tokens=6, logprobs=True, top_logprobs=4)
    assert len(done.choices) == 3
    for choice in done.choices:
        assert len(choice.logprobs.content) <= 6
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 4 and bytes(token.bytes).decode(errors="replace") == token.token
    again = c.chat.completions.create(model="kjv", messages=TALK, n=3, seed=5, max_tokens=6)
    assert [x.message.content for x in again.choices] == [x.message.content for x in done.choices]


def check_structured_output(cell):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0, "maximum": 999}},
              "required": ["name", "age"], "additionalProperties": False}
    done = client(cell).chat.completions.create(
        model="kjv", messages=TALK, max_tokens=200, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}})
    value = json.loads(done.choices[0].message.content)
    assert set(value) == {"name", "age"} and isinstance(value["age"], int)
    return done.choices[0].message.content


def check_embeddings(cell):
    c = client(cell)
    # The client asks for base64 unless told otherwise.
    packed = c.embeddings.create(model="kjv", input=["Moses", "Aaron"])
    plain = c.embeddings.create(model="kjv", input=["Moses", "Aaron"], encoding_format="float")
    assert [len(e.embedding) for e in packed.data] == [len(e.embedding) for e in plain.data]
    near = max(abs(a - b) for a, b in zip(packed.data[0].embedding, plain.data[0].embedding))
    assert near < 1e-6, near
    assert packed.usage.prompt_tokens > 0


def check_errors(cell):
    c = client(cell)
    for wrong, kind, status in [
        (dict(model="nobody", prompt="x"), openai.NotFoundError, 404),
        (dict(model="kjv", prompt="x", temperature=-1), openai.BadRequestError, 400),
        (dict(model="kjv", prompt="x", n=0), openai.BadRequestError, 400),
        (dict(model="kjv", prompt="x", n=100_000), openai.BadRequestError, 400),
        (dict(model="kjv", prompt=["x"], suffix="y"), openai.BadRequestError, 400),
        (dict(model="kjv", prompt="x", logit_bias={"word": 1}), openai.BadRequestError, 400),
        (dict(model="kjv", prompt=[999_999_999]), openai.BadRequestError, 400),
    ]:
        for stream in (False, True):
            try:
                c.completions.create(**wrong, max_tokens=1, stream=stream)
                raise AssertionError(f"{wrong} went through")
            except kind as error:
                assert error.status_code == status and error.body["message"] and error.body["type"], error.body
    try:
        c.chat.completions.create(model="kjv", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        raise AssertionError("an image went through")
    except openai.BadRequestError as error:
        assert "image_url" in str(error)


def check_cancel(cell):
    """A client that goes away ends its request within a step."""
    stream = client(cell).completions.create(model="kjv", prompt=PROMPT, max_tokens=900, extra_body={"ignore_eos": True}, stream=True)
    next(iter(stream))
    assert running(cell) == 1
    stream.close()
    cell.wait(lambda: running(cell) == 0, 2, "rid of a request whose client is gone")


def running(cell):
    return sum(w["running_requests"] for w in cell.workers())


def check_worker_killed(cell):
    """No client notices that its worker died."""
    c = client(cell)
    asked = dict(model="kjv", prompt=PROMPT, max_tokens=400, temperature=0.9, seed=11, extra_body={"ignore_eos": True})
    whole = c.completions.create(**asked).choices[0].text
    before, text, kills = cell.deaths(), "", 0
    for chunk in c.completions.create(**asked, stream=True):
        text += chunk.choices[0].text
        if len(text) > 200 * (kills + 1) and kills < 2:
            cell.kill_worker()
            kills += 1
    assert text == whole
    cell.wait(lambda: cell.deaths() == before + 2, 10, "told of two deaths")


def check_sixty_four_streams_and_a_kill(cell):
    c = client(cell)

    def one(index):
        stream = c.completions.create(model="kjv", prompt=f"{PROMPT} {index}", max_tokens=64, temperature=0.7,
                                      seed=index, stream=True, extra_body={"ignore_eos": True})
        return "".join(chunk.choices[0].text for chunk in stream)

    expected = [one(i) for i in range(64)]
    joins = [hotcell.in_background(one, i) for i in range(64)]
    cell.wait(lambda: running(cell) >= 16, 30, "busy")
    cell.kill_worker()
    got = [join() for join in joins]
    wrong = [i for i in range(64) if got[i] != expected[i]]
    assert not wrong, wrong
    return "64 streams equal"


def check_keys_are_left_unread_where_none_are_asked_for(cell):
    request = urllib.request.Request(f"{cell.url}/v1/models", headers={"Authorization": "Bearer whatever"})
    assert json.load(urllib.request.urlopen(request))["data"]
    page = urllib.request.Request(f"{cell.url}/v1/models", headers={"Origin": "https://evil.example"})
    try:
        urllib.request.urlopen(page)
        raise AssertionError("a web page got in")
    except urllib.error.HTTPError as error:
        assert error.code == 403


def check_metrics(cell):
    text = urllib.request.urlopen(cell.url + "/metrics").read().decode()
    told = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(told['hotcell_generated_tokens_total{model="kjv"}']) > 64 * 64
    assert told['vllm:generation_tokens_total{model_name="kjv",engine="0"}'] == told['hotcell_generated_tokens_total{model="kjv"}']
    assert float(told['hotcell_worker_deaths_total{worker="w0",device="cpu:0"}']) == cell.deaths() > 0
    assert float(told['hotcell_continuations_total{model="kjv"}']) > 0
    assert float(told['hotcell_first_token_seconds_count{model="kjv"}']) > 64
    return f"{len(told)} values"


def check_health(cell):
    for path in ("/healthz", "/readyz"):
        assert urllib.request.urlopen(cell.url + path).status == 200


def check_readme(cell):
    assert eval(hotcell.readme(cell, "OpenAI's"), vars(openai)).models.list().data[0].id == "kjv"
    for client in ("Prometheus", "probes"):
        path = hotcell.readme(cell, client).removeprefix(cell.url)
        assert urllib.request.urlopen(cell.url + path).status == 200, path


hotcell.main(globals())
