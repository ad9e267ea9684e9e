# packages: openai==2.54.0
# quick
"""OpenAI's own client, unmodified."""
import json
import urllib.error
import urllib.request

import openai

import hotcell
import puppet


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


def check_a_json_object(cell):
    """Any object, of which a model that knows one book finds no end by itself: a short text that has to end is forced to."""
    asked = dict(model="kjv", messages=TALK, temperature=0, response_format={"type": "json_object"})
    begun = client(cell).chat.completions.create(**asked, max_tokens=40).choices[0].message.content
    assert begun.lstrip().startswith("{"), begun
    free = client(cell).chat.completions.create(model="kjv", messages=TALK, temperature=0, max_tokens=40).choices[0].message.content
    assert not free.lstrip().startswith("{"), free
    # Ended as soon as it may be, by a bias for the object's end.
    close, = token_ids(cell, "}")
    ended = client(cell).chat.completions.create(**asked, max_tokens=40, logit_bias={str(close): 100}).choices[0]
    assert ended.finish_reason == "stop" and isinstance(json.loads(ended.message.content), dict), ended
    pieces = client(cell).chat.completions.create(**asked, max_tokens=40, logit_bias={str(close): 100}, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == ended.message.content
    return repr(ended.message.content)


def token_ids(cell, text):
    """Of a text without the mark that a prompt begins with."""
    told = json.loads(cell.command("--json", "tokenize", "--model", "kjv", text))
    return [i for i in told["ids"] if i > 1]


def check_a_bias_bans_and_forces_tokens(cell):
    c = client(cell)
    asked = dict(model="kjv", prompt=PROMPT, max_tokens=12, extra_body={"ignore_eos": True})
    plain = c.completions.create(**asked, temperature=0).choices[0].text
    god = token_ids(cell, " God")
    assert len(god) == 1 and " God" in plain, (god, plain)
    banned = c.completions.create(**asked, temperature=0, logit_bias={str(god[0]): -100}).choices[0].text
    assert " God" not in banned and banned, banned
    for temperature in (0, 1):
        forced = c.completions.create(**asked, temperature=temperature, logit_bias={str(god[0]): 100}).choices[0].text
        assert forced == " God" * 12, forced


def check_penalties_turn_from_what_was_said(cell):
    """Greedily a small model says the same again and again; each penalty takes it elsewhere, and the more the further."""
    c = client(cell)

    def repeated(**options):
        asked = dict(model="kjv", prompt="And he said unto them,", max_tokens=120, temperature=0, logprobs=1)
        told = c.completions.create(**asked, extra_body={"ignore_eos": True, **options}).choices[0].logprobs.tokens
        assert len(told) == 120
        return len(told) - len(set(told))

    none = repeated()
    few, many = repeated(frequency_penalty=0.5), repeated(frequency_penalty=2.0)
    present, again = repeated(presence_penalty=2.0), repeated(repetition_penalty=1.5)
    assert many < few < none and present < none and again < none, (none, few, many, present, again)
    # A negative one turns to it.
    assert repeated(frequency_penalty=-2.0) > none
    return f"of 120 tokens {none} were there before, with a frequency penalty of 0.5 {few}, of 2 {many}"


TOOLS = [{"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": {
    "type": "object", "properties": {what: {"enum": ["Adam", "Eve"]}}, "required": [what], "additionalProperties": False}}}
    for name, what in (("find", "who"), ("count", "what"))]


def put_together(stream):
    """A streamed message: its text, its calls, why it ended, and in how many pieces the longest arguments came."""
    text, calls, reason, pieces = "", {}, None, {}
    for chunk in stream:
        assert reason is None, "more came after its end"
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index not in calls:
                # What a client needs to know comes first, and once.
                assert call.index == len(calls) and call.id and call.type == "function" and call.function.name, call
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            else:
                assert not call.id and not call.function.name, call
            calls[call.index]["arguments"] += call.function.arguments or ""
            pieces[call.index] = pieces.get(call.index, 0) + bool(call.function.arguments)
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason
    return text, [calls[i] for i in sorted(calls)], reason, max(pieces.values(), default=0)


