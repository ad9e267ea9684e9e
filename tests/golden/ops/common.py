"""Tensors, rounding, promotion and the book of cases that the files beside this one fill.

Nothing here knows Hotcell's own code: values are computed in float64, complex128 or wrapping integers with NumPy, SciPy and
PyTorch, from inputs that are already rounded to their dtype, and rounded once to the dtype of the result.
"""

import json
import zlib

import numpy as np

NUMPY = {
    "bool": np.bool_,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    "bf16": np.float32,  # values of which the low half is zero
    "f32": np.float32,
    "f64": np.float64,
    "c64": np.complex64,
}
UNSIGNED = ["u8", "u16", "u32", "u64"]
SIGNED = ["i8", "i16", "i32", "i64"]
INTS = UNSIGNED + SIGNED
FLOATS = ["f16", "bf16", "f32", "f64"]
REALS = INTS + FLOATS
PLAIN = ["bool"] + REALS + ["c64"]

MIN = -(2**63)
MAX = 2**63 - 1


def to_bf16(x):
    """float64 to bfloat16, nearest even, rounded once: to float32 with the sticky bit kept, then to its high half."""
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(all="ignore"):
        f = x.astype(np.float32)
        over = np.abs(f.astype(np.float64)) > np.abs(x)  # rounded away from zero: take one step back
        f = np.where(over, np.nextafter(f, np.float32(0)), f).astype(np.float32)
    inexact = (f.astype(np.float64) != x) & ~np.isnan(x)
    bits = f.view(np.uint32) if f.shape else np.array([f]).view(np.uint32).reshape(())
    bits = bits | inexact.astype(np.uint32)
    high = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    out = np.ascontiguousarray(high).view(np.float32).reshape(x.shape).copy()
    out[np.isnan(x)] = np.nan
    return out


