# packages: anthropic==2.11.0
# quick
"""Anthropic's own client, unmodified."""
import anthropic

import hotcell


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


def check_worker_killed(cell):
    asked = {**ASKED, "max_tokens": 300}
    whole = client(cell).messages.create(**asked).content[0].text
    before, text, killed = cell.deaths(), "", False
    with client(cell).messages.stream(**asked) as stream:
        for piece in stream.text_stream:
            text += piece
            if not killed:
                cell.kill_worker()
                killed = True
    assert text == whole
    cell.wait(lambda: cell.deaths() == before + 1, 10, "told of a death")


def check_readme(cell):
    assert eval(hotcell.readme(cell, "Anthropic's"), vars(anthropic)).messages.create(**ASKED).content


hotcell.main(globals())
