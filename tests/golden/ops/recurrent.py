"""Cases of recurrences over time, by plain loops in float64."""

import numpy as np

from common import FLOATS, Book, T, promote_all, rng, sample


def gated_delta(q, k, v, g, beta, state):
    (b, t, hk, dk), (hv, dv) = q.shape, v.shape[2:]
    s = np.zeros([b, hv, dv, dk]) if state is None else state.copy()
    y = np.zeros([b, t, hv, dv])
    for i in range(b):
        for h in range(hv):
            at = h * hk // hv
            for j in range(t):
                s[i, h] *= g[i, j, h]
                delta = beta[i, j, h] * (v[i, j, h] - s[i, h] @ k[i, j, at])
                s[i, h] += np.outer(delta, k[i, j, at])
                y[i, j, h] = s[i, h] @ q[i, j, at]
    return y, s


def mamba2(x, dt, a, b, c, d, state):
    (n, t, h, p), (g, width) = x.shape, b.shape[2:]
    s = np.zeros([n, h, p, width]) if state is None else state.copy()
    y = np.zeros([n, t, h, p])
    for i in range(n):
        for e in range(h):
            at = e * g // h
            for j in range(t):
                s[i, e] = np.exp(dt[i, j, e] * a[e]) * s[i, e] + np.outer(dt[i, j, e] * x[i, j, e], b[i, j, at])
                y[i, j, e] = s[i, e] @ c[i, j, at] + (0 if d is None else d[e] * x[i, j, e])
    return y, s


def add(book, op, note, inputs, of, rows=None, views=False):
    f = gated_delta if op == "gated_delta" else mamba2
    y, s = f(*[None if t is None else t.up for t in inputs])
    given = [t for t in inputs if t is not None]
    work = "f64" if any(t.dtype == "f64" for t in given) else "f32"
    outs = [T(promote_all([inputs[i] for i in of]), y), T(work, s)]
    book.one(op, note, inputs, outs, rows=rows)
    if views:
        book.views(op, f"views {note}", inputs, outs)


def deltas(book):
    def inputs(r, dtypes, b, t, hk, hv, dk, dv, state):
        dq, dk_, dv_, dg, db, ds = dtypes
        k = r.standard_normal([b, t, hk, dk])
        k /= np.linalg.norm(k, axis=-1, keepdims=True) + 1e-9
        return [
            sample(r, dq, [b, t, hk, dk], -1, 1),
            T(dk_, k),
            sample(r, dv_, [b, t, hv, dv], -2, 2),
            sample(r, dg, [b, t, hv], 0.5, 1),
            sample(r, db, [b, t, hv], 0, 1),
            sample(r, ds, [b, hv, dv, dk], -1, 1) if state else None,
        ]

    def case(note, dtypes, sizes, state=True, **more):
        add(book, "gated_delta", note, inputs(rng("gated_delta", note), dtypes, *sizes, state), [0, 1, 2], **more)

    for d in FLOATS:
        case(d, [d] * 6, (2, 5, 2, 4, 3, 7), views=True)
        case(f"{d} alone", [d] * 6, (1, 3, 1, 1, 4, 4), False)
    for i in range(6):
        for d in ("f16", "f64"):
            case(f"{d} as {i}", ["f32"] * i + [d] + ["f32"] * (5 - i), (1, 3, 1, 2, 4, 2))
    case("halves", ["f16", "bf16", "f16", "f32", "f32", "f32"], (1, 3, 1, 2, 4, 2))
    case("large", ["f32"] * 6, (2, 21, 2, 4, 33, 17))
    for note, sizes in (("of no time", (2, 0, 1, 2, 3, 4)), ("of nothing", (0, 3, 1, 2, 3, 4)), ("no columns", (1, 3, 1, 2, 0, 4)), ("no rows", (1, 3, 1, 2, 4, 0))):
        case(note, ["f32"] * 6, sizes)
    case("rows", ["f32"] * 6, (3, 4, 1, 2, 3, 5), rows=[0, 1, 2, 3, 4, 5])
    z = lambda *s: T("f32", np.zeros(s))
    good = [z(1, 3, 2, 4), z(1, 3, 2, 4), z(1, 3, 4, 5), z(1, 3, 4), z(1, 3, 4), z(1, 4, 5, 4)]
    for i, wrong in enumerate((z(1, 3, 3, 4), z(1, 3, 2, 5), z(1, 2, 4, 5), z(1, 3, 2), z(1, 3, 4, 1), z(1, 4, 4, 5))):
        book.one("gated_delta", f"wrong {i}", good[:i] + [wrong] + good[i + 1 :], None, fails="verify")
    book.one("gated_delta", "integers", [T("i32", np.zeros([1, 3, 2, 4]))] + good[1:], None, fails="verify")


def mambas(book):
    def inputs(r, dtypes, n, t, h, g, p, s, d, state):
        return [
            sample(r, dtypes[0], [n, t, h, p], -2, 2),
            sample(r, dtypes[1], [n, t, h], 0, 1),
            sample(r, dtypes[2], [h], -2, 0),
            sample(r, dtypes[3], [n, t, g, s], -1, 1),
            sample(r, dtypes[4], [n, t, g, s], -1, 1),
            sample(r, dtypes[5], [h], -1, 1) if d else None,
            sample(r, dtypes[6], [n, h, p, s], -1, 1) if state else None,
        ]

    def case(note, dtypes, sizes, d=True, state=True, **more):
        add(book, "mamba2_scan", note, inputs(rng("mamba2", note), dtypes, *sizes, d, state), [0, 3, 4], **more)

    for d in FLOATS:
        case(d, [d] * 7, (2, 5, 4, 2, 3, 7), views=True)
        case(f"{d} alone", [d] * 7, (1, 3, 1, 1, 4, 4), False, False)
        case(f"{d} no d", [d] * 7, (1, 3, 2, 1, 4, 4), False, True)
    for i in range(7):
        for d in ("f16", "f64"):
            case(f"{d} as {i}", ["f32"] * i + [d] + ["f32"] * (6 - i), (1, 3, 2, 1, 4, 2))
    case("large", ["f32"] * 7, (2, 21, 4, 2, 17, 33))
    for note, sizes in (("of no time", (2, 0, 2, 1, 3, 4)), ("of nothing", (0, 3, 2, 1, 3, 4)), ("no columns", (1, 3, 2, 1, 4, 0)), ("no rows", (1, 3, 2, 1, 0, 4))):
        case(note, ["f32"] * 7, sizes)
    case("no columns, no d", ["f32"] * 7, (1, 3, 2, 1, 4, 0), False)
    case("rows", ["f32"] * 7, (3, 4, 2, 1, 3, 5), rows=[0, 1, 3, 4, 6])
    z = lambda *s: T("f32", np.zeros(s))
    good = [z(1, 3, 4, 5), z(1, 3, 4), z(4), z(1, 3, 2, 6), z(1, 3, 2, 6), z(4), z(1, 4, 5, 6)]
    for i, wrong in enumerate((z(1, 2, 4, 5), z(1, 3, 2), z(2), z(1, 3, 3, 6), z(1, 3, 1, 6), z(2), z(1, 4, 6, 5))):
        book.one("mamba2_scan", f"wrong {i}", good[:i] + [wrong] + good[i + 1 :], None, fails="verify")
    book.one("mamba2_scan", "integers", [T("i32", np.zeros([1, 3, 4, 5]))] + good[1:], None, fails="verify")


def fill(books):
    book = books["recurrent"] = Book("recurrent")
    deltas(book)
    mambas(book)