class T:
    """A tensor of one of Hotcell's dtypes. `raw` holds the bytes of a block type."""

    def __init__(self, dtype, values, shape=None, raw=None):
        self.dtype, self.raw = dtype, raw
        if raw is not None:
            self.shape = list(shape)
            return
        values = np.asarray(values)
        with np.errstate(all="ignore"):
            if dtype == "bf16":
                self.a = to_bf16(values)
            else:
                self.a = np.array(values).astype(NUMPY[dtype])
        if shape is not None:
            self.a = self.a.reshape(shape)
        self.shape = list(self.a.shape)

    def bytes(self):
        if self.raw is not None:
            return self.raw
        a = np.ascontiguousarray(self.a)
        if self.dtype == "bf16":
            a = (a.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
        return a.tobytes()

    @property
    def up(self):
        """The values in the widest type of their kind."""
        if self.dtype == "c64":
            return self.a.astype(np.complex128)
        return self.a.astype(np.float64) if self.dtype in FLOATS else self.a

    def to(self, dtype):
        """Hotcell's cast."""
        a = self.a
        with np.errstate(all="ignore"):
            if dtype == self.dtype:
                return T(dtype, a)
            if dtype == "bool":
                return T(dtype, a != 0)
            if self.dtype == "c64" and dtype != "c64":
                a = a.real
            if dtype in INTS and np.issubdtype(a.dtype, np.floating):
                info = np.iinfo(NUMPY[dtype])
                wide = np.nan_to_num(np.trunc(a.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
                flat = [
                    info.max if v >= float(info.max) else info.min if v <= float(info.min) else int(v)
                    for v in wide.reshape(-1)
                ]
                return T(dtype, np.array(flat, dtype=NUMPY[dtype]).reshape(a.shape))
            if dtype in ("f16", "bf16") and self.dtype in INTS:
                return T(dtype, a.astype(np.float64))
            return T(dtype, a)


def promote(a, b):
    """The common dtype of two plain ones."""
    if a == b:
        return a
    if "c64" in (a, b):
        return "c64"
    if a == "bool":
        return b
    if b == "bool":
        return a
    if a in FLOATS or b in FLOATS:
        if a in FLOATS and b in FLOATS:
            if "f64" in (a, b):
                return "f64"
            return "f32"  # f32 with a half, or one half with the other
        return a if a in FLOATS else b
    bits = lambda d: int(d[1:])
    if a[0] == b[0]:
        return a if bits(a) > bits(b) else b
    unsigned, signed = (a, b) if a[0] == "u" else (b, a)
    if bits(signed) > bits(unsigned):
        return signed
    return {8: "i16", 16: "i32", 32: "i64", 64: "f32"}[bits(unsigned)]


def promote_all(tensors):
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = promote(dtype, t.dtype)
    return dtype


def floating(dtype):
    """The dtype in which a float function of this dtype is."""
    return dtype if dtype in FLOATS else "f32"


class Book:
    """The cases of one file of the catalogue."""

    def __init__(self, name):
        self.name, self.cases, self.blob, self.known = name, [], bytearray(), {}

    def place(self, data):
        key = bytes(data)
        if key not in self.known:
            while len(self.blob) % 8:
                self.blob.append(0)
            self.known[key] = len(self.blob)
            self.blob += key
        return self.known[key]

    def tensor(self, t, rows=False):
        entry = [t.dtype, t.shape, self.place(t.bytes())]
        return entry + [True] if rows else entry

    def cache(self, spec, before, after=None):
        """A cache input: its spec (dtype, blocks, block_len, kv_heads, head_dim), its bytes before and after."""
        entry = {"cache": list(spec), "at": self.place(before.bytes())}
        return entry | ({"after": self.place(after.bytes())} if after is not None else {})

    def attribute(self, value):
        if isinstance(value, (bytes, bytearray)):
            return {"at": self.place(value), "bytes": len(value)}
        if isinstance(value, (list, tuple)):
            return [int(v) for v in value]
        if isinstance(value, np.integer):
            return int(value)
        return value

    def graph(self, op, note, inputs, nodes, results, outputs, check=None, rows=None, fails=None):
        """A case of several nodes.

        `inputs` are T, None (absent) or what `cache` gives; `nodes` are (op, references, attributes), a reference being the number
        of an input, a pair (node, result) or None; `results` are references and `outputs` what they must be. `check` is "exact",
        "each" (every element within the tolerance), or None (all together). `rows` lists the inputs whose axis 0 is the
        row dimension; a result whose expectation begins with as many rows may have it too. `fails` is "verify" (the graph is
        refused), "run" (the execution is) or "either".
        """
        entries = []
        for i, t in enumerate(inputs):
            symbolic = rows is not None and i in rows
            entries.append(self.tensor(t, symbolic) if isinstance(t, T) else t)
        case = {
            "op": op,
            "note": note,
            "inputs": entries,
            "nodes": [
                [o, list(refs), {k: self.attribute(v) for k, v in attributes.items()}]
                for o, refs, attributes in nodes
            ],
            "results": results,
            "outputs": [self.tensor(t) for t in outputs],
        }
        if check:
            case["check"] = check
        if fails:
            case["fails"] = fails
        if rows is not None:
            counts = {inputs[i].shape[0] for i in rows}
            assert len(counts) == 1, (op, note, counts)
            case["rows"] = counts.pop()
        self.cases.append(case)

    def one(self, op, note, inputs, outputs, check=None, rows=None, fails=None, **attributes):
        """A case of one node."""
        outputs = [outputs] if isinstance(outputs, T) else outputs
        references = [None if t is None else i for i, t in enumerate(inputs)]
        inputs = [t for t in inputs if t is not None]
        numbers, n = [], 0
        for r in references:
            numbers.append(None if r is None else n)
            n += r is not None
        results = [[0, i] for i in range(len(outputs or []))]
        nodes = [(op, numbers, attributes)]
        self.graph(op, note, inputs, nodes, results, outputs or [], check, rows, fails)

    def views(self, op, note, inputs, outputs, check=None, **attributes):
        """The same with every input a view: transposed, or cut out of something larger, in turn."""
        outputs = [outputs] if isinstance(outputs, T) else outputs
        stored, nodes, numbers = [], [], []
        for t in inputs:
            if t is None:
                numbers.append(None)
                continue
            n, rank = len(stored), len(t.shape)
            if rank == 0:
                stored.append(t)
                numbers.append(n)
                continue
            if rank > 1 and n % 2 == 0:
                stored.append(T(t.dtype, np.transpose(t.a)))
                nodes.append(("transpose", [n], {"axes": []}))
            else:
                # Every other element, backwards along the last axis, of something with an edge all around.
                wide = np.zeros([2 * s + 1 for s in t.shape], dtype=t.a.dtype)
                wide[...] = 1
                at = tuple([slice(1, 2 * s, 2) for s in t.shape])
                wide[at] = t.a[..., ::-1]
                stored.append(T(t.dtype, wide))
                starts = [1] * (rank - 1) + [2 * t.shape[-1] - 1]
                stops = [2 * s for s in t.shape[:-1]] + [MIN]
                if t.shape[-1] == 0:
                    starts[-1], stops[-1] = 0, 0
                nodes.append(("slice", [n], {"starts": starts, "stops": stops, "steps": [2] * (rank - 1) + [-2]}))
            numbers.append([len(nodes) - 1, 0])
        nodes.append((op, numbers, attributes))
        results = [[len(nodes) - 1, i] for i in range(len(outputs))]
        self.graph(op, note, stored, nodes, results, outputs, check)

    def large(self, op, note, inputs, compute, repeats, check=None, step=97, **attributes):
        """Large tensors without large files: inputs repeated along their one axis, every `step`-th element of the result."""
        tiled = [T(t.dtype, np.tile(t.a, r)) for t, r in zip(inputs, repeats)]
        out = compute(tiled)
        n = out.shape[0]
        nodes = [("tile", [i], {"repeats": [r]}) for i, r in enumerate(repeats)]
        nodes.append((op, [[i, 0] for i in range(len(inputs))], attributes))
        nodes.append(("slice", [[len(inputs), 0]], {"starts": [3], "stops": [n], "steps": [step]}))
        result = T(out.dtype, out.a[3:n:step])
        self.graph(op, note, inputs, nodes, [[len(nodes) - 1, 0]], [result], check)

    def write(self, folder):
        seen = {}
        for case in self.cases:  # a name per case, for messages
            key = (case["op"], case["note"])
            seen[key] = seen.get(key, 0) + 1
            if seen[key] > 1:
                case["note"] += f" ({seen[key]})"
        lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in self.cases)
        (folder / f"{self.name}.json").write_text("[\n" + lines + "\n]\n")
        (folder / f"{self.name}.bin").write_bytes(bytes(self.blob))
        print(f"{self.name}: {len(self.cases)} cases, {len(self.blob)} + {len(lines)} bytes")


def rng(*names):
    """A generator of its own for every case, so that adding one changes no other."""
    return np.random.default_rng(zlib.crc32("/".join(map(str, names)).encode()))


def sample(r, dtype, shape, low=-4.0, high=4.0):
    """Random values; of integers small ones."""
    if dtype == "bool":
        return T(dtype, r.integers(0, 2, shape).astype(bool))
    if dtype in INTS:
        lo = max(int(np.floor(low)), np.iinfo(NUMPY[dtype]).min)
        return T(dtype, r.integers(lo, max(int(np.ceil(high)), lo + 2), shape))
    if dtype == "c64":
        return T(dtype, r.uniform(low, high, shape) + 1j * r.uniform(low, high, shape))
    return T(dtype, r.uniform(low, high, shape))


def corners(dtype):
    """Values at which implementations differ."""
    if dtype == "bool":
        return [False, True]
    if dtype in INTS:
        info = np.iinfo(NUMPY[dtype])
        around = [0, 1, 2, 3, 7, 8, info.max, info.max - 1, info.max // 2, info.max // 2 + 1]
        return around + ([] if dtype[0] == "u" else [-1, -2, -3, -7, -8, info.min, info.min + 1])
    top = {"f16": 65504.0, "bf16": 3.3895314e38, "f32": 3.4028234e38, "f64": 1.7976931348623157e308}
    tiny = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}
    if dtype == "c64":
        return [0, 1, -1, 1j, -1j, 1 + 2j, -3.5 + 0.25j, 1e-3 - 1e3j]
    values = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.5, 7.0, 100.5, top[dtype], tiny[dtype], np.inf]
    return [s * v for v in values for s in (1.0, -1.0)] + [np.nan]


def pairs(dtype):
    """Every corner with every other, as two tensors."""
    values = corners(dtype)
    if dtype in FLOATS:
        top, tiny = max(v for v in values if v < np.inf), min(v for v in values if v > 0)
        values = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 7.0, -0.5, top, -top, tiny, np.inf, -np.inf, np.nan]
    elif dtype in INTS:
        values = [v for v in values if v not in (7, -7, -3) and v != max(values) // 2 + 1]
    c = T(dtype, values).a
    n = len(c)
    return T(dtype, np.repeat(c, n)), T(dtype, np.tile(c, n))
