# packages: tritonclient[grpc,http]==2.73.0 numpy
# quick
"""Triton's own client, unmodified, over gRPC and HTTP: text models as vLLM's models in Triton look to it."""
import json
import pathlib
import queue
import sys
import threading
import time
import urllib.error
import urllib.request

# This file has the client's name; the client is found beside its interpreter, not here.
sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != pathlib.Path(__file__).resolve().parent]
import numpy as np
import tritonclient
import tritonclient.grpc as triton
import tritonclient.http as over_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import graphs
import hotcell

PROMPT = "In the beginning"
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def text_input(name, text):
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def truth(name, value):
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value], dtype=bool))
    return tensor


def inputs(stream=False, **sampling):
    return [
        text_input("text_input", PROMPT),
        text_input("sampling_parameters", json.dumps({**GREEDY, **sampling})),
        truth("stream", stream),
        truth("exclude_input_in_output", True),
    ]


def text_of(result):
    return result.as_numpy("text_output")[0].decode()


def client(cell):
    return triton.InferenceServerClient(cell.grpc)


def refused(call, code):
    try:
        call()
    except InferenceServerException as error:
        assert code in str(error.status()), error
        return error.message()
    raise AssertionError("it was not refused")


class Streaming:
    """One stream of requests, and what came of each."""

    def __init__(self, cell):
        self.client, self.came = client(cell), queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.came.put((result, error)))

    def ask(self, id, empty=False, model="kjv", asked=None, **sampling):
        asked = asked or inputs(stream=True, **sampling)
        self.client.async_stream_infer(model, asked, request_id=id, enable_empty_final_response=empty)

    def next(self):
        return self.came.get(timeout=60)

    def collect(self, ids):
        """The texts by id, until each request had its last response; and how many responses had tensors."""
        texts, count, open_ = {id: "" for id in ids}, 0, set(ids)
        while open_:
            result, error = self.next()
            assert error is None, error
            response = result.get_response()
            if response.outputs:
                count += 1
                texts[response.id] += text_of(result)
            if response.parameters["triton_final_response"].bool_param:
                open_.remove(response.id)
        return texts, count

    def close(self, **options):
        self.client.stop_stream(**options)


def check_tells_what_there_is(cell):
    c = client(cell)
    assert c.is_server_live() and c.is_server_ready() and c.is_model_ready("kjv")
    assert not c.is_model_ready("nobody") and not c.is_model_ready("kjv", "2")
    server = c.get_server_metadata()
    assert server.name == "hotcell" and "system_shared_memory" in server.extensions, server
    model = c.get_model_metadata("kjv")
    assert [t.name for t in model.inputs][0] == "text_input" and model.outputs[0].datatype == "BYTES", model
    assert c.get_model_config("kjv").config.model_transaction_policy.decoupled
    index = c.get_model_repository_index().models
    assert [(m.name, m.state) for m in index] == [("kjv", "READY")], index
    assert c.get_trace_settings().settings["trace_level"].value == ["OFF"]
    assert c.get_log_settings().settings["log_info"].bool_param


def check_infers(cell):
    c = client(cell)
    result = c.infer("kjv", inputs(), request_id="my id", priority=1, timeout=30_000_000)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("my id", "kjv", "1"), response
    whole = text_of(result)
    assert whole
    # Without being told otherwise, the text begins with what went in.
    both = c.infer("kjv", [text_input("text_input", PROMPT), text_input("sampling_parameters", json.dumps(GREEDY))])
    assert text_of(both) == PROMPT + whole, text_of(both)
    # The same by parameters of the request, and with all that can come out.
    names = ["text_output", "finish_reason", "num_input_tokens", "num_output_tokens"]
    asked = [text_input("text_input", PROMPT), truth("exclude_input_in_output", True)]
    outputs = [triton.InferRequestedOutput(name) for name in names]
    result = c.infer("kjv", asked, outputs=outputs, parameters={"temperature": 0, "max_tokens": 24, "ignore_eos": True})
    assert text_of(result) == whole
    assert result.as_numpy("finish_reason")[0] == b"length" and result.as_numpy("num_output_tokens")[0] == 24
    return repr(whole[:40])


def check_streams_several_at_once(cell):
    whole = text_of(client(cell).infer("kjv", inputs()))
    stream = Streaming(cell)
    ids = [f"r{i}" for i in range(4)]
    for id in ids:
        stream.ask(id)
    texts, count = stream.collect(ids)
    assert all(text == whole for text in texts.values()), (whole, texts)
    stream.ask("empty", empty=True)
    texts, _ = stream.collect(["empty"])
    assert texts["empty"] == whole
    stream.close()
    return f"{count} responses to {len(ids)} requests"


