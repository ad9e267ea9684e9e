# packages: smg==1.13.0 openai==2.54.0
"""The router SMG drives Hotcell as it drives engines of vLLM: one host with two workers, and two hosts."""
import atexit
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import openai

import hotcell

PROMPT = "In the beginning God created the heaven and the earth."
FLAGS = ["--restart-backoff", "1ms", "--restart-budget", "1000", "--hang-timeout", "3s", "--queue-timeout", "300ms"]


class Smg:
    """SMG in front of some hosts. Its retries and its breaker are as it comes."""

    def __init__(self, *cells, policy="round_robin", more=()):
        self.cells = cells
        self.port = hotcell.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder = pathlib.Path(tempfile.mkdtemp(prefix="smg-"))
        self.log_path = folder / "log"
        command = [str(pathlib.Path(sys.executable).parent / "smg"), "launch", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--policy", policy, "--log-level", "info"]
        self.metrics_port = hotcell.free_port()
        command += ["--prometheus-port", str(self.metrics_port), *more]
        # As README's table says, once for each host.
        line = [hotcell.readme(cell, "SMG").split() for cell in cells]
        assert all(words[:3] == ["smg", "launch", "--worker-urls"] for words in line), line
        command += ["--worker-urls", *(words[3] for words in line)]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        # It drains when it is asked to end.
        atexit.register(self.process.kill)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        until = time.monotonic() + 60
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SMG is not ready:\n{self.log()[-4000:]}")
            time.sleep(0.2)

    def log(self):
        return self.log_path.read_text(errors="replace")

    def metric(self, name, **labels):
        """The sum of a metric of its own over all that have these labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{") and all(w in line for w in wanted))

    def workers(self):
        with urllib.request.urlopen(f"{self.url}/workers", timeout=10) as answer:
            return json.load(answer)

    def is_ready(self):
        with contextlib.suppress(OSError, openai.APIError, ValueError):
            workers = self.workers()["workers"]
            if len(workers) == len(self.cells) and all(w.get("is_healthy", True) for w in workers):
                self.chat(max_tokens=1)
                return True
        return False

    def chat(self, prompt=PROMPT, **options):
        options = {"temperature": 0, "max_tokens": 24, **options}
        return self.client.chat.completions.create(model="kjv", messages=[{"role": "user", "content": prompt}], **options)

    def post(self, path, body):
        """Status and body of a request of no client's."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")


made = {}


def second():
    """Another host."""
    if "cell" not in made:
        made["cell"] = hotcell.Hotcell(*FLAGS, devices="cpu:1").__enter__()
        atexit.register(made["cell"].__exit__)
    return made["cell"]


def one(cell):
    """SMG before one host."""
    if "one" not in made:
        made["one"] = Smg(cell)
    return made["one"]


def two(cell):
    """SMG before two hosts."""
    if "two" not in made:
        made["two"] = Smg(cell, second())
    return made["two"]


def tokens(stream, each=None):
    """All that a stream told: tokens with their log probabilities, the text, and why it ended."""
    got, text, reason = [], "", None
    for number, chunk in enumerate(stream):
        if each:
            each(number)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.logprobs:
                got += [(t.token, t.logprob) for t in choice.logprobs.content]
            reason = choice.finish_reason or reason
    return got, text, reason


def streamed(smg, prompt=PROMPT, count=60, each=None):
    options = {"max_tokens": count, "stream": True, "logprobs": True, "extra_body": {"ignore_eos": True}}
    return tokens(smg.chat(prompt, **options), each)


def running(cell):
    return sum(w["running_requests"] for w in cell.workers())


def check_both_hosts_are_engines(cell):
    smg = two(cell)
    workers = smg.workers()["workers"]
    assert len(workers) == 2, workers
    ids = {m.id for m in smg.client.models.list().data}
    assert "kjv" in ids, ids


def check_a_chat_is_hotcells_own(cell):
    for smg in (one(cell), two(cell)):
        answer = smg.chat()
        assert answer.usage.completion_tokens <= 24 and answer.usage.prompt_tokens > 5, answer.usage
        assert answer.choices[0].message.content
        # What Hotcell says to its own clients over HTTP.
        direct = openai.OpenAI(base_url=f"{cell.url}/v1", api_key="none")
        same = direct.chat.completions.create(
            model="kjv", messages=[{"role": "user", "content": PROMPT}], max_tokens=24, temperature=0
        )
        assert same.choices[0].message.content == answer.choices[0].message.content, (same, answer)


def check_a_stream_is_the_whole_answer(cell):
    whole = two(cell).chat(max_tokens=60, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True})
    for _ in range(2):
        got, text, reason = streamed(two(cell))
        assert reason == "length" and len(got) == 60, (reason, len(got))
        assert text == whole.choices[0].message.content
        assert [t for t, _ in got] == [t.token for t in whole.choices[0].logprobs.content]
    top = whole.choices[0].logprobs.content[0].top_logprobs
    assert len(top) == 2 and top[0].logprob >= top[1].logprob, top


