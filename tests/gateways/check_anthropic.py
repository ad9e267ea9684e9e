# packages: anthropic==2.11.0
# quick
"""Anthropic's own client, unmodified."""
import json

import anthropic

import hotcell
import puppet


def client(cell):
    return anthropic.Anthropic(base_url=cell.url, api_key="none", max_retries=0)


# The client no longer knows a temperature; the protocol does.
ASKED = dict(model="kjv", max_tokens=40, extra_body={"temperature": 0}, system="Speak as the king's men did.",
             messages=[{"role": "user", "content": [{"type": "text", "text": "Who was Moses?"}]}])


def check_message(cell):
    done = client(cell).messages.create(**ASKED)
    assert done.role == "assistant" and done.content[0].type == "text" and done.content[0].text
    assert done.stop_reason in ("max_tokens", "end_turn") and done.usage.output_tokens > 0
    counted = client(cell).messages.count_tokens(**{k: ASKED[k] for k in ("model", "system", "messages")})
    assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens


def check_stream(cell):
    whole = client(cell).messages.create(**ASKED)
    with client(cell).messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


def check_stop_sequence(cell):
    whole = client(cell).messages.create(**ASKED).content[0].text
    word = whole.split()[3]
    stopped = client(cell).messages.create(**ASKED, stop_sequences=[word])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == word
    assert stopped.content[0].text == whole[: whole.index(word)]


def check_errors(cell):
    for wrong, kind in [
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]}, anthropic.BadRequestError),
        ({"tool_choice": {"type": "tool", "name": "f"}}, anthropic.BadRequestError),
    ]:
        try:
            client(cell).messages.create(**{**ASKED, **wrong})
            raise AssertionError(f"{wrong} went through")
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"]


TOOLS = [{"name": name, "description": f"To {name}.", "input_schema": {
    "type": "object", "properties": {what: {"enum": ["Adam", "Eve"]}}, "required": [what], "additionalProperties": False}}
    for name, what in (("find", "who"), ("count", "what"))]


def used(message):
    return [(b.name, b.input) for b in message.content if b.type == "tool_use"]


def check_thoughts(cell):
    """What a model thought comes as a block of its own before the answer, whole and streamed."""
    c = client(cell)
    with puppet.loaded(cell) as model:
        asked = {**ASKED, "model": model, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        done = c.messages.create(**asked)
        assert [b.type for b in done.content] == ["thinking", "text"], done
        assert (done.content[0].thinking.strip(), done.content[1].text.strip()) == (puppet.THOUGHT_SAID, puppet.SAID), done
        with c.messages.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_message()
        assert [b.type for b in final.content] == ["thinking", "text"] and final.content[0].thinking == done.content[0].thinking, final
        assert sum(e.type == "content_block_delta" and e.delta.type == "thinking_delta" for e in events) > 1, events
        none = c.messages.create(**{**asked, "thinking": {"type": "disabled"}})
        assert [b.type for b in none.content] == ["text"], none


def check_text_that_follows_a_schema(cell):
    """By the name that the API has for it now, and by the one it had."""
    schema = {"type": "object", "properties": {"who": {"enum": ["Adam", "Eve"]}}, "required": ["who"], "additionalProperties": False}
    format_ = {"type": "json_schema", "schema": schema}
    for more in ({"output_config": {"format": format_}}, {"output_format": format_}):
        done = client(cell).messages.create(**{**ASKED, "max_tokens": 200, "extra_body": {"temperature": 0, **more}})
        assert json.loads(done.content[0].text)["who"] in ("Adam", "Eve"), done


def check_tools_that_a_model_calls(cell):
    c = client(cell)
    with puppet.loaded(cell) as model:
        asked = {**ASKED, "model": model, "tools": TOOLS}
        done = c.messages.create(**asked)
        assert used(done) == puppet.CALLED and done.stop_reason == "tool_use" and len({b.id for b in done.content}) == 2, done
        with c.messages.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_message()
        assert used(final) == puppet.CALLED and final.stop_reason == "tool_use" and final.usage.output_tokens == done.usage.output_tokens, final
        for index, (_, arguments) in enumerate(puppet.CALLED):
            pieces = [e.delta.partial_json for e in events if e.type == "content_block_delta" and e.index == index]
            assert len(pieces) > 1 and json.loads("".join(pieces)) == arguments, pieces
        raw = [e.type for e in c.messages.create(**asked, stream=True)]
        one = ["content_block_start", *["content_block_delta"] * len(pieces), "content_block_stop"]
        assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"] and raw[-2 - len(one):-2] == one, raw
        single = c.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [name for name, _ in used(single)] == ["find"], single
        none = c.messages.create(**asked, tool_choice={"type": "none"})
        assert not used(none) and none.content[0].text == puppet.SAID and none.stop_reason == "end_turn", none
        # What came of the calls goes back.
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": "in Goshen"} for b in done.content]
        turn = [*ASKED["messages"], {"role": "assistant", "content": [b.model_dump(include={"type", "id", "name", "input"}) for b in done.content]},
                {"role": "user", "content": results}]
        assert c.messages.create(**{**ASKED, "model": model, "messages": turn}).content[0].text == puppet.SAID
    return f"arguments in {len(pieces)} pieces"


def check_tools_that_have_to_be_called(cell):
    for choice, names in [({"type": "any"}, {"find", "count"}), ({"type": "tool", "name": "count"}, {"count"})]:
        asked = {**ASKED, "max_tokens": 300, "tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        done = client(cell).messages.create(**asked)
        (name, arguments), = used(done)
        assert name in names and set(arguments.values()) <= {"Adam", "Eve"} and done.stop_reason == "tool_use", done
        with client(cell).messages.stream(**asked) as stream:
            assert used(stream.get_final_message()) == [(name, arguments)]


def check_cancel(cell):
    # Greedy: the protocol knows no seed, and what is drawn may be the end at once.
    stream = client(cell).messages.create(**{**ASKED, "max_tokens": 900}, stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            return cell.freed(stream.close)
    raise AssertionError("no text came")


def check_overload(cell):
    with cell.full() as model:
        for stream in (False, True):
            try:
                client(cell).messages.create(**{**ASKED, "model": model}, stream=stream)
                raise AssertionError("it went through")
            except anthropic.RateLimitError as error:
                assert error.status_code == 429 and int(error.response.headers["retry-after"]) > 0, error.response.headers
                assert error.body["error"]["type"] == "rate_limit_error", error.body


def check_worker_killed(cell):
    asked = {**ASKED, "max_tokens": 300}
    whole = client(cell).messages.create(**asked).content[0].text
    text, killed = "", False
    with cell.dies(), client(cell).messages.stream(**asked) as stream:
        for piece in stream.text_stream:
            text += piece
            if not killed:
                cell.kill_worker()
                killed = True
    assert killed and text == whole


def check_readme(cell):
    assert eval(hotcell.readme(cell, "Anthropic's"), vars(anthropic)).messages.create(**ASKED).content


hotcell.main(globals(), "--queue-timeout", "200ms")
