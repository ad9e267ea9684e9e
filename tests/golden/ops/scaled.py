"""Cases of products with weights that have a scale for each rectangle of them."""

import numpy as np

from blocks import TYPES, block
from common import INTS, Book, T, rng, sample

DTYPES = ("f32", "f16", "bf16", "f8_e4m3")
# Block types, which have scales of whole rows: those with many cases, and all others.
BLOCKS = ("q4_k", "nvfp4")
OTHERS = tuple(d for d in TYPES if d not in BLOCKS + DTYPES)


def weights(r, dtype, shape):
    """A tensor of weights and their values."""
    if dtype in BLOCKS + OTHERS:
        w, values = block(r, dtype, int(np.prod(shape[:-1])), shape[-1])
        return T(dtype, None, shape, w.raw), values.reshape(shape)
    if dtype != "f8_e4m3":
        w = sample(r, dtype, shape)
        return w, w.up
    count = int(np.prod(shape))
    flat, values = block(r, dtype, 1, -(-count // 32) * 32)
    return T(dtype, None, shape, flat.raw[:count]), values.reshape(-1)[:count].reshape(shape)


def scales(r, shape, height, width):
    *before, n, k = shape
    return sample(r, "f32", before + [-(-n // height), -(-k // width)], -2, 2)


def whole(s, shape, height, width):
    """A scale for each weight."""
    *_, n, k = shape
    return np.repeat(np.repeat(s.up, min(height, max(n, 1)), -2), min(width, max(k, 1)), -1)[..., :n, :k]


def products(book):
    def add(note, dtype, m, n, k, height, width, rows=None, views=False):
        x = sample(rng("scaled", note), "f32", [m, k])
        w, values = weights(rng("scaled", note, 2), dtype, [n, k])
        s = scales(rng("scaled", note, 3), [n, k], height, width)
        out = T("f32", x.up @ (values * whole(s, [n, k], height, width)).T)
        book.one("mul_mat_scaled", note, [x, w, s], out, rows=rows, height=height, width=width)
        if views:
            book.views("mul_mat_scaled", f"views {note}", [x, w, s], out, height=height, width=width)

    for d in DTYPES:
        for height, width in ((16, 32), (5, 7), (1, 70), (1, 64), (1 << 31, 1 << 31), (20, 1)):
            add(f"{d} {height} {width}", d, 5, 37, 70, height, width, views=d == "f32" and height == 16)
        add(f"{d} one row", d, 1, 37, 70, 64, 64)
        add(f"{d} whole rectangles", d, 3, 32, 128, 16, 64)
        add(f"{d} rows", d, 9, 40, 96, 16, 32, rows=[0])
        add(f"{d} many rows", d, 70, 40, 96, 16, 32)
        add(f"{d} empty", d, 0, 40, 96, 16, 32)
        add(f"{d} no outputs", d, 3, 0, 96, 16, 32)
        add(f"{d} nothing to sum", d, 3, 40, 0, 16, 32)
    add("large", "f8_e4m3", 5, 150, 270, 128, 128)
    for d in BLOCKS:
        for height, width in ((1 << 31, 1 << 31), (1, 256), (5, 1 << 31)):
            add(f"{d} {height}", d, 5, 37, 256, height, width)
        add(f"{d} one row", d, 1, 37, 512, 1 << 31, 512)
        add(f"{d} rows", d, 9, 40, 256, 1 << 31, 256, rows=[0])
        add(f"{d} many rows", d, 40, 20, 256, 1 << 31, 256)
    for d in OTHERS:
        add(f"{d} of whole rows", d, 5, 7, 256, 1 << 31, 256)
    add("blocks without outputs", "nvfp4", 3, 0, 64, 1, 64)
    add("blocks of nothing", "nvfp4", 3, 40, 0, 1, 64)
    x, s = T("f32", np.zeros([3, 64])), T("f32", np.zeros([3, 2]))
    for note, w, s in (
        ("another dtype", T("f64", np.zeros([10, 64])), s),
        ("blocks", block(rng("scaled", "blocks"), "q8_0", 10, 64)[0], s),
        ("too few scales", T("f32", np.zeros([10, 64])), T("f32", np.zeros([2, 2]))),
        ("scales of f16", T("f32", np.zeros([10, 64])), T("f16", np.zeros([3, 2]))),
    ):
        book.one("mul_mat_scaled", note, [x, w, s], None, fails="verify", height=4, width=32)


def experts(book):
    def add(note, dtype, ids, u, n, k, height, width, count=4, rows=None, views=False):
        t, used = ids.shape
        x = sample(rng("scaled id", note), "f32", [t, u, k])
        w, values = weights(rng("scaled id", note, 2), dtype, [count, n, k])
        s = scales(rng("scaled id", note, 3), [count, n, k], height, width)
        values = values * whole(s, [count, n, k], height, width)
        out = np.zeros([t, used, n])
        for i, j in np.ndindex(t, used):
            out[i, j] = values[int(ids.a[i, j])] @ x.up[i, j % u]
        book.one("mul_mat_id_scaled", note, [w, x, ids, s], T("f32", out), rows=rows, height=height, width=width)
        if views:
            book.views("mul_mat_id_scaled", f"views {note}", [w, x, ids, s], T("f32", out), height=height, width=width)

    for d in DTYPES:
        ids = sample(rng("scaled id", d), "i32", [6, 2], 0, 4)
        for u in (1, 2):
            for height, width in ((16, 32), (5, 7), (1, 50), (1 << 31, 32)):
                add(f"{d} of {u} {height} {width}", d, ids, u, 21, 50, height, width, views=d == "f32" and height == 16)
        add(f"{d} rows", d, ids, 1, 20, 64, 16, 32, rows=[1, 2])
        add(f"{d} many", d, sample(rng("scaled id", d, 2), "i64", [60, 3], -4, 4), 1, 20, 64, 16, 32)
    for d in INTS:
        add(f"ids {d}", "f8_e4m3", sample(rng("scaled id", "ids", d), d, [3, 3], 0, 4), 1, 20, 64, 16, 32)
    add("large", "f8_e4m3", ids, 1, 40, 270, 16, 128)
    for d in BLOCKS:
        ids = sample(rng("scaled id", d), "i32", [6, 2], 0, 4)
        for u in (1, 2):
            for height in (1 << 31, 5):
                add(f"{d} of {u} {height}", d, ids, u, 21, 256, height, 256)
        add(f"{d} rows", d, ids, 1, 20, 256, 1 << 31, 256, rows=[1, 2])
        add(f"{d} many", d, sample(rng("scaled id", d, 2), "i64", [30, 3], -4, 4), 1, 20, 256, 1 << 31, 256)
    for d in OTHERS:
        add(f"{d} of whole rows", d, T("i32", np.array([[1, 0], [0, 1], [1, 1]])), 1, 7, 256, 1 << 31, 256, count=2)
    add("empty", "f8_e4m3", T("i32", np.zeros([0, 2])), 1, 20, 64, 16, 32)
    x, s = T("f32", np.zeros([3, 1, 64])), T("f32", np.zeros([4, 2, 2]))
    w, _ = weights(rng("scaled id", "outside"), "f8_e4m3", [4, 20, 64])
    book.one("mul_mat_id_scaled", "expert outside", [w, x, T("i32", np.full([3, 2], 4)), s], None, fails="run", height=16, width=32)
    book.one("mul_mat_id_scaled", "too few scales", [w, x, T("i32", np.zeros([3, 2])), T("f32", np.zeros([3, 2, 2]))], None, fails="verify", height=16, width=32)


def fill(books):
    books["scaled"] = Book("scaled")
    products(books["scaled"])
    experts(books["scaled"])