def check_several_choices(cell):
    options = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 16}
    answer = two(cell).chat(**options)
    texts = [c.message.content for c in answer.choices]
    assert len(set(texts)) > 1 and len(texts) == 3, texts
    by_index = {}
    for chunk in two(cell).chat(stream=True, **options):
        for choice in chunk.choices:
            by_index[choice.index] = by_index.get(choice.index, "") + (choice.delta.content or "")
    assert [by_index[i] for i in range(3)] == texts, (by_index, texts)


def check_stop_strings_end_the_work(cell):
    text = one(cell).chat(max_tokens=60, extra_body={"ignore_eos": True}).choices[0].message.content
    stop = text[20:25]
    answer = one(cell).chat(max_tokens=60, stop=[stop], extra_body={"ignore_eos": True})
    assert answer.choices[0].message.content == text[: text.index(stop)], answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 60, answer.usage


def check_json(cell):
    kind = {"type": "json_object"}
    begun = one(cell).chat(response_format=kind, max_tokens=40).choices[0].message.content
    assert begun.lstrip().startswith("{"), begun
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Adam", "Eve"]}, "age": {"type": "integer", "minimum": 0, "maximum": 969}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    kind = {"type": "json_schema", "json_schema": {"name": "who", "schema": schema}}
    said = json.loads(two(cell).chat(response_format=kind, max_tokens=200).choices[0].message.content)
    assert said["name"] in ("Adam", "Eve") and 0 <= said["age"] <= 969, said
    body = {"regex": "(Adam|Eve)[.]"}
    said = one(cell).chat(extra_body=body).choices[0].message.content
    assert said in ("Adam.", "Eve."), said
    body = {"ebnf": 'root ::= "(" root ")" | ("Adam" | "Eve")'}
    said = one(cell).chat(extra_body=body, max_tokens=60).choices[0]
    assert said.finish_reason == "length" or said.message.content.strip("()") in ("Adam", "Eve"), said


def check_a_tool_has_to_be_called(cell):
    parameters = {
        "type": "object",
        "properties": {"who": {"enum": ["Adam", "Eve"]}},
        "required": ["who"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "call", "description": "Calls", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "call"}}
    answer = one(cell).chat(tools=[tool], tool_choice=named, max_tokens=400)
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].function.name == "call", answer
    assert json.loads(calls[0].function.arguments)["who"] in ("Adam", "Eve"), calls
    # SMG asks for a list of calls that may hold anything else as well, and a model that knows one book finds no end of
    # that: what it begins with is a call.
    choice = one(cell).chat(tools=[tool], tool_choice="required", max_tokens=400).choices[0]
    begun = r'\s*\[\s*\{\s*"name"\s*:\s*"call"\s*,\s*"parameters"\s*:\s*\{\s*"who"\s*:\s*"(Adam|Eve)"\s*\}'
    assert choice.message.tool_calls or re.match(begun, choice.message.content), choice


