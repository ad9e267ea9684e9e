# packages: grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: haproxy openssl
# quick
"""HAProxy before two hosts, with deploy/haproxy.cfg."""
import hotcell
import proxied


def command(proxy):
    return ["haproxy", "-f", str(proxy.config), "-db"]


# Requests that may be lost (of a host without a worker: at once, and after two seconds), and how a stream ends whose host dies.
ROWS = {"full": 10, "unavailable": [10, 0], "killed": 0, "stopped": 1, "dies": ["UNKNOWN", "INTERNAL", "UNAVAILABLE"]}
CHECKS = proxied.checks(command, "haproxy.cfg", lambda proxy: [*command(proxy), "-c"], ROWS)

hotcell.main(CHECKS, *proxied.flags())
