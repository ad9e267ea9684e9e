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


def check_grpc(cell):
    async def run():
        async with InferenceGRPCClient(cell.grpc) as c:
            assert await c.is_server_live() and await c.is_server_ready() and await c.is_model_ready("kjv")
            whole = text_of(await c.infer(asked()))
            assert whole.startswith(PROMPT)
            dying = asyncio.create_task(c.infer(asked()))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(cell.kill_worker)
            assert text_of(await dying) == whole
            try:
                await c.infer(asked(model="nobody"))
                raise AssertionError("it was not refused")
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.NOT_FOUND, error

    asyncio.run(run())


def check_http(cell):
    async def run():
        c = InferenceRESTClient(RESTConfig(protocol="v2"))
        assert await c.is_server_live(cell.url) and await c.is_server_ready(cell.url)
        assert await c.is_model_ready(cell.url, "kjv")
        assert text_of(await c.infer(cell.url, asked(max_tokens=5), model_name="kjv")).startswith(PROMPT)
        try:
            await c.infer(cell.url, asked(model="nobody"), model_name="nobody")
            raise AssertionError("it was not refused")
        except httpx.HTTPStatusError as error:
            assert error.response.status_code == 404, error
        await c.close()

    asyncio.run(run())


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


hotcell.main(globals())
