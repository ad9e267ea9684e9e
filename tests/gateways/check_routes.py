# packages: pyyaml==6.0.3
# node: @kubernetes-models/gateway-api==2.0.0
# programs: node
# quick
"""The Gateway API's resources in deploy/, held against its own schemas, which its npm package has."""
import copy
import json
import os
import pathlib
import subprocess

import yaml

import hotcell

DEPLOY = pathlib.Path(__file__).resolve().parent.parent.parent / "deploy"
VALIDATE = """
import { readFileSync } from "node:fs";
for (const { kind, apiVersion, ...rest } of JSON.parse(readFileSync(0))) {
  const models = await import(`@kubernetes-models/gateway-api/${apiVersion}`);
  try { new models[kind](rest).validate(); console.log("ok"); } catch (error) { console.log(error.message.replaceAll("\\n", " ")); }
}
"""


def told(resources):
    """What the schemas say of each resource."""
    modules = next(p.removesuffix("/node_modules/.bin") for p in os.environ["PATH"].split(":") if p.endswith("node_modules/.bin"))
    # Packages are looked for from the folder that it runs in.
    command = ["node", "--input-type=module", "-e", VALIDATE]
    done = subprocess.run(command, input=json.dumps(resources), cwd=modules, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def documents():
    return [d for path in sorted(DEPLOY.rglob("*.yaml")) if path.name != "envoy.yaml" for d in yaml.safe_load_all(path.read_text()) if d and "kind" in d]


def check_routes_are_the_gateway_apis_own(_):
    routes = [d for d in documents() if d["apiVersion"].startswith("gateway.networking.k8s.io/")]
    assert routes and told(routes) == ["ok"] * len(routes), told(routes)
    # And that they are looked at: what is wrong is found.
    for change in (
        lambda r: r["spec"]["rules"][0]["matches"][0]["path"].update(type="Prefix"),
        lambda r: r["spec"]["rules"][0]["timeouts"].update(request="soon"),
        lambda r: r["spec"].update(parentRefs=[{"group": "gateway.networking.k8s.io"}]),
        lambda r: r["spec"]["rules"][0]["backendRefs"][0].update(weight="much"),
    ):
        wrong = copy.deepcopy(routes[0])
        change(wrong)
        assert told([wrong]) != ["ok"], wrong["spec"]
    return f"{len(routes)} of {', '.join(sorted({r['kind'] for r in routes}))}"


def check_what_the_routes_name_is_there(_):
    """A route's backend is the pool, whose picker and ports are what deploy/ has."""
    all_ = {(d["kind"], d["metadata"]["name"]): d for d in documents() if "metadata" in d}
    for (kind, _), route in list(all_.items()):
        if kind == "HTTPRoute":
            for rule in route["spec"]["rules"]:
                for backend in rule["backendRefs"]:
                    assert (backend["kind"], backend["name"]) in all_, backend
                    assert all_[backend["kind"], backend["name"]]["apiVersion"].split("/")[0] == backend["group"], backend
    pool = all_["InferencePool", "hotcell"]["spec"]
    assert set(pool) == {"selector", "targetPorts", "endpointPickerRef"} and pool["selector"]["matchLabels"], pool
    assert all(set(port) == {"number"} and 0 < port["number"] < 65536 for port in pool["targetPorts"]), pool
    picker = all_["Service", pool["endpointPickerRef"]["name"]]["spec"]
    assert pool["endpointPickerRef"]["port"]["number"] in {port["port"] for port in picker["ports"]}, picker


def check_pools_are_the_extensions_own(_):
    raise hotcell.Skipped("no package registry has the schema of the Inference Extension's InferencePool")


hotcell.main(globals())