def check_tools_that_a_model_calls(cell):
    """Whole and in pieces, what the model wrote is the same."""
    c = client(cell)
    with puppet.loaded(cell) as model:
        asked = dict(model=model, messages=TALK)
        for more in ({}, {"tool_choice": "auto"}):
            done = c.chat.completions.create(**asked, tools=TOOLS, **more).choices[0]
            assert done.finish_reason == "tool_calls" and not done.message.content, done
            assert [(t.function.name, json.loads(t.function.arguments)) for t in done.message.tool_calls] == puppet.CALLED, done
            assert len({t.id for t in done.message.tool_calls}) == 2
            text, calls, reason, pieces = put_together(c.chat.completions.create(**asked, tools=TOOLS, **more, stream=True))
            assert [(t["name"], json.loads(t["arguments"])) for t in calls] == puppet.CALLED and reason == "tool_calls" and not text, calls
            assert pieces > 2, pieces
        one = dict(tools=TOOLS, parallel_tool_calls=False)
        done = c.chat.completions.create(**asked, **one).choices[0].message
        assert [t.function.name for t in done.tool_calls] == ["find"], done
        _, calls, reason, _ = put_together(c.chat.completions.create(**asked, **one, stream=True))
        assert [t["name"] for t in calls] == ["find"] and reason == "tool_calls", calls
        done = c.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices[0]
        assert not done.message.tool_calls and done.message.content == puppet.SAID and done.finish_reason == "stop", done
        text, calls, reason, _ = put_together(c.chat.completions.create(**asked, tools=TOOLS, tool_choice="none", stream=True))
        assert (text, calls, reason) == (puppet.SAID, [], "stop")
        # What a tool answered goes back to the model, which takes it.
        answer = [*TALK, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}]},
                  {"role": "tool", "tool_call_id": "a", "content": "in Goshen"}]
        assert c.chat.completions.create(model=model, messages=answer).choices[0].message.content == puppet.SAID
    return f"arguments in {pieces} pieces"


def check_tools_that_have_to_be_called(cell):
    """A model that knows nothing of tools calls them, with what they take."""
    c = client(cell)
    asked = dict(model="kjv", messages=TALK, tools=TOOLS, temperature=0, max_tokens=300)
    for choice, names in [("required", {"find", "count"}), ({"type": "function", "function": {"name": "count"}}, {"count"})]:
        done = c.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert done.finish_reason == "tool_calls" and len(done.message.tool_calls) == 1, done
        call = done.message.tool_calls[0].function
        told = json.loads(call.arguments)
        assert call.name in names and list(told) == [{"find": "who", "count": "what"}[call.name]] and set(told.values()) <= {"Adam", "Eve"}, call
        text, calls, reason, pieces = put_together(
            c.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False, stream=True))
        assert (calls[0]["name"], calls[0]["arguments"]) == (call.name, call.arguments) and len(calls) == 1 and not text, calls
        assert reason == "tool_calls", reason
    for wrong in ("maybe", {"type": "function", "function": {"name": "nobody"}}):
        try:
            c.chat.completions.create(**asked, tool_choice=wrong)
            raise AssertionError(f"{wrong} went through")
        except openai.BadRequestError as error:
            assert error.body["param"] == "tool_choice", error.body
    try:
        c.chat.completions.create(model="kjv", messages=TALK, tool_choice="required")
        raise AssertionError("tools that are not there went through")
    except openai.BadRequestError as error:
        assert "tool" in error.body["message"], error.body
    return f"{call.name}: {json.loads(call.arguments)}"


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
    """A client that goes away ends its request within a few steps, whichever way it asked."""
    c, more, told = client(cell), {"ignore_eos": True}, []
    for begin in (
        lambda: c.completions.create(model="kjv", prompt=PROMPT, max_tokens=900, extra_body=more, stream=True),
        lambda: c.chat.completions.create(model="kjv", messages=TALK, max_tokens=900, extra_body=more, stream=True),
    ):
        stream = begin()
        next(iter(stream))
        told.append(cell.freed(stream.close))
    # One that waits for the whole answer goes, too.
    impatient = client(cell).with_options(timeout=0.15)
    before = cell.metrics().get(CANCELLED, 0)
    try:
        impatient.completions.create(model="kjv", prompt=PROMPT, max_tokens=900, n=16, extra_body=more)
        raise AssertionError("it was answered")
    except openai.APITimeoutError:
        cell.wait(lambda: cell.running() == 0, 2, "rid of a request whose client is gone")
    cell.wait(lambda: cell.metrics()[CANCELLED] == before + 16, 2, "told of it")
    return "; ".join(told)


