# packages: kserve==0.21.0
"""kserve's own inference clients, unmodified: the protocol over gRPC and as JSON."""
import asyncio
import json

import grpc
import httpx
import kserve
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

import hotcell

PROMPT = "In the beginning"
SAMPLING = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


def asked(model="kjv", **sampling):
    said = json.dumps({**SAMPLING, **sampling})
    return InferRequest(
        request_id="my-id",
        model_name=model,
        infer_inputs=[
            InferInput("text_input", [1], "BYTES", data=[PROMPT]),
            InferInput("sampling_parameters", [1], "BYTES", data=[said]),
        ],
    )


def text_of(response):
    assert response.id == "my-id" and response.model_name == "kjv", response
    said = response.outputs[0].as_numpy().flatten()[0]
    return said.decode() if isinstance(said, bytes) else said


def whole(cell, **sampling):
    """What a request gives over gRPC, undisturbed."""
    async def run():
        async with InferenceGRPCClient(cell.grpc) as c:
            return text_of(await c.infer(asked(**sampling)))

    return asyncio.run(run())


def check_grpc(cell):
    async def run():
        async with InferenceGRPCClient(cell.grpc) as c:
            assert await c.is_server_live() and await c.is_server_ready() and await c.is_model_ready("kjv")
            assert text_of(await c.infer(asked())).startswith(PROMPT)
            for wrong, code in [(asked(model="nobody"), "NOT_FOUND"), (asked(temperature=-1), "INVALID_ARGUMENT"), (asked(n=2), "INVALID_ARGUMENT")]:
                try:
                    await c.infer(wrong)
                    raise AssertionError("it was not refused")
                except grpc.RpcError as error:
                    assert error.code().name == code and error.details(), error

    asyncio.run(run())


def check_http(cell):
    same = whole(cell, max_tokens=5)

    async def run():
        c = InferenceRESTClient(RESTConfig(protocol="v2"))
        assert await c.is_server_live(cell.url) and await c.is_server_ready(cell.url)
        assert await c.is_model_ready(cell.url, "kjv")
        assert text_of(await c.infer(cell.url, asked(max_tokens=5), model_name="kjv")) == same
        for wrong, status in [("nobody", 404), ("kjv", 400)]:
            try:
                await c.infer(cell.url, asked(model=wrong, n=2), model_name=wrong)
                raise AssertionError("it was not refused")
            except httpx.HTTPStatusError as error:
                assert error.response.status_code == status and error.response.json()["error"], error
        await c.close()

    asyncio.run(run())


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Adam", "Eve"]}}, "required": ["name"], "additionalProperties": False}


def check_structured_output(cell):
    async def run():
        more = {"guided_json": SCHEMA, "ignore_eos": False, "max_tokens": 200}
        async with InferenceGRPCClient(cell.grpc) as c:
            said = text_of(await c.infer(asked(**more))).removeprefix(PROMPT)
        rest = InferenceRESTClient(RESTConfig(protocol="v2"))
        same = text_of(await rest.infer(cell.url, asked(**more), model_name="kjv")).removeprefix(PROMPT)
        await rest.close()
        assert json.loads(said)["name"] in ("Adam", "Eve") and same == said, (said, same)

    asyncio.run(run())


# Long enough to be left, or to lose its worker, while it runs.
LONG = {"max_tokens": 900, "temperature": 0.9, "seed": 7}


async def under_way(cell, call):
    """A call as a task, once a worker has it."""
    task = asyncio.create_task(call)
    while not await asyncio.to_thread(cell.running):
        assert not task.done(), "it was over before it was seen to run"
    return task


def check_cancel(cell):
    """Whoever awaits an answer may leave, and the request ends."""
    async def run(c, call):
        task = await under_way(cell, call)
        loop = asyncio.get_running_loop()

        def leave():
            asyncio.run_coroutine_threadsafe(cancelled(task), loop).result(10)

        told = await asyncio.to_thread(cell.freed, leave)
        await c.close()
        return told

    async def cancelled(task):
        task.cancel()
        try:
            await task
            raise AssertionError("it was answered")
        except (asyncio.CancelledError, grpc.RpcError):
            pass

    async def over_grpc():
        c = InferenceGRPCClient(cell.grpc)
        return await run(c, c.infer(asked(**LONG)))

    async def over_http():
        c = InferenceRESTClient(RESTConfig(protocol="v2"))
        return await run(c, c.infer(cell.url, asked(**LONG), model_name="kjv"))

    return f"gRPC: {asyncio.run(over_grpc())}; HTTP: {asyncio.run(over_http())}"


def check_worker_killed(cell):
    calm = whole(cell, **LONG)

    async def run(call):
        task = await under_way(cell, call)
        await asyncio.to_thread(cell.kill_worker)
        assert not task.done(), "it was over before its worker was killed"
        assert text_of(await task) == calm

    async def over_grpc():
        async with InferenceGRPCClient(cell.grpc) as c:
            await run(c.infer(asked(**LONG)))

    async def over_http():
        c = InferenceRESTClient(RESTConfig(protocol="v2"))
        await run(c.infer(cell.url, asked(**LONG), model_name="kjv"))
        await c.close()

    for call in (over_grpc, over_http):
        with cell.dies():
            asyncio.run(call())


def check_overload(cell):
    async def run(model):
        async with InferenceGRPCClient(cell.grpc) as c:
            try:
                await c.infer(asked(model=model, max_tokens=2))
                raise AssertionError("it went through")
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and error.details(), error
        c = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        try:
            await c.infer(cell.url, asked(model=model, max_tokens=2), model_name=model)
            raise AssertionError("it went through")
        except httpx.HTTPStatusError as error:
            assert error.response.status_code == 429 and int(error.response.headers["retry-after"]) > 0, error
        await c.close()

    with cell.full() as model:
        asyncio.run(run(model))


def check_loads_by_its_own_fields(cell):
    with grpc.insecure_channel(cell.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        done = stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="kjv"))
        assert done.model_name == "kjv" and done.isUnloaded, done
        done = stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="kjv"))
        assert done.model_name == "kjv" and done.isLoaded, done


def check_readme(cell):
    async def run():
        async with eval(hotcell.readme(cell, "KServe's"), {"kserve": kserve}) as c:
            assert await c.is_model_ready("kjv")

    asyncio.run(run())


hotcell.main(globals(), "--queue-timeout", "200ms")
