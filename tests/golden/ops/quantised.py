"""Cases of MLX's quantised matrices and of 8-bit floats.

MLX quantises (of f64, which it does not take, the same steps in NumPy); what codes mean is written out here in float64 and held to
what MLX makes of them.
"""

import mlx.core as mx
import numpy as np

from common import FLOATS, INTS, Book, T, rng, sample
from placement import checked

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
MLX = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}


def e4m3(code):
    size = code & 127
    e, m = size >> 3, size & 7
    value = np.nan if size == 127 else m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
    return -value if code >> 7 else value


E4M3 = np.array([e4m3(c) for c in range(256)])
E8M0 = np.array([2.0 ** (c - 127) for c in range(255)] + [np.nan])


def codes(packed, bits):
    """The codes of u32 words, low bits first."""
    flat = packed.reshape(-1, packed.shape[-1])
    stream = np.unpackbits(np.ascontiguousarray(flat).view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(flat.shape[0], flat.shape[1] * 32 // bits, bits).astype(np.int64)
    values = (stream << np.arange(bits)).sum(-1)
    return values.reshape(packed.shape[:-1] + (values.shape[-1],))


def pack(values, bits):
    flat = values.reshape(-1, values.shape[-1]).astype(np.int64)
    stream = (flat[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(flat.shape[0], -1)
    words = np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)
    return words.reshape(values.shape[:-1] + (words.shape[-1],))


def numbers(packed, scales, biases, mode, group, bits):
    c = codes(packed, bits)
    each = lambda a: np.repeat(a, group, -1)
    if mode == "affine":
        return c * each(scales) + each(biases)
    values = E4M3[c] if mode == "mxfp8" else np.where(c > 7, -1, 1) * E2M1[c & 7]
    return values * each((E4M3 if mode == "nvfp4" else E8M0)[scales])


def affine(w, group, bits):
    """MLX's steps, in f64."""
    x = w.reshape(-1, group)
    low, high, last = x.min(1, keepdims=True), x.max(1, keepdims=True), 2**bits - 1
    lower = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / last, 1e-7)
    scale, edge = np.where(lower, scale, -scale), np.where(lower, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps != 0, edge / np.where(steps == 0, 1, steps), scale)
    bias = np.where(steps != 0, edge, 0)
    c = np.clip(np.rint((x - bias) / scale), 0, last)
    groups = w.shape[:-1] + (w.shape[-1] // group,)
    return pack(c.reshape(w.shape), bits), scale.reshape(groups), bias.reshape(groups)


def quantised(w, mode, group, bits):
    """`w` quantised, as T: packed, scales and biases or None."""
    if w.dtype == "f64":
        packed, scales, biases = affine(w.a, group, bits)
        return T("u32", packed), T("f64", scales), T("f64", biases)
    made = mx.quantize(mx.array(w.a.astype(np.float32)).astype(MLX[w.dtype]), group_size=group, bits=bits, mode=mode)
    packed = np.array(made[0])
    if mode != "affine":
        scales = np.array(made[1])
        said = np.array(mx.dequantize(made[0], made[1], group_size=group, bits=bits, mode=mode).astype(mx.float32))
        assert np.array_equal(said, numbers(packed, scales, None, mode, group, bits)), mode
        return T("u32", packed), T("u8", scales), None
    scales, biases = (np.array(a.astype(mx.float32)) for a in made[1:])
    said = np.array(mx.dequantize(*made, group_size=group, bits=bits, mode=mode).astype(mx.float32))
    own = numbers(packed, scales.astype(np.float64), biases.astype(np.float64), mode, group, bits)
    assert np.abs(said - own).max() <= 0.03, (mode, bits)
    return T("u32", packed), T(w.dtype, scales), T(w.dtype, biases)


def up(t):
    return None if t is None else t.a if t.dtype in ("u8", "u32") else t.up


def quantize(book):
    def add(note, w, group, bits, views=False):
        out = quantised(w, "affine", group, bits)
        checked(book, "quantize", note, [w], list(out), None, views=views, group=group, bits=bits)

    for d in FLOATS:
        for bits in (2, 3, 4, 5, 6, 8):
            group = {2: 32, 3: 64, 4: 64, 5: 128, 6: 32, 8: 64}[bits]
            add(f"{d} {bits}", sample(rng("quantize", d, bits), d, [3, 2 * group]), group, bits, views=bits == 4)
    w = sample(rng("quantize"), "f32", [5, 64])
    w.a[0], w.a[1, :32], w.a[2], w.a[3] = 0, 2.5, np.abs(w.a[2]), -np.abs(w.a[3])
    add("constant, of one sign", w, 32, 4)
    add("odd", sample(rng("quantize", "odd"), "f32", [7, 64]), 64, 4, views=True)
    add("three axes", sample(rng("quantize", 3), "f32", [2, 3, 64]), 32, 8)
    book.one("quantize", "empty", [T("f32", np.zeros([0, 64]))], [T("u32", np.zeros([0, 8])), T("f32", np.zeros([0, 1])), T("f32", np.zeros([0, 1]))], "exact", group=64, bits=4)
    for note, s, d, g, b in (("one axis", [64], "f32", 32, 4), ("half a group", [2, 48], "f32", 32, 4), ("seven bits", [2, 64], "f32", 32, 7), ("groups of 48", [2, 48], "f32", 48, 4), ("integers", [2, 64], "i32", 32, 4)):
        book.one("quantize", note, [T(d, np.zeros(s))], None, fails="verify", group=g, bits=b)


def quantize_float(book):
    def add(note, w, mode, views=False):
        out = quantised(T("f32", w.a), mode, *MODES[mode])
        checked(book, "quantize_float", note, [w], list(out[:2]), "exact", views=views, mode=mode)

    for mode in MODES:
        for d in FLOATS:
            add(f"{d} {mode}", sample(rng("quantize_float", d, mode), d, [3, 64]), mode, views=d == "f32")
            add(f"{d} {mode} small", T(d, sample(rng("quantize_float", d, mode, 2), d, [3, 64]).up * 2.0**-9), mode)
        w = sample(rng("quantize_float", mode), "f32", [7, 96], -300, 300)
        # Nothing, what lies between two numbers, and what is on a power of 2.
        w.a[0], w.a[1], w.a[2] = 0, np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], 96), np.resize([448, -17, 6, -0.1], 96)
        add(f"{mode} odd", w, mode, views=True)
        add(f"{mode} three axes", sample(rng("quantize_float", 3), "f32", [2, 3, 64]), mode)
        group, bits = MODES[mode]
        none = [T("u32", np.zeros([0, 2 * bits])), T("u8", np.zeros([0, 64 // group]))]
        book.one("quantize_float", f"{mode} empty", [T("f32", np.zeros([0, 64]))], none, "exact", mode=mode)
    for note, s, d in (("one axis", [64], "f32"), ("half a group", [2, 48], "f32"), ("integers", [2, 64], "i32")):
        book.one("quantize_float", note, [T(d, np.zeros(s))], None, fails="verify", mode="mxfp4")


def dequantize(book):
    def add(note, made, mode, group, bits, dtype, views=False):
        packed, scales, biases = made
        out = numbers(up(packed), up(scales), up(biases), mode, group, bits)
        check = "exact" if mode != "affine" else None
        if mode != "affine":  # products of f32, which are exact unless they are too large
            with np.errstate(over="ignore"):
                out = out.astype(np.float32)
        checked(book, "dequantize", note, list(made), T(dtype, out), check, views=views, mode=mode, group=group, bits=bits, dtype=dtype)

    for d in FLOATS:
        for bits in (2, 3, 4, 5, 6, 8):
            made = quantised(sample(rng("dequantize", d, bits), d, [3, 128]), "affine", 32, bits)
            add(f"{d} {bits}", made, "affine", 32, bits, d, views=d == "f32")
        for mode, (group, bits) in MODES.items():
            made = quantised(sample(rng("dequantize", d, mode), "f32", [3, 64]), mode, group, bits)
            add(f"{mode} {d}", made, mode, group, bits, d, views=d == "f32")
    every = T("u32", np.arange(256, dtype=np.uint8).view(np.uint32).reshape(8, 8)[:, :8])
    scales = T("u8", np.array([0, 1, 100, 126, 127, 128, 140, 200]).reshape(8, 1))
    add("every mxfp8", (every, scales, None), "mxfp8", 32, 8, "f64")
    add("every scale", (T("u32", np.full([256, 4], 0xFEDCBA98)), T("u8", np.arange(256).reshape(256, 1)), None), "mxfp4", 32, 4, "f64")
    add("every scale", (T("u32", np.full([256, 2], 0x76543210)), T("u8", np.arange(256).reshape(256, 1)), None), "nvfp4", 16, 4, "f64")
    add("empty", (T("u32", np.zeros([0, 8])), T("f32", np.zeros([0, 1])), T("f32", np.zeros([0, 1]))), "affine", 64, 4, "f32")
    add("odd", quantised(sample(rng("dequantize", "odd"), "f32", [7, 64]), "affine", 64, 4), "affine", 64, 4, "f32")
    w, s, b = quantised(sample(rng("d"), "f32", [3, 64]), "affine", 32, 4)
    more = {"mode": "affine", "group": 32, "bits": 4, "dtype": "f32"}
    book.one("dequantize", "no biases", [w, s, None], None, fails="verify", **more)
    book.one("dequantize", "other scales", [w, T("f32", s.a[:, :1]), T("f32", b.a[:, :1])], None, fails="verify", **more)
    book.one("dequantize", "to integers", [w, s, b], None, fails="verify", **(more | {"dtype": "i32"}))
    book.one("dequantize", "another format", [w, s, b], None, fails="verify", **(more | {"mode": "mxfp4"}))
    book.one("dequantize", "bytes", [T("u8", np.zeros([3, 32])), s, b], None, fails="verify", **more)


def products(book):
    def add(note, x, made, mode, group, bits, transpose, views=False):
        w = numbers(up(made[0]), up(made[1]), up(made[2]), mode, group, bits)
        out = x.up @ (np.swapaxes(w, -1, -2) if transpose else w)
        checked(book, "quantized_matmul", note, [x] + list(made), T(x.dtype, out), None, views=views, transpose=transpose, mode=mode, group=group, bits=bits)

    for d in FLOATS:
        made = quantised(sample(rng("qmm", d), d, [5, 64]), "affine", 32, 4)
        add(f"{d} transposed", sample(rng("qmm", d, 1), d, [3, 64]), made, "affine", 32, 4, True, views=d == "f32")
        add(f"{d} plain", sample(rng("qmm", d, 2), d, [3, 5]), made, "affine", 32, 4, False)
        for mode, (group, bits) in MODES.items():
            made = quantised(sample(rng("qmm", d, mode), "f32", [7, 64]), mode, group, bits)
            add(f"{mode} {d}", sample(rng("qmm", d, 3), d, [2, 3, 64]), made, mode, group, bits, True, views=d == "f32")
    add("scales of another dtype", sample(rng("qmm"), "f16", [3, 64]), quantised(sample(rng("qmm", 1), "f32", [5, 64]), "affine", 64, 8), "affine", 64, 8, True)
    add("large", sample(rng("qmm"), "f32", [17, 128]), quantised(sample(rng("qmm", 1), "f32", [19, 128]), "affine", 128, 6), "affine", 128, 6, True)
    add("empty", T("f32", np.zeros([0, 64])), quantised(sample(rng("qmm", 1), "f32", [5, 64]), "affine", 64, 8), "affine", 64, 8, True)
    w = quantised(sample(rng("qmm", 1), "f32", [5, 64]), "affine", 64, 8)
    more = {"transpose": True, "mode": "affine", "group": 64, "bits": 8}
    book.one("quantized_matmul", "k differs", [T("f32", np.zeros([3, 32]))] + list(w), None, fails="verify", **more)
    book.one("quantized_matmul", "integers", [T("i32", np.zeros([3, 64]))] + list(w), None, fails="verify", **more)

    def gathered(note, x, made, lhs, rhs, mode, group, bits, views=False):
        w = np.swapaxes(numbers(up(made[0]), up(made[1]), up(made[2]), mode, group, bits), -1, -2)
        a, b = x.up.reshape((-1,) + x.up.shape[-2:]), w.reshape((-1,) + w.shape[-2:])
        left = np.arange(len(a)) if lhs is None else lhs.a.astype(np.int64)
        right = np.arange(len(b)) if rhs is None else rhs.a.astype(np.int64)
        out = T(x.dtype, a[left] @ b[right])
        attributes = {"transpose": True, "mode": mode, "group": group, "bits": bits}
        checked(book, "gather_qmm", note, [x] + list(made) + [lhs, rhs], out, None, views=views, **attributes)

    for d in FLOATS:
        made = quantised(sample(rng("gqmm", d), d, [4, 5, 64]), "affine", 32, 4)
        gathered(f"{d}", sample(rng("gqmm", d, 1), d, [2, 3, 64]), made, T("i32", [1, 0, 1]), T("i32", [3, -4, 2]), "affine", 32, 4, views=d == "f32")
    x = sample(rng("gqmm"), "f32", [3, 1, 64])
    for mode, (group, bits) in MODES.items():
        made = quantised(sample(rng("gqmm", mode), "f32", [4, 5, 64]), mode, group, bits)
        gathered(mode, x, made, None, T("i32", [3, 0, 1]), mode, group, bits, views=True)
    made = quantised(sample(rng("gqmm", 2), "f32", [4, 5, 64]), "affine", 64, 3)
    for d in INTS:
        gathered(f"indices {d}", x, made, T(d, [2, 0, 1, 1]), T(d, [3, 0, 1, 2]), "affine", 64, 3)
    gathered("no right ones", sample(rng("gqmm"), "f32", [4, 2, 64]), made, None, None, "affine", 64, 3)
    gathered("empty", x, made, T("i32", np.zeros([0])), T("i32", np.zeros([0])), "affine", 64, 3)
    gathered("large", sample(rng("gqmm"), "f32", [4, 17, 64]), made, None, T("u8", [3, 3, 0, 1]), "affine", 64, 3)
    more = {"transpose": True, "mode": "affine", "group": 64, "bits": 3}
    book.one("gather_qmm", "outside", [x] + list(made) + [None, T("i32", [4, 0, 0])], None, fails="run", **more)
    book.one("gather_qmm", "k differs", [T("f32", np.zeros([3, 1, 32]))] + list(made) + [None, None], None, fails="verify", **more)


def eight(book):
    def nearest(a):
        sizes = E4M3[:127]
        with np.errstate(all="ignore"):
            size = np.minimum(np.abs(a.astype(np.float32).astype(np.float64)), 448)
        out = np.zeros(a.shape, np.uint8)
        for i, s in np.ndenumerate(size):
            if np.isnan(s):
                out[i] = 127
                continue
            far = np.abs(sizes - s)
            best = np.flatnonzero(far == far.min())
            out[i] = next((b for b in best if b % 2 == 0), best[0]) | (128 if np.signbit(a[i]) else 0)
        return out

    for d in FLOATS:
        ties = (E4M3[:126] + E4M3[1:127]) / 2
        a = np.concatenate([E4M3[:127], ties, [np.inf, 448.1, 1e4, 2.0**-11, 2.0**-10, 2.0**-12, 0.3]])
        x = T(d, np.concatenate([a, -a, [np.nan]]))
        out = nearest(x.a)
        if d == "f32":
            plain = np.isfinite(x.a) & (np.abs(x.a) <= 448)
            said = np.array(mx.to_fp8(mx.array(x.a)))
            assert np.array_equal(said[plain], out[plain])
        checked(book, "to_fp8", d, [x], T("u8", out))
        checked(book, "to_fp8", f"random {d}", [sample(rng("fp8", d), d, [5, 7])], T("u8", nearest(sample(rng("fp8", d), d, [5, 7]).a)))
        x = T("u8", np.arange(256).reshape(16, 16))
        checked(book, "from_fp8", d, [x], T(d, E4M3.reshape(16, 16)), dtype=d)
        checked(book, "from_fp8", f"odd {d}", [T("u8", np.arange(3, 160).reshape(1, 157))], T(d, E4M3[3:160].reshape(1, 157)), dtype=d)
    said = np.array(mx.from_fp8(mx.array(np.arange(256, dtype=np.uint8)), dtype=mx.float32))
    assert np.array_equal(said[~np.isnan(E4M3)], E4M3[~np.isnan(E4M3)])
    large = np.resize(np.arange(256), [3, 111])
    checked(book, "from_fp8", "large", [T("u8", large)], T("f32", E4M3[large]), dtype="f32")
    for s in ([], [0, 3]):
        checked(book, "to_fp8", f"{s}", [T("f32", np.full(s, 1.5))], T("u8", np.full(s, 60)), views=False)
        checked(book, "from_fp8", f"{s}", [T("u8", np.full(s, 60))], T("f32", np.full(s, 1.5)), views=False, dtype="f32")
    book.one("to_fp8", "integers", [T("i32", [1])], None, fails="verify")
    book.one("from_fp8", "to integers", [T("u8", [1])], None, fails="verify", dtype="i32")
    book.one("from_fp8", "of u16", [T("u16", [1])], None, fails="verify", dtype="f32")


def fill(books):
    books["quant"] = Book("quant")
    for part in (quantize, quantize_float, dequantize, products, eight):
        part(books["quant"])