def check_responses_messages_and_embeddings(cell):
    smg = two(cell)
    answer = smg.client.responses.create(model="kjv", input=PROMPT, max_output_tokens=20, temperature=0)
    assert answer.output_text == smg.chat(max_tokens=20).choices[0].message.content, answer.output_text
    status, said = smg.post(
        "/v1/messages",
        {"model": "kjv", "max_tokens": 20, "temperature": 0, "messages": [{"role": "user", "content": PROMPT}]},
    )
    assert status == 200 and said["content"][0]["text"] == answer.output_text, (status, said)
    vector = smg.client.embeddings.create(model="kjv", input=PROMPT).data[0].embedding
    assert len(vector) == 256 and abs(sum(v * v for v in vector) - 1) < 1e-3, len(vector)


def check_who_leaves_frees_the_place(cell):
    smg = one(cell)
    answer = smg.chat(max_tokens=1000, stream=True, extra_body={"ignore_eos": True})
    next(iter(answer))
    # SMG says so some 100 ms later, by a call.
    told = cell.freed(answer.close, seconds=5, tokens=800)
    with contextlib.suppress(openai.APITimeoutError):
        smg.client.with_options(timeout=0.3).chat.completions.create(
            model="kjv", temperature=0, messages=[{"role": "user", "content": PROMPT}], max_tokens=900, n=10, extra_body={"ignore_eos": True}
        )
        raise AssertionError("it was answered")
    cell.wait(lambda: cell.running() == 0, 5, "free")
    return told


def kill_at(cell, smg, at, count=120):
    """A stream under which the worker that has it is killed, and the same without."""
    calm = streamed(smg, count=count)
    killed = []

    def each(number):
        if number == at:
            busy = [w for w in cell.workers() if w["running_requests"] and w["pid"]]
            if busy:
                os.kill(busy[0]["pid"], signal.SIGKILL)
                killed.append(busy[0]["id"])

    return calm, streamed(smg, count=count, each=each), killed


def check_a_worker_killed_in_the_middle(cell):
    with cell.dies():
        calm, got, killed = kill_at(cell, one(cell), 5, 400)
    assert killed, "the stream was over before its worker could be killed"
    assert got == calm, (got, calm)
    assert len(got[0]) == 400
    # Before two hosts: whichever has the stream loses its worker.
    calm = streamed(two(cell), count=400)

    def each(number):
        if number == 5:
            for host in (cell, second()):
                for worker in host.workers():
                    if worker["running_requests"] and worker["pid"]:
                        os.kill(worker["pid"], signal.SIGKILL)
                        killed.append(worker["id"])

    before = cell.deaths() + second().deaths()
    for _ in range(2):
        assert streamed(two(cell), count=400, each=each) == calm
    assert len(killed) == 3, killed
    for host in (cell, second()):
        host.wait(host.is_ready, 30, "ready again")
    assert cell.deaths() + second().deaths() == before + 2
    return f"{len(killed)} workers killed, every token there"


def check_a_worker_stopped_in_the_middle(cell):
    calm = streamed(one(cell), count=400)
    stopped = []

    def each(number):
        if number == 5:
            stopped.extend(w["pid"] for w in cell.workers() if w["running_requests"] and w["pid"])
            os.kill(stopped[0], signal.SIGSTOP)

    with cell.dies():
        assert streamed(one(cell), count=400, each=each) == calm and stopped


def check_sixty_four_streams_and_a_killed_worker(cell):
    prompts = [f"{PROMPT} {number}" for number in range(64)]
    smg = one(cell)
    calm = dict(zip(prompts, together(smg, prompts, 40)))
    with cell.dies():
        got = together(smg, prompts, 40, lambda: cell.kill_worker())
    wrong = [p for p, answer in zip(prompts, got) if answer != calm[p]]
    assert not wrong, f"{len(wrong)} of 64 differ, the first: {got[prompts.index(wrong[0])]} and not {calm[wrong[0]]}"
    assert all(len(answer[0]) == 40 for answer in got)
    return "64 streams equal, with their log probabilities"


