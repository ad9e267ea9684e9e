"""Compiles the CUDA kernels and writes kernels.json; called by `compile`, which says what for.

    manifest.py TOOLS SOURCES [--check]
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ARCHITECTURES = ["80", "90a", "100"]
# No contraction: kernels say where they want a fused operation, so that every architecture and the shim give equal bits.
FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xptxas=-v", "-Xfatbin=--compress-all", "--compress-mode=size"]
CODE = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES] + ["-gencode=arch=compute_80,code=compute_80"]

# What a kernel may take on any architecture, unless SPECIAL names it. A spill is a mistake; shared memory is what a block has without asking.
BUDGET = {"registers": 128, "spills": 0, "shared": 49152}
SPECIAL = {
    # 32 outputs per thread, and for each its sum and that of the block.
    "mul_tile_q4_k": {"registers": 168},
    "mul_tile_q5_k": {"registers": 168},
    "mul_tile_q6_k": {"registers": 200},
    # 32 outputs per thread, and two scales for each.
    "mul_tile_nvfp4": {"registers": 168},
    # 64 outputs per thread, for each its sum and that of the range, and the parts of what they are multiplied with.
    "half_tile_bf16": {"registers": 255},
    "half_tile_f16": {"registers": 255},
    "float8_tile": {"registers": 255},
    # A block of them has a multiprocessor nearly to itself, and keys and values on their way.
    **{f"attention_spans_{t}_{d}": {"registers": 255} for t in ("f32", "f16", "bf16", "q8_0") for d in (128, 256)},
    # On sm_100 alone: a few addresses that outlast a span, put away between two of them.
    **{f"attention_whole_{t}_{d}": {"spills": 48} for t in ("f16", "f32") for d in (128, 256)},
}


def headers(file, seen=None):
    """The file and what it includes from its own folder, each once."""
    seen = [] if seen is None else seen
    if file not in seen:
        seen.append(file)
        for name in re.findall(r'^\s*#include "([^"]+)"', file.read_text(), re.M):
            headers(file.parent / name, seen)
    return seen


def source_hash(file):
    digest = hashlib.sha256(" ".join(FLAGS + CODE).encode())
    digest.update((Path(__file__).parent / "requirements.txt").read_bytes())
    for part in sorted(headers(file), key=lambda p: p.name):
        digest.update(part.name.encode() + b"\0" + part.read_bytes() + b"\0")
    return digest.hexdigest()


def kernels_of(said):
    """What ptxas says of each kernel on each architecture."""
    found = {}
    kernel = architecture = None
    for line in said.splitlines():
        if m := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            kernel, architecture = m.groups()
            found.setdefault(kernel, {})[architecture] = {"registers": 0, "spills": 0, "stack": 0, "shared": 0}
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            # Functions that a kernel calls, and which are not part of it, are told after it: what they take is taken while it runs.
            if kernel:
                stack, stores, loads = map(int, m.groups())
                of = found[kernel][architecture]
                of.update(stack=of["stack"] + stack, spills=of["spills"] + stores + loads)
        elif m := re.search(r"Used (\d+) registers", line):
            if kernel:
                found[kernel][architecture]["registers"] = int(m.group(1))
                if s := re.search(r"(\d+) bytes smem", line):
                    found[kernel][architecture]["shared"] = int(s.group(1))
    return {k: {a: found[k][a] for a in ARCHITECTURES} for k in sorted(found)}


def compile_one(tools, file, out):
    """Compiles one file; its entry of kernels.json."""
    command = [tools / "bin/nvcc", *FLAGS, *CODE, "-fatbin", file.name, "-o", out]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TMPDIR": str(out.parent)}
    run = partial(subprocess.run, cwd=file.parent, capture_output=True, text=True)
    # The names of what a kernel shares have a hash of its source's place in them. So the compiler's steps, which it tells, are done here, with a
    # place that is the same everywhere.
    told = run([*command, "--dryrun"], env=environment)
    steps = []
    for line in told.stderr.splitlines():
        step = line.removeprefix("#$ ")
        if m := re.match(r"(\w+)=(.*)", step):
            environment[m.group(1)] = m.group(2)
        else:
            steps.append(step.replace(f'"{file.resolve()}"', f'"/hotcell/{file.name}"'))
    if told.returncode or not any("/hotcell/" in step for step in steps):
        sys.exit(f"cuda: {file.name}: the compiler does not say how it compiles:\n{told.stderr}")
    made = run(["bash", "-e", "-c", "\n".join(steps)], env=environment)
    if made.returncode:
        sys.exit(f"cuda: {file.name}:\n{made.stdout}{made.stderr}")
    for line in made.stderr.splitlines():
        if "warning" in line:
            print(f"cuda: {line}", file=sys.stderr)
    data = out.read_bytes()
    return {"source": source_hash(file), "fatbin": hashlib.sha256(data).hexdigest(), "bytes": len(data), "kernels": kernels_of(made.stderr)}


def over_budget(files):
    """Each number over its budget, in words."""
    for name, entry in files.items():
        for kernel, architectures in entry["kernels"].items():
            budget = {**BUDGET, **SPECIAL.get(kernel, {})}
            for architecture, numbers in architectures.items():
                for what, most in budget.items():
                    if numbers[what] > most:
                        yield f"{name}: {kernel} takes {numbers[what]} {what} on sm_{architecture}; its budget is {most}"


def main():
    tools, sources, check = Path(sys.argv[1]), Path(sys.argv[2]), "--check" in sys.argv[3:]
    kept = sources / "kernels.json"
    old = json.loads(kept.read_text())["files"] if kept.exists() else {}
    files = sorted(sources.glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder:
        def one(file):
            entry, target = old.get(file.name), file.with_suffix(".fatbin")
            fresh = entry and entry["source"] == source_hash(file) and target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == entry["fatbin"]
            if fresh and not check:
                return entry
            place = Path(folder) / file.stem
            place.mkdir()
            out = place / f"{file.stem}.fatbin"
            entry = compile_one(tools, file, out)
            if not check:
                target.write_bytes(out.read_bytes())
            elif not target.exists() or target.read_bytes() != out.read_bytes():
                entry["differs"] = True
            print(f"cuda: {file.name}: {len(entry['kernels'])} kernels, {entry['bytes']} bytes", file=sys.stderr)
            return entry
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = dict(zip([f.name for f in files], pool.map(one, files)))
    wrong = list(over_budget(made))
    if check:
        wrong += [f"{name}'s fatbin is not what its source gives; run deploy/cuda/compile" for name, e in made.items() if e.pop("differs", False)]
        if made != old:
            wrong.append("kernels.json is not what the sources give; run deploy/cuda/compile")
        wrong += [f"{f.name} has no source" for f in sources.glob("*.fatbin") if not f.with_suffix(".cu").exists()]
    else:
        for orphan in sources.glob("*.fatbin"):
            if not orphan.with_suffix(".cu").exists():
                orphan.unlink()
        text = {"architectures": ARCHITECTURES, "ptx": "80", "files": made}
        kept.write_text(json.dumps(text, indent=1) + "\n")
    for line in wrong:
        print(f"cuda: {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


main()
