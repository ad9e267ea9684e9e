"""Cases of rope, attention and random rows."""

import numpy as np
from gguf import GGMLQuantizationType, quants
from scipy import special

from common import FLOATS, INTS, Book, T, promote_all, rng, sample


def rope(book):
    for interleaved in (False, True):
        for m, heads, d in ((5, 2, 8), (1, 1, 2), (3, 4, 6), (0, 2, 4), (33, 3, 16)):
            x = sample(rng("rope", m, d), "f32", [m, heads, d])
            p = sample(rng("rope", m), "i32", [m], 0, 500)
            f = T("f32", 10000.0 ** (-np.arange(d // 2) * 2 / d))
            angle = p.a[:, None] * f.up
            out = turn(x.up, angle[:, None, :], d, interleaved)
            for rows in ([0, 1], None):
                if m or rows is None:
                    book.one("rope", f"{[m, heads, d]} {interleaved}", [x, p, f], T("f32", out), rows=rows, interleaved=interleaved)
            if m:
                book.views("rope", f"views {[m, heads, d]} {interleaved}", [x, p, f], T("f32", out), interleaved=interleaved)


def turn(x, angle, dims, interleaved, magnitude=1.0):
    """Rotates pairs of the first `dims` elements by `angle` [..., dims/2]."""
    out, half = x.copy(), dims // 2
    first = (slice(0, dims, 2) if interleaved else slice(0, half),)
    second = (slice(1, dims, 2) if interleaved else slice(half, dims),)
    a, b = x[(...,) + first], x[(...,) + second]
    c, s = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    out[(...,) + first] = a * c - b * s
    out[(...,) + second] = a * s + b * c
    return out


DEFAULTS = {
    "form": "neox",
    "dims": 0,
    "base": 10000.0,
    "scale": 1.0,
    "factors_divide": False,
    "original_context": 0,
    "extrapolation": 0.0,
    "attention_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "sections": [],
}


def correction(dims, context, rotations, base):
    return dims * np.log(context / (rotations * 2 * np.pi)) / (2 * np.log(base))


def rotary(x, p, freqs, a):
    """ggml's rope with positions [T] or [..., T], or [4, T] for the forms with sections."""
    form, dims = a["form"], a["dims"] or x.shape[-1]
    half = dims // 2
    i = np.arange(half)
    if a["base"] > 0:
        # The vision form counts within each half: its pairs are as far apart as the whole of `dims` over two.
        inverse = a["base"] ** (-2.0 * i / dims)
        divide = freqs if freqs is not None else np.ones(half)
    else:
        inverse, divide = np.ones(half), freqs
    if form in ("mrope", "vision", "imrope"):
        s = a["sections"]
        which = np.zeros(half, dtype=int)
        start = np.zeros(half, dtype=int)
        total = sum(s)
        for pair in range(half):
            sector = pair % total
            if form == "imrope":
                if sector % 3 == 1 and sector < 3 * s[1]:
                    which[pair] = 1
                elif sector % 3 == 2 and sector < 3 * s[2]:
                    which[pair] = 2
                elif sector % 3 == 0 and sector < 3 * s[0]:
                    which[pair] = 0
                else:
                    which[pair] = 3
            else:
                bounds = np.cumsum(s)
                which[pair] = int(np.searchsorted(bounds, sector, side="right"))
                start[pair] = sector - (bounds[which[pair]] - s[which[pair]])
        if form == "vision":
            # Each section begins at the first frequency again, and dims is twice what the exponent counts.
            exponent = start
            inverse = a["base"] ** (-2.0 * exponent / (dims // 2)) if a["base"] > 0 else np.ones(half)
        theta = np.stack([p[which[pair]] * inverse[pair] / divide[pair] for pair in range(half)], -1)
    else:
        theta = p[..., None] * inverse / divide
    angle, magnitude = a["scale"] * theta, a["attention_factor"]
    if a["extrapolation"] != 0:
        low = max(0.0, np.floor(correction(dims, a["original_context"], a["beta_fast"], a["base"])))
        high = min(dims - 1.0, np.ceil(correction(dims, a["original_context"], a["beta_slow"], a["base"])))
        ramp = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)
        mix = ramp * a["extrapolation"]
        angle = angle * (1 - mix) + theta * mix
        magnitude = magnitude * (1 + 0.1 * np.log(1 / a["scale"]))
    return turn(x, angle, dims, form == "norm", magnitude)


def rotary_embedding(book):
    def add(note, x, p, freqs=None, rows=None, views=False, fails=None, **attributes):
        a = DEFAULTS | attributes
        # f32 frequencies: the angle of a far position depends on their last bits.
        out = None if fails else T(x.dtype, rotary(x.up, p.up.astype(np.float64), None if freqs is None else freqs.up, a))
        book.one("rotary_embedding", note, [x, p, freqs], out, rows=rows, fails=fails, **a)
        if views:
            book.views("rotary_embedding", f"views {note}", [x, p, freqs], out, **a)

    for form in ("norm", "neox"):
        for d in FLOATS:
            x, p = sample(rng("re", d), d, [2, 3, 5, 8]), T("i32", [0, 1, 7, 30, 100])
            add(f"{form} {d}", x, p, form=form, views=d == "f32")
            add(f"{form} part {d}", x, p, form=form, dims=6)
            add(f"{form} scale {d}", x, p, form=form, scale=0.25)
            add(f"{form} yarn {d}", x, p, form=form, scale=0.25, original_context=64, extrapolation=1.0, attention_factor=1.1)
        f = T("f32", [1.0, 1.5, 2.0, 8.0])
        add(f"{form} factors", x, p, f, form=form, factors_divide=True)
        add(f"{form} denominators", x, p, T("f32", [1.0, 10.0, 100.0, 1000.0]), form=form, base=0.0)
        add(f"{form} mixed yarn", x, p, f, form=form, factors_divide=True, scale=0.5, original_context=32, extrapolation=0.75, beta_fast=16.0, beta_slow=2.0)
        for d in FLOATS:
            add(f"{form} factors {d}", x, p, T(d, f.a), form=form, factors_divide=True)
        add(f"{form} both", x, p, f, form=form, fails="verify")
        add(f"{form} neither", x, p, form=form, base=0.0, fails="verify")
        for d in INTS:
            add(f"{form} positions {d}", sample(rng("re"), "f32", [3, 4]), T(d, [0, 5, 100]), form=form)
        q = sample(rng("pos"), "i32", [2, 1, 5], 0, 50)
        add(f"{form} positions of batches", sample(rng("re"), "f32", [2, 3, 5, 8]), q, form=form)
        add(f"{form} one row", sample(rng("re"), "f32", [1, 2]), T("i32", [3]), form=form)
        add(f"{form} empty", sample(rng("re"), "f32", [2, 0, 4]), T("i32", np.zeros([0])), form=form)
        add(f"{form} rows", sample(rng("re"), "f32", [6, 4]), T("i32", [0, 1, 2, 3, 9, 8]), form=form, rows=[0, 1])
        add(f"{form} odd tail", sample(rng("re"), "f32", [3, 7]), T("i32", [1, 2, 3]), form=form, dims=4)
        add(f"{form} large", sample(rng("re"), "f16", [4, 37, 32]), T("i32", np.arange(37)), form=form)
    p = sample(rng("mrope"), "i32", [4, 5], 0, 60)
    for form, sections in (("mrope", [2, 1, 3, 2]), ("mrope", [1, 1, 1, 1]), ("imrope", [3, 3, 2, 0]), ("imrope", [2, 2, 2, 2]), ("vision", [4, 4, 0, 0]), ("vision", [2, 2, 2, 2])):
        for d in ("f32", "f16"):
            x = sample(rng(form, d), d, [2, 5, 16])
            add(f"{form} {sections} {d}", x, p, form=form, sections=sections)
            if form != "vision":
                add(f"{form} {sections} part {d}", sample(rng(form, d), d, [5, 20]), p, form=form, sections=sections, dims=16)
            add(f"{form} {sections} scale {d}", x, p, form=form, sections=sections, scale=0.5)
    add("mrope without four positions", x, T("i32", np.zeros([5])), form="mrope", sections=[2, 2, 2, 2], fails="verify")
    add("dims beyond x", x, T("i32", np.zeros([5])), dims=18, fails="verify")
    add("odd dims", x, T("i32", np.zeros([5])), dims=5, fails="verify")


def sdpa(q, k, v, mask, sinks, scale, causal, window, soft_cap):
    heads, s_len, t_len = q.shape[1], k.shape[2], q.shape[2]
    k, v = (np.repeat(a, heads // a.shape[1], 1) for a in (k, v))
    s = np.einsum("bhtd,bhsd->bhts", q, k) * scale
    if soft_cap > 0:
        s = soft_cap * np.tanh(s / soft_cap)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    at = np.arange(t_len)[:, None] + (s_len - t_len)
    keys = np.arange(s_len)[None, :]
    seen = np.ones([t_len, s_len], bool)
    if causal:
        seen &= keys <= at
    if window > 0:
        seen &= (keys > at - window) & (keys <= at)
    s = np.where(seen, s, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(sinks[None, :, None, None], s.shape[:3] + (1,))
        return special.softmax(np.concatenate([s, extra], -1), -1)[..., :-1] @ v
    return special.softmax(s, -1) @ v if s_len else np.full(q.shape[:3] + v.shape[-1:], np.nan)


def attention(book):
    rope(book)
    name = "scaled_dot_product_attention"

    def add(note, q, k, v, mask=None, sinks=None, scale=0.3, causal=False, window=0, soft_cap=0.0, rows=None, views=False, fails=None):
        up = lambda t: None if t is None else t.a if t.dtype == "bool" else t.up
        a = {"scale": scale, "causal": causal, "window": window, "soft_cap": soft_cap}
        with np.errstate(all="ignore"):
            out = None if fails else T(promote_all([q, k, v]), sdpa(up(q), up(k), up(v), up(mask), up(sinks), **a))
        book.one(name, note, [q, k, v, mask, sinks], out, rows=rows, fails=fails, **a)
        if views:
            book.views(name, f"views {note}", [q, k, v, mask, sinks], out, **a)

    def qkv(seed, d, b, hq, hkv, t, s, e, ev):
        r = rng("sdpa", seed, d)
        return sample(r, d, [b, hq, t, e]), sample(r, d, [b, hkv, s, e]), sample(r, d, [b, hkv, s, ev])

    for d in FLOATS:
        for b, hq, hkv, t, s, e, ev in ((1, 1, 1, 3, 3, 4, 4), (2, 4, 2, 5, 7, 6, 6), (2, 3, 3, 1, 9, 4, 5), (1, 8, 1, 4, 4, 8, 3)):
            q, k, v = qkv(1, d, b, hq, hkv, t, s, e, ev)
            note = f"{[b, hq, hkv, t, s, e, ev]} {d}"
            add(note, q, k, v, views=d == "f32" and b == 2)
            add(f"causal {note}", q, k, v, causal=True)
            add(f"soft cap {note}", q, k, v, soft_cap=2.0)
            mask = sample(rng("mask", note), "bool", [t, s])
            mask = T("bool", mask.a | (np.arange(s) == 0))
            add(f"bool mask {note}", q, k, v, mask)
            add(f"additive mask {note}", q, k, v, sample(rng("mask", note, 2), d, [b, 1, t, s]))
            add(f"head mask {note}", q, k, v, sample(rng("mask", note, 3), d, [hq, t, s]), causal=True)
            add(f"sinks {note}", q, k, v, None, sample(rng("sinks", note), d, [hq]))
            for window in (1, 2, 100):
                add(f"window {window} {note}", q, k, v, causal=True, window=window)
            add(f"everything {note}", q, k, v, mask, sample(rng("sinks", note), d, [hq]), causal=True, window=3, soft_cap=5.0, scale=0.5)
    q, k, v = qkv(2, "f32", 1, 2, 1, 3, 3, 4, 4)
    nothing = T("bool", [[True, False, True], [False] * 3, [True] * 3])
    add("a row that sees nothing", q, k, v, nothing)
    add("a row that sees nothing but the sink", q, k, v, nothing, T("f32", [0.5, -1.0]))
    add("mask of -infinity", q, k, v, T("f32", np.where(nothing.a, 0.25, -np.inf)), T("f32", [0.5, -1.0]))
    add("more queries than keys, causal", *qkv(3, "f32", 1, 2, 2, 5, 3, 4, 4), None, T("f32", [0.5, -1.0]), causal=True)
    add("large scores", T("f32", q.a * 100), T("f32", k.a * 100), v)
    add("no queries", *qkv(4, "f32", 1, 2, 2, 0, 3, 4, 4))
    add("rows", *qkv(5, "f32", 5, 2, 1, 3, 4, 4, 4), rows=[0, 1, 2])
    add("half keys", q, k.to("f16"), v.to("bf16"))
    add("large", *qkv(6, "f16", 1, 4, 2, 40, 50, 16, 16), causal=True)
    q, k, v = qkv(7, "f32", 1, 3, 2, 3, 3, 4, 4)
    add("heads that do not share", q, k, v, fails="verify")
    paged(book)


def scaled(x):
    """Blocks of 32, the scale of each, and the numbers in it."""
    blocks = x.a.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    return blocks, scale, blocks.astype(np.float64) / scale


def apart_from_halves(r, dtype, shape):
    """Random numbers; for q8_0 such that none is halfway between two, where who rounds in float32 may go either way."""
    while True:
        x = sample(r, "f32" if dtype == "q8_0" else dtype, shape)
        if dtype != "q8_0":
            return x
        exact = scaled(x)[2]
        if (np.abs(exact - np.floor(exact) - 0.5) > 3e-5).all():
            return x


def stored(dtype, x):
    """What a cache of this dtype keeps of rows of numbers: the tensor, and its values."""
    if dtype != "q8_0":
        t = x.to(dtype)
        return t, t.up
    # ggml's block of 32: a scale in half precision, of the largest number over 127, and whole numbers between -127 and 127.
    blocks, scale, exact = scaled(x)
    whole = np.rint(exact).astype(np.int8)
    half = scale.astype(np.float16)
    raw = np.concatenate([half.view(np.uint8), whole.view(np.uint8)], 1)
    assert (raw == quants.quantize(blocks, GGMLQuantizationType.Q8_0).reshape(raw.shape)).all()
    values = half.astype(np.float64) * whole
    return T("q8_0", None, x.shape, raw.tobytes()), values.reshape(x.shape)


def paged(book):
    for dtype in ("f32", "f16", "bf16", "q8_0"):
        for m, heads, kv, d, length, window, cap in (
            (6, 4, 2, 8, 4, 0, 0),
            (6, 2, 2, 16, 16, 3, 0),
            (1, 1, 1, 4, 4, 0, 0),
            (17, 6, 3, 8, 4, 5, 0),
            (5, 4, 1, 8, 16, 0, 2.5),
            (7, 2, 1, 6, 4, 5, 50.0),
        ):
            if dtype == "q8_0":
                d = 64 if m == 7 else 32  # whole blocks
            r = rng("paged", dtype, m, d, window)
            blocks, tables = 12, T("i32", r.permutation(12)[:10].reshape(2, 5))
            before, was = stored(dtype, apart_from_halves(r, dtype, [2, blocks, kv, length, d]))
            keys, values = (apart_from_halves(r, "q8_0" if dtype == "q8_0" else "f32", [m, kv, d]) for _ in range(2))
            slots = T("i32", np.where(np.arange(m) == 2, -1, r.permutation(blocks * length)[:m]))
            bytes_of = lambda t, shape: np.frombuffer(t.bytes(), np.uint8).reshape(shape + [-1])
            kept, now = bytes_of(before, [2, blocks, kv, length]).copy(), was.copy()
            for half, t in enumerate((keys, values)):
                packed, up = stored(dtype, t)
                for i, slot in enumerate(slots.a.tolist()):
                    if slot >= 0:
                        kept[half, slot // length, :, slot % length] = bytes_of(packed, [m, kv])[i]
                        now[half, slot // length, :, slot % length] = up[i]
            after = T(dtype, None, before.shape, kept.tobytes())
            spec = (dtype, blocks, length, kv, d)
            # The cache after: written by the first op; the second reads it.
            q = sample(r, "f32", [m, heads, d])
            sequences = T("i32", r.integers(0, 2, m))
            positions = T("i32", r.integers(0, 5 * length, m))
            out = np.zeros([m, heads, d])
            for i in range(m):
                p = int(positions.a[i])
                tokens = range(max(0, p - window + 1) if window else 0, p + 1)
                at = [(int(tables.a[sequences.a[i], t // length]), t % length) for t in tokens]
                for h in range(heads):
                    ks = np.array([now[0, b, h * kv // heads, o] for b, o in at])
                    vs = np.array([now[1, b, h * kv // heads, o] for b, o in at])
                    scores = 0.4 * ks @ q.up[i, h]
                    scores = cap * np.tanh(scores / cap) if cap else scores
                    out[i, h] = special.softmax(scores) @ vs
            attributes = {"scale": 0.4, "window": window, "soft_cap": float(cap)}
            for rows in (None, [1, 2, 3, 4, 6, 7]):
                inputs = [book.cache(spec, before, after), keys, values, slots, q, tables, sequences, positions]
                nodes = [("cache_write", [0, 1, 2, 3], {}), ("paged_attention", [4, 0, 5, 6, 7], attributes)]
                capped = f"cap {cap} " if cap else ""
                note = f"{dtype} {[m, heads, kv, d, length, window]} {capped}{'rows' if rows else ''}"
                book.graph("cache_write", note, inputs, nodes, [[1, 0]], [T("f32", out)], rows=rows)
                inputs = [q, book.cache(spec, after, after), tables, sequences, positions]
                nodes = [("paged_attention", [0, 1, 2, 3, 4], attributes)]
                book.graph("paged_attention", note, inputs, nodes, [[0, 0]], [T("f32", out)], rows=[0, 3, 4] if rows else None)


def threefry(key, x, y):
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    with np.errstate(over="ignore"):
        rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
        k = [np.uint32(key[0]), np.uint32(key[1])]
        k.append(k[0] ^ k[1] ^ np.uint32(0x1BD11BDA))
        x, y = np.asarray(x, np.uint32) + k[0], np.asarray(y, np.uint32) + k[1]
        for i in range(5):
            for r in rotations[i % 2]:
                x = x + y
                y = (y << np.uint32(r)) | (y >> np.uint32(32 - r))
                y = x ^ y
            x = x + k[(i + 1) % 3]
            y = y + k[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def bits(key, shape):
    """MLX's order: the halves of the counter are the halves of the result; an odd middle element has a counter of its own."""
    n = int(np.prod(shape))
    half, odd = n // 2, n % 2
    i = np.arange(half)
    first, second = threefry(key, i, i + half + odd)
    middle = threefry(key, [half], [0])[0] if odd else np.zeros(0, np.uint32)
    return np.concatenate([first, middle, second]).astype(np.uint32).reshape(shape)


def categorical(mx, logits, axis, count, key):
    """MLX's draws. From a single distribution it draws by another rule than from several; ours has the one rule for both: the
    largest of logits and MLX's own Gumbel noise."""
    if logits.size != logits.shape[axis]:
        return np.array(mx.random.categorical(logits, axis, num_samples=count, key=key))
    noise = mx.random.gumbel([*logits.shape, count], key=key)
    return np.array(mx.argmax(mx.expand_dims(logits, -1) + noise, axis if axis >= 0 else axis - 1))


def random(book):
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    keys = [[0, 0], [0, 7], [0xFFFFFFFF, 1], [0x12345678, 0x9ABCDEF0]]
    shapes = [[1], [2], [7], [16], [3, 5], [2, 3, 4], [], [0], [2, 0], [301]]
    # Salmon et al., known answers for 20 rounds.
    assert [int(v) for v in threefry([0, 0], 0, 0)] == [0x6B200159, 0x99BA4EFE]
    assert [int(v) for v in threefry([0x13198A2E, 0x03707344], 0x243F6A88, 0x85A308D3)] == [0xC4923A9C, 0x483DF7A0]
    for key in keys:
        t, k = T("u32", key), mx.array(key, dtype=mx.uint32)
        for n in (1, 2, 3, 5, 64):
            split = np.array(mx.random.split(k, n))
            assert (split == bits(key, [n, 2])).all()
            book.one("random_split", f"{key} {n}", [t], T("u32", split), count=n)
        for shape in shapes:
            book.one("random_bits", f"{key} {shape}", [t], T("u32", bits(key, shape)), shape=shape)
            for low, high in ((0.0, 1.0), (-2.0, 3.0)):
                out = T("f32", np.array(mx.random.uniform(low, high, shape, key=k)))
                book.one("random_uniform", f"{key} {shape} {low} {high}", [t], out, shape=shape, low=low, high=high)
                # MLX divides by 2^32 − 1 and stays below 1.
                ours = np.minimum(bits(key, shape) / 4294967295.0, 1 - 2.0**-24) * (high - low) + low
                assert np.allclose(out.up, ours, atol=1e-6), (key, shape)
            for mean, deviation in ((0.0, 1.0), (5.0, 0.5)):
                out = T("f32", np.array(mx.random.normal(shape, loc=mean, scale=deviation, key=k)))
                book.one("random_normal", f"{key} {shape} {mean} {deviation}", [t], out, shape=shape, mean=mean, deviation=deviation)
            for p in (0.0, 0.3, 0.5, 1.0):
                out = T("bool", np.array(mx.random.bernoulli(p, shape, key=k)))
                book.one("random_bernoulli", f"{key} {shape} {p}", [t], out, shape=shape, p=p)
        for shape, axis in (([5], 0), ([3, 7], -1), ([3, 7], 0), ([2, 3, 4], 1), ([1, 1], 1), ([40], -1)):
            for d in FLOATS[:3]:
                logits = sample(rng("categorical", shape), d, shape)
                for count in (1, 4):
                    lm = mx.array(logits.up.astype(np.float32))
                    out = T("u32", categorical(mx, lm, axis, count, k))
                    book.one("random_categorical", f"{key} {d} {shape} {axis} {count}", [logits, t], out, axis=axis, count=count)
        for d in INTS + ["f64", "bool"]:
            # Drawn from as f32.
            logits = sample(rng("categorical", d), d, [3, 7])
            out = T("u32", categorical(mx, mx.array(logits.to("f32").a), -1, 4, k))
            book.one("random_categorical", f"{key} {d} [3, 7]", [logits, t], out, axis=-1, count=4)
        masked = T("f32", [-np.inf, 1.0, -np.inf, 0.0])
        out = categorical(mx, mx.array(masked.a), -1, 33, k)
        assert set(out.tolist()) <= {1, 3}
        book.one("random_categorical", f"{key} masked", [masked, t], T("u32", out), axis=-1, count=33)
    t = T("u32", [3, 4])
    nodes = [("random_bits", [0], {"shape": [20001]}), ("slice", [[0, 0]], {"starts": [0], "stops": [20001], "steps": [101]})]
    book.graph("random_bits", "large", [t], nodes, [[1, 0]], [T("u32", bits([3, 4], [20001])[::101])])
    k = mx.array([3, 4], dtype=mx.uint32)
    for op, f, more in (
        ("random_uniform", lambda: mx.random.uniform(0.0, 1.0, [1001], key=k), {"shape": [1001], "low": 0.0, "high": 1.0}),
        ("random_normal", lambda: mx.random.normal([1001], key=k), {"shape": [1001], "mean": 0.0, "deviation": 1.0}),
        ("random_bernoulli", lambda: mx.random.bernoulli(0.3, [1001], key=k), {"shape": [1001], "p": 0.3}),
        ("random_split", lambda: mx.random.split(k, 501), {"count": 501}),
    ):
        out = np.array(f())
        out = T("bool" if out.dtype == bool else "u32" if out.dtype == np.uint32 else "f32", out)
        book.one(op, "large", [t], out, **more)
        book.views(op, "views", [t], out, **more)
    logits = sample(rng("categorical"), "f32", [7, 101])
    out = T("u32", categorical(mx, mx.array(logits.a), -1, 3, k))
    book.one("random_categorical", "large", [logits, t], out, axis=-1, count=3)
    book.views("random_categorical", "views", [logits, t], out, axis=-1, count=3)
    # A key that is a view: the second of a split.
    nodes = [("random_split", [0], {"count": 3}), ("take", [[0, 0], 1], {"axis": 0}), ("random_bits", [[1, 0]], {"shape": [5]})]
    out = T("u32", bits(bits([3, 4], [3, 2])[2], [5]))
    book.graph("random_bits", "views a key out of a split", [t, T("i32", -1)], nodes, [[2, 0]], [out])
    for op, more in (("random_bits", {}), ("random_normal", {"mean": 0.0, "deviation": 1.0})):
        book.one(op, "a key of three", [T("u32", [1, 2, 3])], None, fails="verify", shape=[2], **more)
        book.one(op, "a key of i32", [T("i32", [1, 2])], None, fails="verify", shape=[2], **more)
    # What is exact, in many numbers, of which there is one in the middle.
    shape, n = [3, 6667], 3 * 6667
    for key in ([5, 6], [0xFFFFFFFF, 0x80000000]):
        t, k = T("u32", key), mx.array(key, dtype=mx.uint32)
        book.one("random_bits", f"{key} {n}", [t], T("u32", bits(key, shape)), shape=shape)
        unit = np.minimum(bits(key, shape).astype(np.float32) / np.float32(2**32), np.float32(1 - 2.0**-24))
        uniform = np.array(mx.random.uniform(-2.0, 3.0, shape, key=k))
        assert (uniform == unit * np.float32(5.0) + np.float32(-2.0)).all()
        book.one("random_uniform", f"{key} {n}", [t], T("f32", uniform), check="exact", shape=shape, low=-2.0, high=3.0)
        out = T("bool", np.array(mx.random.bernoulli(0.3, shape, key=k)))
        book.one("random_bernoulli", f"{key} {n}", [t], out, shape=shape, p=0.3)


def drawn(logits, temperature, noise):
    """A token of a row by inverse CDF in f64, or -1; None where another rounding of the exponentials may have another."""
    if np.isnan(logits).any() or (logits == np.inf).any() or (logits == -np.inf).all() or np.isnan(temperature):
        return -1
    if temperature == 0:
        return int(np.argmax(logits))
    low, high = threefry([int(noise[0]), int(noise[1])], int(noise[3]), int(noise[2]))
    u = ((int(high) << 32 | int(low)) >> 11) / 2.0**53
    weights = np.exp((logits.astype(np.float64) - logits.max()) / np.float64(temperature))
    sums = np.cumsum(weights)
    target = u * sums[-1]
    if np.abs(sums / target - 1).min() < 1e-5:
        return None
    return int(np.searchsorted(sums, target, side="right"))


def drawn_among(logits, temperature, noise, limits):
    """A token of a row among those that top-k, top-p and min-p leave, or -1; None where another rounding of the exponentials may have another."""
    k, p, m = limits
    n = len(logits)
    k = int(k) if k >= 1 and k < n else 0
    p = p if p < 1 else 1.0
    m = m if m > 0 else 0.0
    if temperature == 0 or k == 1:
        return drawn(logits, np.float32(0), noise)
    if k == 0 and p == 1.0 and m == 0.0:
        return drawn(logits, temperature, noise)
    if drawn(logits, np.float32(0), noise) == -1 or k > 256:
        return -1
    weights = np.exp((logits.astype(np.float64) - logits.max()) / np.float64(temperature))
    order = np.lexsort((np.arange(n), -logits.astype(np.float64)))
    order = order[logits[order] > -np.inf]
    total = weights.sum()
    if k:
        order = order[:k]
        total = weights[order].sum()
    # What the largest weighs is exact.
    near = lambda a, b: a != 1 and abs(a / b - 1) < 1e-5
    if p < 1:
        sums = np.cumsum(weights[order])
        if (np.abs(sums - np.float64(p) * total) < 1e-5 * sums).any():
            return None
        reached = int(np.searchsorted(sums, np.float64(p) * total))
        if reached >= 256 and k == 0:
            return -1
        order = order[: reached + 1]
    if m > 0:
        if any(near(w, np.float64(m)) for w in weights[order]):
            return None
        order = order[weights[order] >= np.float64(m)]
        # Of as many as are looked at, the last must be too light.
        if len(order) >= 256 and k == 0 and p == 1:
            return -1
    order = np.sort(order)
    low, high = threefry([int(noise[0]), int(noise[1])], int(noise[3]), int(noise[2]))
    u = ((int(high) << 32 | int(low)) >> 11) / 2.0**53
    sums = np.cumsum(weights[order])
    target = u * sums[-1]
    if np.abs(sums / target - 1).min() < 1e-5:
        return None
    return int(order[np.searchsorted(sums, target, side="right")])


def drawing_among(book):
    kinds = [(0, 1, 0), (5, 1, 0), (1, 0.5, 0.5), (0, 0.7, 0), (0, 0.95, 0), (0, 1, 0.1), (40, 0.9, 0.02), (3, 0.2, 0.9), (0, 0.9, 0.3), (256, 1, 0), (257, 1, 0), (1e9, 0.5, 0)]
    kinds += [(np.nan, 0.8, 0), (-3, np.nan, 0.2), (4.9, 1.5, np.nan), (np.inf, 0.3, -1), (0, 0, 0), (0, 1, 1)]
    for lead, n in (([], 7), ([], 1), ([3], 255), ([3], 256), ([3], 257), ([2, 2], 40), ([4], 1003), ([1], 20011), ([0], 7)):
        for number, kind in enumerate(kinds):
            if n > 2000 and number not in (3, 5, 7):
                continue
            r = rng("draw among", lead, n, number)
            logits = (r.standard_normal([*lead, n]) * 3).astype(np.float32)
            # Many equal ones, also where the line is drawn, and zeros of both signs.
            logits = np.where(r.random([*lead, n]) < 0.5, np.round(logits), logits).astype(np.float32)
            logits = np.where(r.random([*lead, n]) < 0.05, np.float32(-0.0), logits).astype(np.float32)
            logits[r.random([*lead, n]) < 0.1] = -np.inf
            logits[..., n // 2] = 0.5
            temperatures = np.full(lead, (0.6, 1.0, 2.0)[number % 3], np.float32)
            noise = r.integers(0, 2**32, [*lead, 4], dtype=np.uint32)
            limits = np.broadcast_to(np.array(kind, np.float32), [*lead, 3]).copy()
            tokens = np.zeros(lead, np.int32)
            for at in np.ndindex(*lead):
                tries = 0
                while (token := drawn_among(logits[at], temperatures[at], noise[at], limits[at])) is None:
                    noise[at][3] += np.uint32(1)
                    # Where it is not the noise that is too near to something.
                    temperatures[at] += np.float32(0.01)
                    tries += 1
                    assert tries < 100
                tokens[at] = token
            ins = [T("f32", logits), T("f32", temperatures), T("u32", noise), T("f32", limits)]
            book.one("draw", f"among {lead} {n} {number}", ins, T("i32", tokens), "exact")
            if number in (3, 6) and 0 not in lead and n < 300:
                book.views("draw", f"views among {lead} {n} {number}", ins, T("i32", tokens), "exact")
    # More may be left than are looked at.
    logits = np.zeros([5, 600], np.float32)
    limits = np.array([[0, 0.301, 0], [0, 0.901, 0], [0, 1, 0.5], [300, 1, 0], [256, 0.99, 0]], np.float32)
    temperatures, noise = np.ones(5, np.float32), np.arange(20, dtype=np.uint32).reshape(5, 4)
    tokens = [drawn_among(*row) for row in zip(logits, temperatures, noise, limits)]
    assert [t == -1 for t in tokens] == [False, True, True, True, False]
    ins = [T("f32", logits), T("f32", temperatures), T("u32", noise), T("f32", limits)]
    book.one("draw", "among equals", ins, T("i32", tokens), "exact")
    book.one("draw", "rows among", ins, T("i32", tokens), "exact", rows=[0, 1, 2, 3])
    broken = np.array([[0, 1, np.nan], [0, 1, np.inf], [-np.inf] * 3, [2, 2, -np.inf]], np.float32)
    limits = np.array([[2, 1, 0], [0, 0.5, 0], [0, 1, 0.5], [2, 0.4, 0]], np.float32)
    tokens = [drawn_among(row, np.float32(1), k, l) for row, k, l in zip(broken, noise, limits)]
    assert tokens == [-1, -1, -1, 0]
    book.one("draw", "broken among", [T("f32", broken), T("f32", np.ones(4, np.float32)), T("u32", noise[:4]), T("f32", limits)], T("i32", tokens), "exact")
    x, t, k = T("f32", logits), T("f32", temperatures), T("u32", noise)
    book.one("draw", "limits of another shape", [x, t, k, T("f32", np.ones([5, 2], np.float32))], None, fails="verify")
    book.one("draw", "limits for all", [x, t, k, T("f32", np.ones(3, np.float32))], None, fails="verify")
    book.one("draw", "limits of halves", [x, t, k, T("f16", np.ones([5, 3], np.float16))], None, fails="verify")


def drawing(book):
    # Salmon et al.: the first known answer, as one number.
    assert drawn(np.array([0.0, -np.inf]), 1.0, [0, 0, 0, 0]) == 0
    for lead, n in (([], 7), ([], 1), ([1], 33), ([5], 8), ([5], 255), ([3], 256), ([3], 257), ([2, 3], 40), ([9], 1003), ([1], 20011), ([0], 7), ([2, 0], 5)):
        for sharp in (0.0, 0.3, 1.0, 8.0):
            if n > 2000 and sharp != 1.0:
                continue
            r = rng("draw", lead, n, int(sharp * 10))
            logits = (r.standard_normal([*lead, n]) * 3).astype(np.float32)
            logits[r.random([*lead, n]) < 0.1] = -np.inf
            logits[..., n // 2] = 0.5
            # Equal ones.
            logits = np.where(r.random([*lead, n]) < 0.1, np.float32(1.5), logits).astype(np.float32)
            temperatures = np.full(lead, sharp, np.float32)
            if lead and lead[-1] > 1:
                temperatures[..., 1] = 0.0
            noise = r.integers(0, 2**32, [*lead, 4], dtype=np.uint32)
            tokens = np.zeros(lead, np.int32)
            for at in np.ndindex(*lead):
                while (token := drawn(logits[at], temperatures[at], noise[at])) is None:
                    noise[at][3] += np.uint32(1)
                tokens[at] = token
            x, t, k, out = T("f32", logits), T("f32", temperatures), T("u32", noise), T("i32", tokens)
            book.one("draw", f"{lead} {n} {sharp}", [x, t, k, None], out, "exact")
            if sharp == 1.0 and 0 not in lead and n < 300:
                book.views("draw", f"views {lead} {n}", [x, t, k, None], out, "exact")
    # What is no distribution has no token.
    logits = np.array([[0, 1, np.nan], [0, 1, np.inf], [-np.inf] * 3, [2, 2, -np.inf], [0, np.nan, 1], [1, 2, 3]], np.float32)
    temperatures = np.array([1, 1, 1, 0, 0, np.nan], np.float32)
    noise = np.arange(24, dtype=np.uint32).reshape(6, 4)
    tokens = [drawn(row, t, k) for row, t, k in zip(logits, temperatures, noise)]
    assert tokens == [-1, -1, -1, 0, -1, -1]
    book.one("draw", "broken", [T("f32", logits), T("f32", temperatures), T("u32", noise), None], T("i32", tokens), "exact")
    # Rows of a step.
    rows = 5
    r = rng("draw rows")
    logits = r.standard_normal([rows, 65]).astype(np.float32)
    noise = r.integers(0, 2**32, [rows, 4], dtype=np.uint32)
    tokens = [drawn(row, np.float32(1.0), k) for row, k in zip(logits, noise)]
    assert None not in tokens
    book.one("draw", "rows", [T("f32", logits), T("f32", np.ones(rows, np.float32)), T("u32", noise), None], T("i32", tokens), "exact", rows=[0, 1, 2])
    x, t, k = T("f32", logits), T("f32", np.ones(rows, np.float32)), T("u32", noise)
    book.one("draw", "noise of another shape", [x, t, T("u32", noise[:, :3]), None], None, fails="verify")
    book.one("draw", "a temperature for all", [x, T("f32", np.float32(1.0)), k, None], None, fails="verify")
    book.one("draw", "noise of i32", [x, t, T("i32", noise.view(np.int32)), None], None, fails="verify")
    book.one("draw", "no token", [T("f32", logits[:, :0]), t, k, None], None, fails="verify")


def fill(books):
    for name, f in (("rope", rotary_embedding), ("attention", attention), ("random", random)):
        books[name] = Book(name)
        f(books[name])
    drawing(books["random"])
    drawing_among(books["random"])
