# packages: openai==2.54.0
# quick
"""OpenAI's newer API, Responses, with its own client, unmodified."""
import json

import openai

import hotcell
import puppet

PROMPT = "In the beginning"
ASKED = dict(model="kjv", input=PROMPT, temperature=0, max_output_tokens=24)
TOOLS = [{"type": "function", "name": name, "description": f"To {name}.", "strict": True, "parameters": {
    "type": "object", "properties": {what: {"enum": ["Adam", "Eve"]}}, "required": [what], "additionalProperties": False}}
    for name, what in (("find", "who"), ("count", "what"))]


def client(cell, **more):
    return openai.OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=120, **more)


def in_order(stream):
    """A stream's events, which are numbered without a gap."""
    events = list(stream)
    assert [e.sequence_number for e in events] == list(range(len(events))), [e.sequence_number for e in events]
    return events


def kinds(events):
    """Their types, of deltas in a row only the first."""
    told = [e.type.removeprefix("response.") for e in events]
    return [kind for i, kind in enumerate(told) if not kind.endswith("delta") or told[i - 1] != kind]


def check_whole(cell):
    c = client(cell)
    done = c.responses.create(**ASKED)
    # The same as a chat of one message.
    same = c.chat.completions.create(model="kjv", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=24)
    assert done.output_text == same.choices[0].message.content and done.output_text, (done, same)
    assert done.object == "response" and done.id.startswith("resp_") and done.model == "kjv" and done.error is None
    assert done.status == "incomplete" and done.incomplete_details.reason == "max_output_tokens", done
    assert (done.usage.input_tokens, done.usage.output_tokens) == (same.usage.prompt_tokens, 24), done.usage
    assert done.usage.total_tokens == done.usage.input_tokens + 24
    message, = done.output
    assert (message.type, message.role, message.content[0].type) == ("message", "assistant", "output_text"), message
    told = c.responses.create(**{**ASKED, "input": [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]})
    assert told.output_text == done.output_text
    ordered = c.responses.create(**ASKED, instructions="Speak of Moses.")
    assert ordered.usage.input_tokens > done.usage.input_tokens and ordered.instructions == "Speak of Moses."


def check_stream(cell):
    c = client(cell)
    with puppet.loaded(cell) as model:
        whole = c.responses.create(model=model, input="Who?")
        assert whole.status == "completed" and whole.output_text == puppet.SAID, whole
        events = in_order(c.responses.create(model=model, input="Who?", stream=True))
        assert kinds(events) == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done", "completed"], kinds(events)
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert len(deltas) > 3 and "".join(deltas) == puppet.SAID, deltas
        by = {e.type.removeprefix("response."): e for e in events}
        assert by["created"].response.status == "in_progress" and by["created"].response.usage is None
        assert by["output_text.done"].text == by["content_part.done"].part.text == by["output_item.done"].item.content[0].text == puppet.SAID
        assert {e.item_id for e in events if hasattr(e, "item_id")} == {by["output_item.added"].item.id}
        done = by["completed"].response
        assert done.status == "completed" and done.output_text == puppet.SAID and done.id == by["created"].response.id
        assert done.usage.output_tokens == whole.usage.output_tokens > 0 and done.usage.input_tokens == whole.usage.input_tokens > 0
        # As the client's own reader of streams puts it together.
        with c.responses.stream(model=model, input="Who?") as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_text == puppet.SAID
    cut = in_order(c.responses.create(**ASKED, stream=True))
    assert cut[-1].type == "response.incomplete" and cut[-1].response.incomplete_details.reason == "max_output_tokens", cut[-1]
    assert "".join(e.delta for e in cut if e.type == "response.output_text.delta") == c.responses.create(**ASKED).output_text
    assert cut[-1].response.usage.output_tokens == 24
    return f"{len(deltas)} deltas"


def check_structured_output(cell):
    schema = {"type": "object", "properties": {"name": {"enum": ["Adam", "Eve"]}, "age": {"type": "integer", "minimum": 0, "maximum": 969}},
              "required": ["name", "age"], "additionalProperties": False}
    done = client(cell).responses.create(**{**ASKED, "max_output_tokens": 200}, text={"format": {"type": "json_schema", "name": "who", "schema": schema}})
    told = json.loads(done.output_text)
    assert told["name"] in ("Adam", "Eve") and 0 <= told["age"] <= 969 and done.status == "completed", done
    begun = client(cell).responses.create(**ASKED, text={"format": {"type": "json_object"}})
    assert begun.output_text.lstrip().startswith("{"), begun
    return str(told)


