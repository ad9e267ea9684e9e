# packages: grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: openssl
# quick
"""Which doors there are, who gets in by which, and who is kept out for whose faults: on running hosts."""
import contextlib
import http.client
import json
import pathlib
import ssl
import time

import grpc

import certificates
import hotcell
import rpc

PROMPT = "In the beginning"


def ask(address, path, body=None, headers=None, context=None, timeout=20):
    """Status and body of one request over a connection of its own."""
    host, port = address.split(":")
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = kind(host, int(port), timeout=timeout, **({"context": context} if context else {}))
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def code(channel, told, method, body, **options):
    """The name of the status that a call ends with."""
    try:
        answer = told.call(channel, method, body, **{"timeout": 20, **options})
        if hasattr(answer, "__iter__"):
            list(answer)
        return "OK"
    except grpc.RpcError as error:
        return error.code().name


# A request of each protocol that is served under a path, and one of each that is a service.
PATHS = {
    "openai": ("/v1/models", None), "ollama": ("/api/tags", None), "oip": ("/v2", None), "metrics": ("/metrics", None), "live": ("/live", None),
    "anthropic": ("/v1/messages", {"model": "kjv", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
}
SERVICES = {"oip": "inference.GRPCInferenceService/ServerLive", "vllm": "vllm.grpc.engine.VllmEngine/HealthCheck"}


def check_protocols_that_are_left_out(cell):
    """Nothing answers there, and reflection does not tell of them; health and Hotcell's own gRPC are always served."""
    with contextlib.ExitStack() as stack:
        own = rpc.Methods(cell)
        for chosen in (["openai", "metrics"], ["ollama", "live"], ["anthropic", "vllm"], ["oip"]):
            with hotcell.Hotcell("--protocols", ",".join(chosen)) as other:
                for name, (path, body) in PATHS.items():
                    status, told = ask(other.http, path, body)
                    assert status == (200 if name in chosen else 404), (chosen, name, status, told)
                channel = stack.enter_context(grpc.insecure_channel(other.grpc))
                listed = rpc.Methods(other).services()
                for name, method in SERVICES.items():
                    wanted = "OK" if name in chosen else "UNIMPLEMENTED"
                    assert code(channel, own, method, {}) == wanted, (chosen, method)
                    assert (method.split("/")[0] in listed) == (name in chosen), (chosen, listed)
                assert code(channel, own, "hotcell.v1.Control/ListModels", {}) == "OK"
                assert ask(other.http, "/readyz")[0] == ask(other.http, "/healthz")[0] == 200
    # All of them are served where nothing is said.
    assert all(ask(cell.http, path, body)[0] == 200 for path, body in PATHS.values())


def trusting(client=None):
    """What a client believes, and which certificate it shows."""
    context = ssl.create_default_context(cafile=f"{certificates.secrets()[0]}/ca.pem")
    context.check_hostname = False
    if client:
        context.load_cert_chain(f"{certificates.clients()}/{client}.pem", f"{certificates.clients()}/{client}.key")
    return context


def secure_channel(cell, client=None):
    read = lambda path: pathlib.Path(path).read_bytes()  # noqa: E731
    own = {} if client is None else {"private_key": read(f"{certificates.clients()}/{client}.key"), "certificate_chain": read(f"{certificates.clients()}/{client}.pem")}
    credentials = grpc.ssl_channel_credentials(read(f"{certificates.secrets()[0]}/ca.pem"), **own)
    return grpc.secure_channel(cell.grpc, credentials, [("grpc.ssl_target_name_override", "hotcell")])


def certificate():
    folder, _ = certificates.secrets()
    return ["--tls-cert", f"{folder}/cert.pem", "--tls-key", f"{folder}/key.pem"]


def check_tls_at_one_door_only(cell):
    own = rpc.Methods(cell)
    for door in ("grpc", "http"):
        with hotcell.Hotcell(*certificate(), "--tls-doors", door) as other:
            plain, secure = grpc.insecure_channel(other.grpc), secure_channel(other)
            told = {
                "http": lambda: ask(other.http, "/v1/models")[0] == 200, "https": lambda: ask(other.http, "/v1/models", context=trusting())[0] == 200,
                "grpc": lambda: code(plain, own, "hotcell.v1.Control/ListModels", {}, timeout=5) == "OK",
                "grpcs": lambda: code(secure, own, "hotcell.v1.Control/ListModels", {}, timeout=5) == "OK",
            }
            served = set()
            for name, serves in told.items():
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if serves():
                        served.add(name)
            assert served == {"grpcs", "http"} if door == "grpc" else {"grpc", "https"}, (door, served)
            plain.close()
            secure.close()


def check_certificates_of_clients(cell):
    """Mutual TLS at both doors: who shows none, or a stranger's, is not let in; who shows one needs no token."""
    own = rpc.Methods(cell)
    with hotcell.Hotcell(*certificate(), "--tls-client-ca", f"{certificates.clients()}/clients.pem") as other:
        status, told = ask(other.http, "/v1/completions", {"model": "kjv", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}, context=trusting("bob"))
        assert status == 200 and json.loads(told)["choices"][0]["text"], told
        for client in (None, "mallory"):
            try:
                status, told = ask(other.http, "/v1/models", context=trusting(client))
                raise AssertionError(f"{client} was let in: {status} {told}")
            except (OSError, http.client.HTTPException):
                pass
        with secure_channel(other, "bob") as channel:
            assert code(channel, own, "hotcell.v1.Control/ListModels", {}) == "OK"
            # The certificate says who it is, with the role `use`.
            assert code(channel, own, "hotcell.v1.Control/ListCrashes", {}) == "PERMISSION_DENIED"
        for client in (None, "mallory"):
            with secure_channel(other, client) as channel:
                assert code(channel, own, "hotcell.v1.Control/ListModels", {}, timeout=5) in ("UNAVAILABLE", "UNAUTHENTICATED", "DEADLINE_EXCEEDED"), client
        # They did it no harm.
        assert ask(other.http, "/readyz", context=trusting("bob"))[0] == 200


def tokens():
    folder, token = certificates.secrets()
    return f"{folder}/tokens.toml", token


def shut_out(cell, seconds=20):
    """Calls with a wrong token, over one connection after another, until one is closed before its first answer: how many it
    took, or none if it never came to that."""
    until, count = time.monotonic() + seconds, 0
    host, port = cell.http.split(":")
    while time.monotonic() < until:
        connection, before = http.client.HTTPConnection(host, int(port), timeout=5), count
        try:
            while time.monotonic() < until:
                connection.request("GET", "/v1/models", headers={"authorization": "Bearer nobody.nothing"})
                answer = connection.getresponse()
                answer.read()
                assert answer.status in (401, 429), answer.status
                count += 1
        except (OSError, http.client.HTTPException):
            if count == before:
                return count
        finally:
            connection.close()
    return None


def check_whose_fault_it_is(_):
    """One client that goes on calling with a wrong token is shut out for a while; behind a proxy that is trusted to keep its
    clients apart, the others are not shut out with it."""
    file, token = tokens()
    good = {"authorization": f"Bearer {token}"}

    def others(cell):
        try:
            return ask(cell.http, "/v1/models", headers=good, timeout=5)[0]
        except (OSError, http.client.HTTPException):
            return 0

    with hotcell.Hotcell("--tokens", file) as other:
        count = shut_out(other)
        assert count and count > 500, count
        assert others(other) != 200, "it was let in"
        other.wait(lambda: others(other) == 200, 60, "let in again")
    with hotcell.Hotcell("--tokens", file, "--trusted-proxies", "127.0.0.1/32") as other:
        assert shut_out(other, 5) is None and others(other) == 200, "all who come by the proxy were shut out"
    with hotcell.Hotcell("--tokens", file, "--trusted-proxies", "192.0.2.7") as other:
        assert shut_out(other) and others(other) != 200, "an address that is no proxy's was trusted"
    return f"shut out after {count} calls; behind the proxy never"


hotcell.main(globals())