def together(smg, prompts, count, strike=None):
    begun = threading.Semaphore(0)

    def each(number):
        if number == 3:
            begun.release()

    joins = [hotcell.in_background(streamed, smg, prompt, count, each) for prompt in prompts]
    if strike:
        # A quarter of them is on its way.
        for _ in range(len(prompts) // 4):
            assert begun.acquire(timeout=120)
        strike()
    return [join(300) for join in joins]


def check_errors_are_what_engines_give(cell):
    smg = one(cell)
    body = {"model": "kjv", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    status, said = smg.post("/v1/chat/completions", {**body, "regex": "("})
    assert status == 400, (status, said)
    # It is not sent again.
    assert cell.log().count("GRAMMAR_INVALID") == 1, cell.log()
    status, said = smg.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Lord " * 3000}]})
    assert status == 400, (status, said)
    # The host is full: 256 continuations on each of its two workers.
    own = openai.OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=120)
    full = {**body, "n": 64, "max_tokens": 900, "temperature": 1.0, "stream": True, "extra_body": {"ignore_eos": True}}
    fillers = [own.chat.completions.create(**full) for _ in range(8)]
    try:
        cell.wait(lambda: running(cell) >= 512, 60, "full")
        status, said = smg.post("/v1/chat/completions", body)
        assert status == 429, (status, said)
        status, said = smg.post("/v1/chat/completions", {**body, "stream": True})
        assert status == 429, (status, said)
    finally:
        for filler in fillers:
            filler.close()
    cell.wait(lambda: running(cell) == 0, 30, "free")
    assert smg.chat(max_tokens=4).choices[0].message.content


def read_tokens(cell):
    """Tokens of prompts that a host's workers were given so far."""
    return sum(int(c["prompt_tokens"]) for w in cell.workers() for c in w["caches"])


def check_who_has_the_beginning_of_a_prompt_is_asked(cell):
    other = second()
    smg = Smg(cell, other, policy="cache_aware")
    led = 0
    for number, holder in enumerate([other, cell, other]):
        rest = other if holder is cell else cell
        prompt = f"{number}. " + PROMPT * 20
        # Not through SMG, which then can have heard of it from the host only.
        own = openai.OpenAI(base_url=f"{holder.url}/v1", api_key="none")
        messages = [{"role": "user", "content": prompt}]
        own.chat.completions.create(model="kjv", messages=messages, max_tokens=1, temperature=0)
        time.sleep(2)
        before = read_tokens(holder), read_tokens(rest)
        for _ in range(4):
            smg.chat(prompt, max_tokens=1)
        assert read_tokens(rest) == before[1] and read_tokens(holder) > before[0], (number, before, smg.log()[-2000:])
        led += 4
    return f"{led} of {led} requests went to the host that has their beginning"


def check_a_gguf_file_has_a_tokenizer(cell):
    other = hotcell.Hotcell(*FLAGS, devices="cpu:1").__enter__()
    try:
        other.command("unload", "kjv")
        models = pathlib.Path(__file__).resolve().parent.parent / "golden" / "models" / "gguf"
        other.command("load", str(models / "llama3-q8_0.gguf"), "--name", "kjv")
        smg = Smg(other)
        direct = openai.OpenAI(base_url=f"{other.url}/v1", api_key="none")
        for text in (PROMPT, "  naïve café, 東京 🙂\n\n12345"):
            messages = [{"role": "user", "content": text}]
            same = direct.chat.completions.create(model="kjv", messages=messages, max_tokens=24, temperature=0)
            answer = smg.chat(text)
            assert answer.usage.prompt_tokens == same.usage.prompt_tokens, (answer, same)
            assert answer.choices[0].message.content == same.choices[0].message.content, (answer, same)
    finally:
        other.__exit__()


if __name__ == "__main__":
    hotcell.main(globals(), *FLAGS, devices="cpu:2")