CANCELLED = 'hotcell_requests_total{model="kjv",end="CANCELLED"}'


def check_overload(cell):
    c = client(cell)
    with cell.full() as model:
        for call in (
            lambda: c.completions.create(model=model, prompt="x", max_tokens=2),
            lambda: c.completions.create(model=model, prompt="x", max_tokens=2, stream=True),
            lambda: c.chat.completions.create(model=model, messages=TALK, max_tokens=2),
            lambda: c.chat.completions.create(model=model, messages=TALK, max_tokens=2, stream=True),
            lambda: c.embeddings.create(model=model, input="x"),
        ):
            try:
                call()
                raise AssertionError("it went through")
            except openai.RateLimitError as error:
                assert error.status_code == 429 and int(error.response.headers["retry-after"]) > 0, error.response.headers
                assert error.body["type"] == "rate_limit_error" and error.body["code"] == "overloaded", error.body
        # Others' models are served.
        assert c.completions.create(model="kjv", prompt="x", max_tokens=2).choices[0].text


def check_worker_killed(cell):
    """No client notices that its worker died."""
    c = client(cell)
    asked = dict(model="kjv", prompt=PROMPT, max_tokens=400, temperature=0.9, seed=11, extra_body={"ignore_eos": True})
    whole = c.completions.create(**asked).choices[0].text
    text, kills = "", 0
    with cell.dies(2):
        for chunk in c.completions.create(**asked, stream=True):
            text += chunk.choices[0].text
            if len(text) > 200 * (kills + 1) and kills < 2:
                cell.kill_worker()
                kills += 1
    assert text == whole


def check_worker_killed_under_a_call(cell):
    """The pieces of a call's arguments still make up the very call."""
    c = client(cell)
    long = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {
        "who": {"type": "string", "minLength": 300, "maxLength": 400}}, "required": ["who"], "additionalProperties": False}}}]
    asked = dict(model="kjv", messages=TALK, tools=long, tool_choice="required", parallel_tool_calls=False, temperature=0.8, seed=5, max_tokens=800)
    calm = c.chat.completions.create(**asked).choices[0].message.tool_calls[0].function

    def striking(stream):
        for number, chunk in enumerate(stream):
            if number == 5:
                cell.kill_worker()
            yield chunk

    with cell.dies():
        text, calls, reason, pieces = put_together(striking(c.chat.completions.create(**asked, stream=True)))
    assert (calls[0]["name"], calls[0]["arguments"]) == (calm.name, calm.arguments) and reason == "tool_calls" and not text, (calls, calm)
    return f"{len(calm.arguments)} characters in {pieces} pieces"


def check_sixty_four_streams_and_a_kill(cell):
    """Their texts, their tokens, and how probable each of these was, to the last bit."""
    c = client(cell)

    def one(index):
        stream = c.completions.create(model="kjv", prompt=f"{PROMPT} {index}", max_tokens=64, temperature=0.7, logprobs=0,
                                      seed=index, stream=True, extra_body={"ignore_eos": True})
        text, tokens = "", []
        for chunk in stream:
            text += chunk.choices[0].text
            told = chunk.choices[0].logprobs
            if told:
                tokens += zip(told.tokens, told.token_logprobs, strict=True)
        return text, tokens

    joins = [hotcell.in_background(one, i) for i in range(64)]
    expected = [join() for join in joins]
    assert all(len(tokens) == 64 for _, tokens in expected), [len(tokens) for _, tokens in expected]
    resumed = 'hotcell_continuations_total{model="kjv"}'
    before = cell.metrics().get(resumed, 0)
    with cell.dies():
        joins = [hotcell.in_background(one, i) for i in range(64)]
        cell.wait(lambda: cell.running() >= 16, 30, "busy")
        cell.kill_worker()
        got = [join() for join in joins]
    wrong = [i for i in range(64) if got[i] != expected[i]]
    assert not wrong, wrong
    went_on = cell.metrics()[resumed] - before
    assert went_on >= 8, f"only {went_on} of them were under way when their worker died"
    return f"64 streams of 64 tokens equal, of which {went_on:.0f} went on elsewhere"


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


hotcell.main(globals(), "--queue-timeout", "200ms")
