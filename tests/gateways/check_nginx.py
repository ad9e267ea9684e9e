# packages: grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: nginx openssl
# quick
"""nginx before two hosts, with deploy/nginx.conf."""
import os

import hotcell
import proxied


def command(proxy):
    if "client_body_temp_path" not in proxy.config.read_text():
        # Where Debian's nginx writes only root may, and its processes would become somebody who may not.
        folders = "".join(f"{kind}_temp_path {proxy.folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        proxy.config.write_text(proxy.config.read_text().replace("http {", "http { " + folders, 1))
    user = "user root; " if os.geteuid() == 0 else ""
    return ["nginx", "-e", f"{proxy.folder}/errors.log", "-c", str(proxy.config), "-g", f"{user}daemon off; pid {proxy.folder}/pid;"]


# Requests that may be lost (of a host without a worker: at once, and after two seconds), and how a stream ends whose host dies.
ROWS = {"full": 10, "unavailable": [10, 10], "killed": 0, "stopped": 5, "dies": ["INTERNAL", "UNAVAILABLE"]}
CHECKS = proxied.checks(command, "nginx.conf", lambda proxy: [*command(proxy), "-t"], ROWS)

hotcell.main(CHECKS, *proxied.flags())