def check_tools(cell):
    c = client(cell)
    with puppet.loaded(cell) as model:
        asked = dict(model=model, input="Who?", tools=TOOLS)
        done = c.responses.create(**asked)
        assert [(i.type, i.name, json.loads(i.arguments)) for i in done.output] == [("function_call", *call) for call in puppet.CALLED], done
        assert done.status == "completed" and len({i.call_id for i in done.output}) == 2
        events = in_order(c.responses.create(**asked, stream=True))
        one = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
        assert kinds(events) == ["created", "in_progress", *one, *one, "completed"], kinds(events)
        for index, (name, arguments) in enumerate(puppet.CALLED):
            of = [e for e in events if getattr(e, "output_index", None) == index]
            pieces = [e.delta for e in of if e.type.endswith("delta")]
            assert of[0].item.name == name and len(pieces) > 1 and json.loads("".join(pieces)) == arguments, of
            assert "".join(pieces) == of[-2].arguments == of[-1].item.arguments, of
        single = c.responses.create(**asked, parallel_tool_calls=False)
        assert [i.name for i in single.output] == ["find"] and single.parallel_tool_calls is False, single
        assert c.responses.create(**asked, tool_choice="none").output_text == puppet.SAID
        # What came of a call goes back.
        turn = [{"role": "user", "content": "Who?"}, {"type": "function_call", "call_id": "a", "name": "find", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "in Goshen"}]
        assert c.responses.create(model=model, input=turn).output_text == puppet.SAID
    for choice, names in [("required", {"find", "count"}), ({"type": "function", "name": "count"}, {"count"})]:
        done = c.responses.create(**{**ASKED, "max_output_tokens": 300}, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        # What was asked is said again.
        assert [(t.type, t.name, t.parameters) for t in done.tools] == [(t["type"], t["name"], t["parameters"]) for t in TOOLS], done.tools
        assert (done.tool_choice if isinstance(choice, str) else done.tool_choice.to_dict()) == choice, done.tool_choice
        call, = done.output
        assert call.type == "function_call" and call.name in names and set(json.loads(call.arguments).values()) <= {"Adam", "Eve"}, call


def check_errors(cell):
    for wrong, kind, word in [
        ({"model": "nobody"}, openai.NotFoundError, "nobody"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, openai.BadRequestError, "input_image"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}, openai.BadRequestError, "nobody"),
        ({"text": {"format": {"type": "xml"}}}, openai.BadRequestError, "xml"),
    ]:
        for stream in (False, True):
            try:
                client(cell).responses.create(**{**ASKED, **wrong}, stream=stream)
                raise AssertionError(f"{wrong} went through")
            except kind as error:
                assert word in f"{error.body['message']} {error.body['param']}" and error.body["type"] == "invalid_request_error", error.body


def check_cancel(cell):
    stream = client(cell).responses.create(**{**ASKED, "max_output_tokens": 900}, stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            return cell.freed(stream.close)
    raise AssertionError("no text came")


def check_thoughts(cell):
    """What a model thought comes as an item of its own before the answer, whole and streamed, and its tokens are counted."""
    c = client(cell)
    with puppet.loaded(cell) as model:
        asked = dict(model=model, input="Who?", reasoning={"effort": "high"})
        whole = c.responses.create(**asked)
        assert [item.type for item in whole.output] == ["reasoning", "message"], whole.output
        assert whole.output[0].content[0].text.strip() == puppet.THOUGHT_SAID and whole.output_text.strip() == puppet.SAID, whole.output
        thought = whole.usage.output_tokens_details.reasoning_tokens
        assert len(puppet.THOUGHT) <= thought < whole.usage.output_tokens, whole.usage
        events = in_order(c.responses.create(**asked, stream=True))
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta").strip() == puppet.THOUGHT_SAID
        done = events[-1].response
        assert [item.type for item in done.output] == ["reasoning", "message"] and done.output_text.strip() == puppet.SAID, done
        assert done.output[0].content[0].text == whole.output[0].content[0].text
        assert done.usage.output_tokens_details.reasoning_tokens == thought, done.usage
        none = c.responses.create(**{**asked, "reasoning": {"effort": "none"}})
        assert [item.type for item in none.output] == ["message"] and none.usage.output_tokens_details.reasoning_tokens == 0, none
        # A chat tells the same beside its content.
        chat = dict(model=model, messages=[{"role": "user", "content": "Who?"}], reasoning_effort="high")
        message = c.chat.completions.create(**chat).choices[0].message
        assert (message.reasoning_content.strip(), message.content.strip()) == (puppet.THOUGHT_SAID, puppet.SAID), message
        deltas = [chunk.choices[0].delta for chunk in c.chat.completions.create(**chat, stream=True)]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas).strip() == puppet.THOUGHT_SAID, deltas
    return f"{thought} tokens of thoughts"


def check_overload(cell):
    with cell.full() as model:
        for stream in (False, True):
            try:
                client(cell).responses.create(**{**ASKED, "model": model}, stream=stream)
                raise AssertionError("it went through")
            except openai.RateLimitError as error:
                assert error.status_code == 429 and int(error.response.headers["retry-after"]) > 0, error.response.headers


def check_worker_killed(cell):
    """In the middle of a text, and again."""
    asked = {**ASKED, "max_output_tokens": 400}
    calm, text, kills = client(cell).responses.create(**asked), "", 0
    assert calm.usage.output_tokens > 200, "the text is too short for a worker to die under it"
    with cell.dies(2):
        events = []
        for event in client(cell).responses.create(**asked, stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                text += event.delta
                if len(text) > 150 * (kills + 1) and kills < 2:
                    cell.kill_worker()
                    kills += 1
    assert text == calm.output_text == events[-1].response.output_text
    in_order(events)
    assert events[-1].response.usage.output_tokens == calm.usage.output_tokens


hotcell.main(globals(), "--queue-timeout", "200ms")