def check_errors_leave_the_stream_open(cell):
    c = client(cell)
    assert "nobody" in refused(lambda: c.infer("nobody", inputs()), "NOT_FOUND")
    assert "text_input" in refused(lambda: c.infer("kjv", []), "INVALID_ARGUMENT")
    refused(lambda: c.infer("kjv", inputs(stream=True)), "INVALID_ARGUMENT")
    assert "n cannot be 2" in refused(lambda: c.infer("kjv", inputs(n=2)), "INVALID_ARGUMENT")
    assert "image" in refused(lambda: c.infer("kjv", [*inputs(), text_input("image", "x")]), "INVALID_ARGUMENT")
    # Of many, since whoever ends it first says why: the service, what is before it, the library below, or the client.
    for _ in range(20):
        refused(lambda: c.infer("kjv", inputs(max_tokens=1000), client_timeout=0.05), "DEADLINE_EXCEEDED")
    refused(lambda: c.infer("kjv", inputs(max_tokens=1000), timeout=50_000), "DEADLINE_EXCEEDED")
    refused(lambda: c.update_log_settings({"log_info": False}), "UNIMPLEMENTED")
    stream = Streaming(cell)
    stream.ask("bad", n=2)
    _, error = stream.next()
    assert "n cannot be 2" in error.message(), error
    stream.ask("good")
    texts, _ = stream.collect(["good"])
    assert texts["good"]
    stream.close()


def check_a_client_that_leaves_ends_its_request(cell):
    before = failures(cell)
    stream = Streaming(cell)
    stream.ask("long", max_tokens=1000)
    stream.next()
    told = cell.freed(lambda: stream.close(cancel_requests=True))
    cell.wait(lambda: failures(cell) == before + 1, 10, "ended")
    return told


def statistics(cell):
    return client(cell).get_inference_statistics("kjv").model_stats[0]


def failures(cell):
    return statistics(cell).inference_stats.fail.count


def check_statistics_count(cell):
    before = statistics(cell)
    client(cell).infer("kjv", inputs())
    after = statistics(cell)
    assert after.inference_count == before.inference_count + 1
    stats, old = after.inference_stats, before.inference_stats
    assert stats.success.ns - old.success.ns > stats.compute_infer.ns - old.compute_infer.ns > 0, stats
    [batch] = after.batch_stats
    assert batch.batch_size == 1 and batch.compute_infer == stats.compute_infer, batch


def check_shared_memory(cell):
    c = client(cell)
    c.unregister_system_shared_memory()
    whole = text_of(c.infer("kjv", inputs()))
    serialized = serialize_byte_tensor(np.array([PROMPT.encode()], dtype=np.object_))
    size = len(serialized.item())
    handle = shm.create_shared_memory_region("both", f"/hotcell-{cell.folder.name}", 4096)
    try:
        shm.set_shared_memory_region(handle, [serialized])
        c.register_system_shared_memory("both", f"/hotcell-{cell.folder.name}", 4096)
        status = c.get_system_shared_memory_status().regions["both"]
        assert (status.byte_size, status.offset) == (4096, 0), status
        asked = inputs()
        asked[0] = triton.InferInput("text_input", [1], "BYTES")
        asked[0].set_shared_memory("both", size)
        output = triton.InferRequestedOutput("text_output")
        output.set_shared_memory("both", 2048, offset=2048)
        result = c.infer("kjv", asked, outputs=[output])
        where = result.get_output("text_output").parameters
        assert where["shared_memory_region"].string_param == "both", where
        there = shm.get_contents_as_numpy(handle, np.object_, [1], offset=2048)
        assert there[0].decode() == whole, there
        output.set_shared_memory("both", 2049, offset=2048)
        refused(lambda: c.infer("kjv", asked, outputs=[output]), "INVALID_ARGUMENT")
        output.set_shared_memory("both", 4, offset=2048)
        refused(lambda: c.infer("kjv", asked, outputs=[output]), "INVALID_ARGUMENT")
        refused(lambda: c.register_system_shared_memory("x", "/no-such-key", 1), "NOT_FOUND")
        file = pathlib.Path(f"/dev/shm/hotcell-{cell.folder.name}")
        with open(file, "r+b") as f:
            f.truncate(16)
        assert "shorter" in refused(lambda: c.infer("kjv", asked), "FAILED_PRECONDITION")
        with open(file, "r+b") as f:
            f.truncate(4096)
        c.unregister_system_shared_memory("both")
        assert "both" not in c.get_system_shared_memory_status().regions
        refused(lambda: c.infer("kjv", asked), "NOT_FOUND")
    finally:
        shm.destroy_shared_memory_region(handle)
    refused(lambda: c.register_cuda_shared_memory("gpu", b"AAAA", 0, 64), "UNIMPLEMENTED")


