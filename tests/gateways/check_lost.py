# quick
"""Streams that cannot go on, since no worker is left: each protocol says so once, promptly and in its own form."""
import contextlib
import json
import time
import urllib.error
import urllib.request

import hotcell

PROMPT = "In the beginning"
TALK = [{"role": "user", "content": PROMPT}]


def ask(cell, path, body):
    return urllib.request.urlopen(urllib.request.Request(cell.url + path, json.dumps(body).encode()), timeout=60)


def weaken(cell):
    """One death before: a second one, amid an answer that may be over in a moment, is then one too many."""
    before = cell.workers()[0]["epoch"]
    cell.kill_worker()
    cell.wait(lambda: cell.workers()[0]["epoch"] != before and cell.is_ready(), 30, "ready after a death")


def kill_all(cell):
    """Until the only worker's device is given up."""
    while cell.workers()[0]["state"] != "quarantined":
        with contextlib.suppress(IndexError, ProcessLookupError, TypeError):
            cell.kill_worker()
        time.sleep(0.05)


def restore(cell):
    cell.command("release", cell.workers()[0]["id"])
    cell.wait(cell.is_ready, 30, "ready again")


def broken(cell, path, body):
    """What a stream says after its first line, once no worker is left; and how long that took."""
    # On a fast machine an answer that ends by itself may be over before.
    for _ in range(12):
        rest, took = cut(cell, path, body)
        if any('"error"' in line and '"error":null' not in line.replace(" ", "") for line in rest):
            break
    return rest, took


def cut(cell, path, body):
    weaken(cell)
    with ask(cell, path, body) as answer:
        assert answer.readline()
        kill_all(cell)
        began = time.monotonic()
        rest = [line.decode() for line in answer if line.strip()]
        took = time.monotonic() - began
    restore(cell)
    assert took < 10, took
    return rest, took


def datas(lines):
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def check_openai(cell):
    told = []
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": TALK})):
        lines, took = broken(cell, path, {"model": "kjv", "max_tokens": 900, "ignore_eos": True, "stream": True, **body})
        events = datas(lines)
        errors = [event["error"] for event in events if "error" in event]
        assert len(errors) == 1 and "error" in events[-1], events[-3:]
        assert errors[0]["message"] and errors[0]["type"] == "server_error" and errors[0]["code"], errors
        assert not any(choice.get("finish_reason") for event in events for choice in event.get("choices", [])), "it says that it ended"
        told.append(f"{errors[0]['code']} after {took:.1f} s")
    return ", ".join(told)


def check_responses(cell):
    lines, _ = broken(cell, "/v1/responses", {"model": "kjv", "input": PROMPT, "max_output_tokens": 900, "stream": True})
    events = datas(lines)
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed" and last["response"]["error"]["message"], last
    assert [e["sequence_number"] for e in events] == list(range(events[0]["sequence_number"], events[0]["sequence_number"] + len(events)))


def check_anthropic(cell):
    lines, _ = broken(cell, "/v1/messages", {"model": "kjv", "messages": TALK, "max_tokens": 900, "stream": True})
    last = datas(lines)[-1]
    assert last["type"] == "error" and last["error"]["message"] and last["error"]["type"] in ("api_error", "overloaded_error"), last
    return last["error"]["type"]


def check_ollama(cell):
    lines, _ = broken(cell, "/api/chat", {"model": "kjv", "messages": TALK, "options": {"num_predict": 900}})
    events = [json.loads(line) for line in lines]
    assert events[-1].get("error") and not any(event.get("done") for event in events), events[-1]


def check_generate_stream(cell):
    asked = {"text_input": PROMPT, "stream": True, "parameters": {"max_tokens": 900, "ignore_eos": True}}
    lines, _ = broken(cell, "/v2/models/kjv/generate_stream", asked)
    assert datas(lines)[-1].get("error"), lines[-1]


def check_whole_answers(cell):
    """Who waits for a whole answer hears of it by the status, and so does who comes after."""
    for path, body in (("/v1/completions", {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}),
                       ("/v1/messages", {"messages": TALK, "max_tokens": 900}),
                       ("/api/generate", {"prompt": PROMPT, "raw": True, "stream": False, "options": {"num_predict": 900}})):
        # As above: the first one may have been answered before, and who comes after never is.
        refused = [refused_whole(cell, path, body)]
        while not refused[-1][0] and len(refused) < 12:
            refused.append(refused_whole(cell, path, body))
        assert refused[-1][0] and all(after for _, after in refused), refused


def refused_whole(cell, path, body):
    """Whether the one that was asked before its worker was lost, and the one asked after, were told so."""
    weaken(cell)
    with contextlib.ExitStack() as later:
        later.callback(restore, cell)
        join = hotcell.in_background(ask, cell, path, {"model": "kjv", **body})
        with contextlib.suppress(TimeoutError):
            cell.wait(lambda: cell.running() == 1, 1, "running")
        kill_all(cell)
        return [is_refused(call) for call in (join, lambda: ask(cell, path, {"model": "kjv", **body}))]


def is_refused(call):
    try:
        with call():
            return False
    except urllib.error.HTTPError as error:
        assert error.code == 503 and int(error.headers["retry-after"]) > 0 and b"error" in error.read(), error
        return True


hotcell.main(globals(), "--restart-budget", "1", "--restart-backoff", "1ms", "--continue-timeout", "2s", "--suspect-after", "100")
