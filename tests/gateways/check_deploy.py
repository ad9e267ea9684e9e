# packages: kubernetes-validate==1.37.0 grpcio==1.76.0 grpcio-reflection==1.76.0
# programs: openssl
# quick
"""The files of deploy/: units, manifests, the container's; that they say what the programs know, and that what a pod runs serves."""
import copy
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import ssl
import subprocess
import tempfile
import time

import kubernetes_validate
import yaml

import certificates
import hotcell
import proxied

DEPLOY = proxied.DEPLOY
ROOT = DEPLOY.parent
# Of resources that a cluster learns from extensions.
FOREIGN = {"InferencePool", "HTTPRoute"}
# By what Kubernetes tells the parts of a list apart that a patch changes.
KEYS = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}


def text(path):
    return path.read_text(errors="replace")


def files():
    return [p for p in sorted(DEPLOY.rglob("*")) if p.is_file() and "models" not in p.parts]


def known_flags():
    """Long flags of the programs."""
    flags = set()
    for program in (["hotcell-scheduler"], ["hotcell", "serve"], ["hotcell"], ["hotcell-worker"]):
        command = [os.path.join(os.environ["HOTCELL_BIN_DIR"], program[0]), *program[1:], "--help"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        flags |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", told))
    return flags


def merged(base, patch):
    """A resource with a patch of kustomize's kind put over it."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return copy.deepcopy(patch)
    done = copy.deepcopy(base)
    for name, value in patch.items():
        key = KEYS.get(name, ("containerPort" if isinstance(value, list) and value and "containerPort" in value[0] else "port") if name == "ports" else None)
        if isinstance(value, list) and key and name in done:
            for part in value:
                same = [i for i, old in enumerate(done[name]) if old[key] == part[key]]
                if part.get("$patch") == "delete":
                    assert same, f"{part} is not there to be deleted"
                    del done[name][same[0]]
                elif same:
                    done[name][same[0]] = merged(done[name][same[0]], part)
                else:
                    done[name].append(copy.deepcopy(part))
        else:
            done[name] = merged(done.get(name), value)
    return done


def resources(folder):
    """What `kubectl apply -k` would apply, by kind and name."""
    told = yaml.safe_load(text(folder / "kustomization.yaml"))
    found = {}
    for name in told["resources"]:
        path = folder / name
        if path.is_dir():
            found |= resources(path)
            continue
        for document in yaml.safe_load_all(text(path)):
            found[document["kind"], document["metadata"]["name"]] = document
    for patch in told.get("patches", []):
        for document in yaml.safe_load_all(text(folder / patch["path"])):
            name = document["kind"], document["metadata"]["name"]
            assert name in found, f"{patch['path']} changes {name}, which is not there"
            found[name] = merged(found[name], document)
    for generated in told.get("configMapGenerator", []):
        assert all((folder / name).is_file() for name in generated["files"]), generated
        found["ConfigMap", generated["name"]] = None
    return found


SETS = ["kubernetes/base", "kubernetes/nvidia", "gateway-api"]


def check_units(_):
    """systemd's own judgement, with the programs where they are here."""
    if shutil.which("systemd-analyze") is None:
        raise hotcell.Skipped("systemd is not on this machine")
    units = sorted(DEPLOY.glob("*.service")) + sorted(DEPLOY.glob("*.socket"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="units-"))
    for unit in units:
        programs = set(re.findall(r"/usr/bin/(\S+)", text(unit)))
        assert programs <= {"hotcell", "hotcell-scheduler", "hotcell-worker"}, programs
        (folder / unit.name).write_text(text(unit).replace("/usr/bin/", os.environ["HOTCELL_BIN_DIR"] + "/"))
    done = subprocess.run(["systemd-analyze", "verify", *map(str, folder.glob("*"))], capture_output=True, text=True)
    # It looks at the machine's own units as well.
    about = [line for line in (done.stdout + done.stderr).splitlines() if "hotcell" in line]
    assert not about and done.returncode == 0, done.stderr
    return f"{len(units)} units"


def check_manifests_are_kubernetes_own(_):
    count = 0
    for name in SETS:
        for (kind, _), document in resources(DEPLOY / name).items():
            if kind in FOREIGN or document is None:
                continue
            kubernetes_validate.validate(document, "1.37", strict=True)
            count += 1
    return f"{count} resources valid"


def check_what_is_commented_out_is_valid_too(_):
    """The rules for a Hotcell that calls somebody, in the empty list's place."""
    told = text(DEPLOY / "kubernetes/base/policy.yaml").split("  egress: []\n")
    assert len(told) == 2 and all(line.startswith("  # ") for line in told[1].splitlines()), told
    policy = yaml.safe_load(told[0].split("---\n")[1] + re.sub("^  # ", "  ", told[1], flags=re.MULTILINE))
    rules = policy["spec"]["egress"]
    assert len(rules) == 3, rules
    kubernetes_validate.validate(policy, "1.37", strict=True)
    # As the pods serve it, and as the README tells of it.
    pod = resources(DEPLOY / "kubernetes/base")["DaemonSet", "hotcell"]["spec"]["template"]
    ports = {p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports", [])}
    others = rules[1]
    assert {p["port"] for p in others["ports"]} <= ports and others["to"][0]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert f":{rules[2]['ports'][0]['port']}" in text(ROOT / "README.md")


def check_kustomize_makes_the_same(_):
    """What is checked here is what kubectl would apply."""
    if shutil.which("kubectl") is None:
        raise hotcell.Skipped("kubectl is not on this machine")
    for name in SETS:
        done = subprocess.run(["kubectl", "kustomize", str(DEPLOY / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(done.stdout)}
        mine = resources(DEPLOY / name)
        assert len(made) == len(mine), (set(made), set(mine))
        for key, document in made.items():
            if key[0] not in FOREIGN | {"ConfigMap"}:
                kubernetes_validate.validate(document, "1.37", strict=True)
            if key[0] == "DaemonSet":
                theirs, ours = document["spec"]["template"]["spec"], mine[key]["spec"]["template"]["spec"]
                for their, our in zip(sorted(theirs["containers"], key=lambda c: c["name"]), sorted(ours["containers"], key=lambda c: c["name"]), strict=True):
                    assert {**their, "image": None} == {**our, "image": None}, (name, their, our)
                assert {v["name"] for v in theirs["volumes"]} == {v["name"] for v in ours["volumes"]}, name


def check_pods_have_what_they_name(_):
    for name in SETS:
        found = resources(DEPLOY / name)
        for (kind, _), document in found.items():
            if kind not in ("DaemonSet", "Deployment"):
                continue
            pod = document["spec"]["template"]["spec"]
            assert document["spec"]["selector"]["matchLabels"].items() <= document["spec"]["template"]["metadata"]["labels"].items()
            volumes = {v["name"] for v in pod.get("volumes", [])}
            ports = [p["name"] for c in pod["containers"] for p in c.get("ports", [])]
            assert len(ports) == len(set(ports)), ports
            for container in pod["containers"]:
                assert {m["name"] for m in container.get("volumeMounts", [])} <= volumes, container["name"]
                limits = container["securityContext"]
                assert limits["readOnlyRootFilesystem"] and not limits["allowPrivilegeEscalation"] and limits["capabilities"] == {"drop": ["ALL"]}
                assert "image" in container and ("/" not in container["image"] or ":" in container["image"].rsplit("/", 1)[1]), container["image"]
            assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            mine = [d for (k, _), d in found.items() if k == "Service" and d["spec"]["selector"].items() <= document["spec"]["template"]["metadata"]["labels"].items()]
            assert mine, document["metadata"]["name"]
            for service in mine:
                assert {p["targetPort"] for p in service["spec"]["ports"]} <= set(ports), service["metadata"]["name"]
        pod = found["DaemonSet", "hotcell"]["spec"]["template"]["spec"]
        hotcells = next(c for c in pod["containers"] if c["name"] == "hotcell")
        drain = int(hotcells["args"][hotcells["args"].index("--drain-timeout") + 1].removesuffix("s"))
        waits = [c["lifecycle"]["preStop"]["sleep"]["seconds"] for c in pod["containers"]]
        assert pod["terminationGracePeriodSeconds"] > drain + waits[0] and all(drain + waits[0] < w < pod["terminationGracePeriodSeconds"] for w in waits[1:])


def check_flags_are_the_programs(_):
    known, count = known_flags(), 0
    for name in SETS:
        for container in resources(DEPLOY / name)["DaemonSet", "hotcell"]["spec"]["template"]["spec"]["containers"]:
            if container["name"] == "hotcell":
                named = {a for a in container["args"] if a.startswith("--")}
                assert named <= known, named - known
                count += len(named)
    # Those that are told of in a line that names a program.
    for path in files():
        for line in text(path).splitlines():
            if "cargo " in line:
                continue
            after = re.search(r"(?:hotcell serve|hotcell-scheduler|/usr/bin/hotcell\S*)\b(.*)", line)
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", after[1])) if after else set()
            assert named <= known, (path, named - known)
            count += len(named)
    assert count > 20, count
    return f"{count} flags"


def check_metrics_are_told(_):
    table = text(DEPLOY / "METRICS.md")
    told = set(re.findall(r"`((?:hotcell_|vllm:)\w+)`", table))
    count = 0
    for path in files():
        if path.name == "METRICS.md":
            continue
        for name in re.findall(r"\b(?:hotcell_[a-z]+(?:_[a-z]+)+|vllm:\w+)", text(path)):
            if path.name in ("nginx.conf", "haproxy.cfg", "envoy.yaml"):
                continue
            assert name in told or re.sub(r"_(bucket|sum|count)$", "", name) in told, (path, name)
            count += 1
    assert count > 20, count
    return f"{count} names"


def check_container(_):
    lines = text(DEPLOY / "Containerfile").splitlines()
    images = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert all(":" in image.rsplit("/", 1)[1] and not image.endswith(":latest") for image in images), images
    wanted = re.search(r'rust-version = "([\d.]+)"', text(ROOT / "Cargo.toml"))[1]
    assert f"/rust:{wanted}-" in images[0], (wanted, images[0])
    copied = [line for line in lines if line.startswith("COPY --from=build")]
    programs = re.findall(r"/build/target/release/(\S+)", "".join(copied))
    assert sorted(programs) == ["hotcell", "hotcell-scheduler", "hotcell-worker", "hotcell-worker-cuda"], programs
    packages = re.findall(r"--package (\S+)", "".join(lines))
    names = {re.search(r'name = "(.*?)"', text(path))[1] for path in [*ROOT.glob("*/Cargo.toml"), ROOT / "worker/cuda/Cargo.toml"]}
    # Each program is of the package of its name but for the client's.
    assert len(packages) == len(programs) and set(packages) <= names, packages
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT ")).removeprefix("ENTRYPOINT "))
    assert entry[0] == "/usr/bin/hotcell" and lines.index("USER 65532:65532") > 0


def check_a_pods_command_serves(_):
    """The flags of the pods of Kubernetes, with places of this machine; and the probes."""
    container = resources(DEPLOY / "kubernetes/base")["DaemonSet", "hotcell"]["spec"]["template"]["spec"]["containers"][0]
    folder, _ = certificates.secrets()
    own = pathlib.Path(tempfile.mkdtemp(prefix="pod-"))
    ports = {"0.0.0.0:4100": f"127.0.0.1:{hotcell.free_port()}", "0.0.0.0:8080": f"127.0.0.1:{hotcell.free_port()}"}
    places = {"/etc/hotcell/tls/tls.crt": f"{folder}/cert.pem", "/etc/hotcell/tls/tls.key": f"{folder}/key.pem",
              "/etc/hotcell/tokens/tokens.toml": f"{folder}/tokens.toml", "/var/cache/hotcell/packed": f"{own}/packed"}
    args = [{**ports, **places}.get(a, a) for a in container["args"]]
    assert not [a for a in args if a.startswith(("/etc", "/var", "0.0.0.0"))], args
    program = os.path.join(os.environ["HOTCELL_BIN_DIR"], pathlib.Path(container["command"][0]).name)
    env = {**os.environ, "HOTCELL_SOCKET": f"{own}/hotcell.sock"}
    with open(own / "log", "ab") as log:
        process = subprocess.Popen([program, *container["command"][1:], *args, "--devices", "cpu:1"], env=env, stdout=log, stderr=log)
    context = ssl.create_default_context(cafile=f"{folder}/ca.pem")
    context.check_hostname = False

    def probe(kind):
        get = container[kind]["httpGet"]
        assert get["scheme"] == "HTTPS" and get["port"] == "http"
        connection = http.client.HTTPSConnection(*ports["0.0.0.0:8080"].split(":"), context=context, timeout=5)
        try:
            connection.request("GET", get["path"])
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    try:
        until = time.monotonic() + 60
        while probe("readinessProbe") != 200:
            assert process.poll() is None and time.monotonic() < until, (own / "log").read_text()
            time.sleep(0.1)
        assert probe("livenessProbe") == probe("startupProbe") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
    # One JSON object a line, as asked.
    assert all(json.loads(line) for line in (own / "log").read_text().splitlines())


hotcell.main(globals())