def check_a_worker_killed_under_a_stream_is_not_noticed(cell):
    whole = text_of(client(cell).infer("kjv", inputs(max_tokens=200)))
    stream = Streaming(cell)
    with cell.dies():
        stream.ask("calm", empty=True, max_tokens=200)
        first, error = stream.next()
        assert error is None, error
        cell.kill_worker()
        texts, _ = stream.collect(["calm"])
    stream.close()
    assert text_of(first) + texts["calm"] == whole, texts


def check_loads_and_unloads(cell):
    c = client(cell)
    c.unload_model("kjv")
    assert not c.is_model_ready("kjv")
    assert c.get_model_repository_index().models[0].state == "UNAVAILABLE"
    refused(lambda: c.infer("kjv", inputs()), "NOT_FOUND")
    c.load_model("kjv")
    assert c.is_model_ready("kjv") and text_of(c.infer("kjv", inputs()))
    refused(lambda: c.load_model("kjv", config="{}"), "UNIMPLEMENTED")


def http_inputs(binary, **sampling):
    tensors = []
    for name, text in [("text_input", PROMPT), ("sampling_parameters", json.dumps({**GREEDY, **sampling}))]:
        tensors.append(over_http.InferInput(name, [1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([text.encode()], dtype=np.object_), binary_data=binary)
    tensors.append(over_http.InferInput("exclude_input_in_output", [1], "BOOL"))
    tensors[-1].set_data_from_numpy(np.array([True], dtype=bool), binary_data=binary)
    return tensors


def check_http(cell):
    """The same as JSON, with tensors in it or behind it."""
    whole = text_of(client(cell).infer("kjv", inputs()))
    c = over_http.InferenceServerClient(cell.http)
    assert c.is_server_live() and c.is_server_ready() and c.is_model_ready("kjv") and c.is_model_ready("kjv", "1")
    assert not c.is_model_ready("nobody")
    assert c.get_server_metadata()["name"] == "hotcell"
    assert c.get_model_metadata("kjv")["inputs"][0]["name"] == "text_input"
    assert c.get_model_config("kjv")["model_transaction_policy"]["decoupled"] is True
    assert c.get_model_repository_index()[0]["state"] == "READY"
    for binary in (True, False):
        output = over_http.InferRequestedOutput("text_output", binary_data=binary)
        result = c.infer("kjv", http_inputs(binary), request_id="i", outputs=[output], timeout=30_000_000)
        said = result.as_numpy("text_output")[0]
        assert (said if isinstance(said, str) else said.decode()) == whole, said
        assert result.get_response()["id"] == "i"
    assert c.get_inference_statistics("kjv")["model_stats"][0]["inference_stats"]["success"]["count"] > 0
    for call, status in [
        (lambda: c.infer("nobody", http_inputs(True)), "404"),
        (lambda: c.infer("kjv", http_inputs(True, n=2)), "400"),
        (lambda: c.infer("kjv", http_inputs(True, max_tokens=1000), timeout=50_000), "504"),
        (lambda: c.register_cuda_shared_memory("gpu", b"AAAA", 0, 64), "501"),
    ]:
        refused(call, status)
    key = f"/hotcell-http-{cell.folder.name}"
    handle = shm.create_shared_memory_region("h", key, 1024)
    try:
        serialized = serialize_byte_tensor(np.array([PROMPT.encode()], dtype=np.object_))
        shm.set_shared_memory_region(handle, [serialized])
        c.register_system_shared_memory("h", key, 1024)
        assert c.get_system_shared_memory_status()[0]["byte_size"] == 1024
        asked = http_inputs(True)
        asked[0] = over_http.InferInput("text_input", [1], "BYTES")
        asked[0].set_shared_memory("h", len(serialized.item()))
        assert c.infer("kjv", asked).as_numpy("text_output")[0].decode() == whole
        c.unregister_system_shared_memory("h")
    finally:
        shm.destroy_shared_memory_region(handle)
    c.unload_model("kjv")
    assert not c.is_model_ready("kjv")
    c.load_model("kjv")
    assert c.is_model_ready("kjv")


def post(cell, path, value):
    body = json.dumps(value).encode()
    return urllib.request.urlopen(urllib.request.Request(f"{cell.url}{path}", data=body), timeout=60)


def check_generate(cell):
    """Triton's generate, whole and in pieces, under which a worker is killed."""
    whole = text_of(client(cell).infer("kjv", inputs(max_tokens=200)))
    asked = {"text_input": PROMPT, "exclude_input_in_output": True, "parameters": {**GREEDY, "max_tokens": 200}}
    said = json.load(post(cell, "/v2/models/kjv/generate", asked))
    assert said["text_output"] == whole, said
    deaths = cell.deaths()
    pieces = []
    with post(cell, "/v2/models/kjv/generate_stream", {**asked, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer:
            if line.startswith(b"data: "):
                pieces.append(json.loads(line[6:])["text_output"])
                if len(pieces) == 1:
                    cell.kill_worker()
    assert "".join(pieces) == whole, pieces
    cell.wait(lambda: cell.is_ready() and cell.deaths() == deaths + 1, 30, "back")
    try:
        post(cell, "/v2/models/kjv/generate", {**asked, "stream": True})
        raise AssertionError("it was not refused")
    except urllib.error.HTTPError as error:
        assert error.code == 400 and "stream" in json.load(error)["error"]
    return f"{len(pieces)} pieces"


def check_many_at_once(cell):
    """More than a worker computes at once: all are answered, or told why not."""
    whole = text_of(client(cell).infer("kjv", inputs()))
    stream, texts = Streaming(cell), {}
    ids = [f"r{i}" for i in range(300)]
    threading.Thread(target=lambda: [stream.ask(id) for id in ids], daemon=True).start()
    texts, count = stream.collect(ids)
    assert all(text == whole for text in texts.values())
    stream.close()
    return f"{count} responses to {len(ids)} requests"


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Adam", "Eve"]}}, "required": ["name"], "additionalProperties": False}


def check_structured_output(cell):
    c = client(cell)
    asked = {"max_tokens": 200, "ignore_eos": False}
    formats = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}}
    for more in ({"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)}, {"response_format": formats}):
        told = json.loads(text_of(c.infer("kjv", inputs(**asked, **more))))
        assert list(told) == ["name"] and told["name"] in ("Adam", "Eve"), (more, told)
    assert text_of(c.infer("kjv", inputs(**asked, guided_choice=["Adam.", "Eve."]))) in ("Adam.", "Eve.")
    # As the request's own parameters, which are texts.
    plain = [text_input("text_input", PROMPT), truth("exclude_input_in_output", True)]
    for name, value in (("guided_json", json.dumps(SCHEMA)), ("response_format", json.dumps(formats))):
        told = text_of(c.infer("kjv", plain, parameters={"temperature": 0, "max_tokens": 200, name: value}))
        assert '"Adam"' in told or '"Eve"' in told, (name, told)
        assert json.loads(told)["name"] in ("Adam", "Eve"), (name, told)
    told = text_of(c.infer("kjv", plain, parameters={"temperature": 0, "max_tokens": 20, "guided_choice": '["Adam.", "Eve."]'}))
    assert told in ("Adam.", "Eve."), told
    stream = Streaming(cell)
    stream.ask("json", **asked, guided_json=SCHEMA)
    texts, _ = stream.collect(["json"])
    stream.close()
    assert json.loads(texts["json"])["name"] in ("Adam", "Eve"), texts
    assert "regex" in refused(lambda: c.infer("kjv", inputs(**asked, guided_regex="(")), "INVALID_ARGUMENT")


def check_overload(cell):
    c = client(cell)
    with cell.full() as model:
        assert "place" in refused(lambda: c.infer(model, inputs(max_tokens=2)), "RESOURCE_EXHAUSTED")
        stream = Streaming(cell)
        stream.ask("full", model=model, max_tokens=2)
        _, error = stream.next()
        assert error and "place" in error.message(), error
        # The stream stays for what there is room for.
        stream.ask("good")
        assert stream.collect(["good"])[0]["good"]
        stream.close()
        refused(lambda: over_http.InferenceServerClient(cell.http).infer(model, http_inputs(True, max_tokens=2)), "429")
        assert text_of(c.infer("kjv", inputs()))


def rows(module, x, binary=None):
    tensor = module.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x, **({} if binary is None else {"binary_data": binary}))
    return [tensor]


def check_a_saved_graph(cell):
    """A function of tensors that was saved under a name is a model like any other, in the message or in shared memory."""
    draw = np.random.default_rng(1)
    w = draw.standard_normal((32, 32), dtype=np.float32) / 4
    x = draw.standard_normal((5, 32), dtype=np.float32)
    c, h = client(cell), over_http.InferenceServerClient(cell.http)
    with graphs.saved(cell, "layer", graphs.layers(64, 32, 2), w.tobytes()) as name:
        expected = np.tanh(np.tanh(x @ w) @ w)
        told = c.get_model_metadata(name)
        assert [(t.name, t.datatype, list(t.shape)) for t in [*told.inputs, *told.outputs]] == [("x", "FP32", [-1, 32]), ("y", "FP32", [-1, 32])], told
        assert c.is_model_ready(name) and h.is_model_ready(name)
        assert name in [m.name for m in c.get_model_repository_index().models]
        y = c.infer(name, rows(triton, x), request_id="i").as_numpy("y")
        assert y.shape == (5, 32) and np.allclose(y, expected, atol=1e-5), np.abs(y - expected).max()
        # However it is asked, the bits are the same; and a row's, whatever comes with it.
        for binary in (True, False):
            asked = over_http.InferRequestedOutput("y", binary_data=binary)
            assert (h.infer(name, rows(over_http, x, binary), outputs=[asked]).as_numpy("y") == y).all(), binary
        assert (c.infer(name, rows(triton, x[2:3])).as_numpy("y") == y[2:3]).all()
        stream = Streaming(cell)
        stream.ask("s", model=name, asked=rows(triton, x))
        result, error = stream.next()
        assert error is None and (result.as_numpy("y") == y).all(), error
        stream.close()
        key = f"/hotcell-graph-{cell.folder.name}"
        handle = shm.create_shared_memory_region("graph", key, 4096)
        try:
            shm.set_shared_memory_region(handle, [x])
            c.register_system_shared_memory("graph", key, 4096)
            asked = [triton.InferInput("x", [5, 32], "FP32")]
            asked[0].set_shared_memory("graph", x.nbytes)
            output = triton.InferRequestedOutput("y")
            output.set_shared_memory("graph", y.nbytes, offset=2048)
            c.infer(name, asked, outputs=[output])
            assert (shm.get_contents_as_numpy(handle, np.float32, [5, 32], offset=2048) == y).all()
            c.unregister_system_shared_memory("graph")
        finally:
            shm.destroy_shared_memory_region(handle)
        before = c.get_inference_statistics(name).model_stats[0].inference_stats.success.count
        c.infer(name, rows(triton, x))
        assert c.get_inference_statistics(name).model_stats[0].inference_stats.success.count == before + 1
        for wrong in (x[:, :31], np.zeros((65, 32), np.float32), np.zeros((0, 32), np.float32)[:, :5], x.reshape(5, 4, 8)):
            refused(lambda w=wrong: c.infer(name, rows(triton, np.ascontiguousarray(w))), "INVALID_ARGUMENT")
            refused(lambda w=wrong: h.infer(name, rows(over_http, np.ascontiguousarray(w), True)), "400")
        wrong = triton.InferInput("x", [5, 32], "INT32")
        wrong.set_data_from_numpy(np.zeros((5, 32), np.int32))
        refused(lambda: c.infer(name, [wrong]), "INVALID_ARGUMENT")
        refused(lambda: c.infer(name, []), "INVALID_ARGUMENT")
    refused(lambda: c.infer("layer", rows(triton, x)), "NOT_FOUND")


def check_a_worker_killed_under_a_saved_graph(cell):
    """Its call is made again elsewhere, and gives the same bits."""
    draw = np.random.default_rng(2)
    w = draw.standard_normal((512, 512), dtype=np.float32) / 16
    x = draw.standard_normal((1024, 512), dtype=np.float32)
    c = client(cell)
    with graphs.saved(cell, "deep", graphs.layers(1024, 512, 60), w.tobytes()) as name:
        c.infer(name, rows(triton, x[:1]))
        began = time.monotonic()
        calm = c.infer(name, rows(triton, x)).as_numpy("y")
        took = time.monotonic() - began
        for ask in (lambda: c.infer(name, rows(triton, x)),
                    lambda: over_http.InferenceServerClient(cell.http).infer(name, rows(over_http, x, True))):
            for _ in range(5):
                with cell.dies():
                    join = hotcell.in_background(lambda: (ask().as_numpy("y"), time.monotonic()))
                    time.sleep(took / 3)
                    cell.kill_worker()
                    killed = time.monotonic()
                    y, ended = join()
                assert (y == calm).all()
                # On a machine whose speed changes it may be over by then, which shows nothing.
                if ended > killed:
                    break
                took /= 2
            assert ended > killed, "the call was over before its worker was killed, five times"
    return f"a call of {took:.1f} s"


def check_readme(cell):
    for door in ("gRPC", "HTTP"):
        assert eval(hotcell.readme(cell, f"Triton's over {door}"), {"tritonclient": tritonclient}).is_model_ready("kjv"), door


hotcell.main(globals(), "--queue-timeout", "200ms")
