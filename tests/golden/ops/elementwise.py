"""Cases of unary, binary, activation and create rows."""

import numpy as np
from scipy import special

from common import (
    FLOATS,
    INTS,
    NUMPY,
    PLAIN,
    REALS,
    SIGNED,
    UNSIGNED,
    Book,
    T,
    corners,
    floating,
    pairs,
    promote,
    promote_all,
    rng,
    sample,
)

SHAPES = {"odd": [3, 5, 7], "one axis": [17], "empty": [0], "empty inside": [2, 0, 3], "scalar": [], "ones": [1, 1, 1, 1]}


def odd(dtype):
    """A shape of odd sizes; smaller for all but the dtype that is met most."""
    return [3, 5, 7] if dtype == "f32" else [3, 7]


def sigmoid(x):
    return special.expit(x)


def silu(x):
    with np.errstate(all="ignore"):
        return np.where(x == -np.inf, np.nan, x * sigmoid(x))


KEEP = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": lambda x: np.where(np.isnan(x), np.nan, np.where(x == 0, x, np.sign(x))),
    "square": lambda x: x * x,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
}
# name: function in float64, range that random values are from, values worth a look
FLOATING = {
    "sqrt": (np.sqrt, (0, 9), [4.0, 2.0, 1e-3]),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (0.01, 9), [4.0, 1e-3]),
    "reciprocal": (lambda x: 1 / x, (0.1, 9), [3.0, -3.0]),
    "exp": (np.exp, (-9, 9), [-1e-3, 10.0, -10.0]),
    "expm1": (np.expm1, (-5, 5), [1e-3, -1e-3, 1e-4]),
    "log": (np.log, (0.01, 9), [1.0, 1.0078125, 0.9921875, 1e-3]),
    "log1p": (np.log1p, (-0.9, 9), [1e-3, -1e-3, 1e-4, -1.0]),
    "log2": (np.log2, (0.01, 9), [8.0, 1.0078125, 0.125]),
    "sin": (np.sin, (-9, 9), [3.140625, 1e-3, 1000.5]),
    "cos": (np.cos, (-9, 9), [1.5703125, 1e-3, 1000.5]),
    "tan": (np.tan, (-1.4, 1.4), [1e-3, 3.0]),
    "asin": (np.arcsin, (-1, 1), [1e-3, 0.99]),
    "acos": (np.arccos, (-1, 1), [1e-3, 0.99]),
    "atan": (np.arctan, (-9, 9), [1e-3, 1e4]),
    "sinh": (np.sinh, (-5, 5), [1e-3, 1e-4]),
    "cosh": (np.cosh, (-5, 5), [1e-3]),
    "tanh": (np.tanh, (-5, 5), [1e-3, 1e-4, 20.0]),
    "asinh": (np.arcsinh, (-9, 9), [1e-3, -1e-3, 1e4, -1e4]),
    "acosh": (np.arccosh, (1, 9), [1.0078125, 1e4]),
    "atanh": (np.arctanh, (-0.95, 0.95), [1e-3, 1e-4]),
    "erf": (special.erf, (-3, 3), [1e-3, 1e-4, 6.0]),
    "erfinv": (special.erfinv, (-0.95, 0.95), [1e-3, 0.9921875]),
    "sigmoid": (sigmoid, (-9, 9), [-20.0, -10.0]),
    "silu": (silu, (-9, 9), [-20.0, 1e-3]),
}
# Corners at which these are defined; the largest finite numbers are left out where a result would be at the edge of overflow.
AT_EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, np.inf, -np.inf, np.nan]


def same_rows(t):
    return [0] if len(t.shape) > 1 and t.shape[0] > 1 else None


def unary(book):
    with np.errstate(all="ignore"):
        for op, f in KEEP.items():
            ints = f if op in ("neg", "abs", "sign", "square") else (lambda x: x)
            for dtype in REALS:
                g = ints if dtype in INTS else f
                x = T(dtype, corners(dtype))
                book.one(op, f"corners {dtype}", [x], T(dtype, g(x.up)), "exact" if op != "square" or dtype in INTS else "each")
                x = sample(rng(dtype), dtype, odd(dtype))
                out = T(dtype, g(x.up))
                check = "each" if op == "square" and dtype in FLOATS else "exact"
                book.one(op, f"odd {dtype}", [x], out, check)
                if dtype in ("f32", "f16", "i32"):
                    book.one(op, f"rows {dtype}", [x], out, check, rows=[0])
                    book.views(op, f"views {dtype}", [x], out, check)
            for name, shape in SHAPES.items():
                x = sample(rng(op, name), "f32", shape)
                book.one(op, name, [x], T("f32", f(x.up)), "each")
            x = sample(rng(op, "large"), "f32", [331])
            book.large(op, "large", [x], lambda t: T("f32", f(t[0].up)), [200], "each")
            book.one(op, "bool", [T("bool", [True])], None, fails="verify")
        for op, c in {"neg": np.negative, "square": lambda x: x * x, "abs": np.abs, "reciprocal": lambda x: 1 / x}.items():
            x = T("c64", [v for v in corners("c64") if v != 0 or op != "reciprocal"])
            book.one(op, "corners c64", [x], T("f32" if op == "abs" else "c64", c(x.up)))
            x = sample(rng(op, "c64"), "c64", [3, 5])
            book.one(op, "odd c64", [x], T("f32" if op == "abs" else "c64", c(x.up)))
            book.views(op, "views c64", [x], T("f32" if op == "abs" else "c64", c(x.up)))
        for op, (f, (low, high), special_values) in FLOATING.items():
            for dtype in FLOATS + INTS + ["bool"]:
                to = floating(dtype)
                x = sample(rng(dtype, low), dtype, odd(dtype), low, high)
                out = T(to, f(x.to(to).up))
                book.one(op, f"odd {dtype}", [x], out, "each")
                if dtype in FLOATS:
                    x = T(dtype, special_values + AT_EDGES)
                    book.one(op, f"corners {dtype}", [x], T(dtype, f(x.up)), "each")
                if dtype in ("f32", "bf16", "u8"):
                    x = sample(rng(op, dtype, 2), dtype, [4, 9], low, high)
                    out = T(to, f(x.to(to).up))
                    book.one(op, f"rows {dtype}", [x], out, "each", rows=[0])
                    book.views(op, f"views {dtype}", [x], out, "each")
            for name, shape in SHAPES.items():
                x = sample(rng(op, name), "f32", shape, low, high)
                book.one(op, name, [x], T("f32", f(x.up)), "each")
            x = sample(rng(op, "large"), "f32", [331], low, high)
            book.large(op, "large", [x], lambda t: T("f32", f(t[0].up)), [200], "each")
            if op != "reciprocal":
                book.one(op, "c64", [T("c64", [1j])], None, fails="verify")
        for op, f, i in (
            ("logical_not", lambda x: x == 0, lambda x: x == 0),
            ("is_nan", np.isnan, lambda x: np.zeros(x.shape, bool)),
            ("is_inf", np.isinf, lambda x: np.zeros(x.shape, bool)),
            ("is_finite", np.isfinite, lambda x: np.ones(x.shape, bool)),
        ):
            for dtype in REALS + ["bool"]:
                x = T(dtype, corners(dtype))
                out = T("bool", (f if dtype in FLOATS else i)(x.a))
                book.one(op, f"corners {dtype}", [x], out)
            for name, shape in SHAPES.items():
                x = sample(rng(op, name), "f32", shape)
                book.one(op, name, [x], T("bool", f(x.up)))
            x = T("f32", np.resize(corners("f32"), [7, 9]))
            book.one(op, "rows", [x], T("bool", f(x.up)), rows=[0])
            book.views(op, "views", [x], T("bool", f(x.up)))
            x = T("f16", np.resize(corners("f16"), [331]))
            book.large(op, "large f16", [x], lambda t: T("bool", f(t[0].a)), [200])
        for dtype in INTS + ["bool"]:
            x = T(dtype, corners(dtype))
            book.one("bitwise_not", f"corners {dtype}", [x], T(dtype, ~x.a))
        for name, shape in SHAPES.items():
            x = sample(rng("bitwise_not", name), "i32", shape, -999, 999)
            book.one("bitwise_not", name, [x], T("i32", ~x.a))
        x = sample(rng("bitwise_not"), "u16", [4, 9], 0, 999)
        book.one("bitwise_not", "rows", [x], T("u16", ~x.a), rows=[0])
        book.views("bitwise_not", "views", [x], T("u16", ~x.a))
        x = sample(rng("bitwise_not", "large"), "u8", [331], 0, 255)
        book.large("bitwise_not", "large", [x], lambda t: T("u8", ~t[0].a), [200])
        book.one("bitwise_not", "f32", [T("f32", [1.0])], None, fails="verify")
    casts(book)


def casts(book):
    halfway = [1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 2.0**-25, 2.0**-24 * 1.5, 65519.0, 65520.0, 1e-45]
    # In float32 this lies halfway between two f16 (two bf16); in float64 just above.
    halfway += [1.0 + 2.0**-11 + 2.0**-40, 1.0 + 2.0**-8 + 2.0**-40, 127.5, 128.0, -128.9, 255.9, 256.0, 2147483648.0, -2147483649.0, 1e19, -1e19]
    for source in PLAIN:
        values = corners(source)
        if source in FLOATS:
            values = values + halfway
        if source == "c64":
            values = values + [0.5j, 300 - 2j, complex(np.nan, 0), complex(-np.inf, 1)]
        x = T(source, values)
        for to in PLAIN:
            book.one("cast", f"{source} to {to}", [x], x.to(to), "exact", dtype=to)
    for name, shape in SHAPES.items():
        x = sample(rng("cast", name), "f32", shape, -300, 300)
        book.one("cast", name, [x], x.to("i8"), "exact", dtype="i8")
    x = sample(rng("cast"), "f64", [4, 9], -300, 300)
    for to in ("f16", "i16", "bool", "f64"):
        book.one("cast", f"rows {to}", [x], x.to(to), "exact", rows=[0], dtype=to)
        book.views("cast", f"views {to}", [x], x.to(to), "exact", dtype=to)
    x = sample(rng("cast", "large"), "f32", [331])
    for to in ("f16", "bf16", "f64", "i32"):
        book.large("cast", f"large {to}", [x], lambda t: t[0].to(to), [200], "exact", dtype=to)
    from blocks import TYPES, block

    for dtype in TYPES:
        t, values = block(rng("cast", dtype), dtype, 1, 256)
        for to in FLOATS:
            book.one("cast", f"{dtype} to {to}", [t], T(to, values), "exact", dtype=to)
        book.one("cast", f"{dtype} to i32", [t], None, fails="verify", dtype="i32")
    encoded(book)


def encoded(book):
    """Floats as the block types that `gguf` encodes; the bytes are what it writes."""
    from blocks import ENCODED, TYPES
    from gguf import quants

    for dtype in ENCODED:
        qtype, length, _ = TYPES[dtype]

        def to(t):
            raw = quants.quantize(np.ascontiguousarray(t.a.astype(np.float32)), qtype)
            return T(dtype, None, list(t.shape), raw.tobytes())

        for source in FLOATS:
            x = sample(rng("encoded", dtype, source), source, [3, 2 * length], -2, 2)
            book.one("cast", f"{source} to {dtype}", [x], to(x), "exact", dtype=dtype)
        x = sample(rng("encoded rows", dtype), "f32", [5, length], -2, 2)
        book.one("cast", f"rows {dtype}", [x], to(x), "exact", rows=[0], dtype=dtype)
        book.one("cast", f"{dtype} of a part", [T("f32", np.zeros([2, length + 1]))], None, fails="verify", dtype=dtype)
    book.one("cast", "f32 to q4_k", [T("f32", np.zeros([2, 256]))], None, fails="verify", dtype="q4_k")


def wrap_pow(a, b):
    bits = a.dtype.itemsize * 8
    out = []
    for x, y in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist()):
        v = 0 if y < 0 else pow(x, y, 1 << bits)
        out.append(v - (1 << bits) if a.dtype.kind == "i" and v >> (bits - 1) else v)
    return np.array(out, dtype=a.dtype).reshape(a.shape)


def int_floor_divide(a, b):
    out = []
    bits = a.dtype.itemsize * 8
    for x, y in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist()):
        v = (0 if y == 0 else x // y) % (1 << bits)
        out.append(v - (1 << bits) if a.dtype.kind == "i" and v >> (bits - 1) else v)
    return np.array(out, dtype=a.dtype).reshape(a.shape)


def int_remainder(a, b):
    out = [0 if y == 0 else x % y for x, y in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist())]
    return np.array(out, dtype=a.dtype).reshape(a.shape)


def maximum(a, b):
    return np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a > b, a, b))


def minimum(a, b):
    return np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a < b, a, b))


def float_remainder(a, b):
    r = np.fmod(a, b)
    return np.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


def float_floor_divide(a, b):
    return np.floor(a / b)


def shift(a, b, left):
    """One integer array shifted by another, both of one dtype."""
    bits, out = a.dtype.itemsize * 8, []
    for x, y in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist()):
        if 0 <= y < bits:
            v = x << y if left else x >> y
        else:
            v = 0 if left or x >= 0 else -1
        v %= 1 << bits
        out.append(v - (1 << bits) if a.dtype.kind == "i" and v >> (bits - 1) else v)
    return np.array(out, dtype=a.dtype).reshape(a.shape)


def both(a, b):
    """Broadcast values of two tensors in their common dtype."""
    dtype = promote(a.dtype, b.dtype)
    x, y = np.broadcast_arrays(a.to(dtype).a, b.to(dtype).a)
    return dtype, np.array(x), np.array(y)


def wide(dtype, x):
    return x.astype(np.complex128) if dtype == "c64" else x.astype(np.float64)


ARITHMETIC = {
    "add": (np.add, np.add),
    "sub": (np.subtract, np.subtract),
    "mul": (np.multiply, np.multiply),
    "maximum": (np.maximum, maximum),
    "minimum": (np.minimum, minimum),
    "floor_divide": (int_floor_divide, float_floor_divide),
    "remainder": (int_remainder, float_remainder),
    "pow": (wrap_pow, np.power),
}
FLOAT_BINARY = {"div": np.divide, "atan2": np.arctan2, "logaddexp": np.logaddexp}
COMPARE = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
LOGICAL = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}
BITWISE = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}
SHIFTS = {"left_shift": lambda a, b: shift(a, b, True), "right_shift": lambda a, b: shift(a, b, False)}

BROADCASTS = {
    "scalar left": ([], [3, 5]),
    "scalar right": ([3, 5], []),
    "both scalars": ([], []),
    "row": ([4, 7], [7]),
    "column": ([4, 7], [4, 1]),
    "both ways": ([4, 1, 3], [1, 5, 1]),
    "middle axis": ([2, 1, 3], [2, 4, 3]),
    "middle of five": ([2, 3, 1, 2, 3], [3, 4, 1, 3]),
    "one to many": ([1], [2, 3, 4]),
    "eight axes": ([2, 1, 2, 1, 2, 1, 2, 1], [1, 2, 1, 2, 1, 2, 1, 2]),
    "empty": ([0], [0]),
    "empty by broadcast": ([0, 3], [1, 3]),
    "one with empty": ([1], [2, 0]),
    "long rows": ([5, 67], [67]),
}
MIXED = [
    ("u8", "i8"), ("u8", "i16"), ("u16", "i8"), ("u32", "i32"), ("u32", "i8"), ("u64", "i8"), ("u8", "u32"), ("i8", "i64"),
    ("i32", "f16"), ("u8", "bf16"), ("f16", "bf16"), ("f16", "f32"), ("f32", "f64"), ("i64", "f32"), ("bf16", "f64"),
]  # fmt: skip


def compute_arithmetic(op):
    ints, floats = ARITHMETIC[op]

    def compute(a, b):
        dtype, x, y = both(a, b)
        if dtype == "bool":
            return T("bool", (x | y) if op == "maximum" else (x & y))
        if dtype in INTS:
            return T(dtype, ints(x, y))
        if op == "floor_divide" and dtype != "f64":
            x32, y32 = x.astype(np.float32), y.astype(np.float32)
            return T(dtype, np.floor(x32 / y32).astype(np.float64))
        return T(dtype, floats(wide(dtype, x), wide(dtype, y)))

    return compute


def compute_float(f):
    def compute(a, b):
        dtype = promote(a.dtype, b.dtype)
        dtype = dtype if dtype == "c64" else floating(dtype)
        x, y = np.broadcast_arrays(a.to(dtype).up, b.to(dtype).up)
        return T(dtype, f(x, y))

    return compute


def compute_to_bool(f):
    def compute(a, b):
        _, x, y = both(a, b)
        return T("bool", f(x, y))

    return compute


def compute_logical(f):
    return lambda a, b: T("bool", f(*np.broadcast_arrays(a.a != 0, b.a != 0)))


def compute_ints(f):
    def compute(a, b):
        dtype, x, y = both(a, b)
        return T(dtype, f(x, y))

    return compute


def binary_op(book, op, compute, dtypes, main, check, mixed, corner_check=None, low=-4.0, high=4.0):
    """All classes of cases of one binary op. `check` says by dtype how results are compared."""
    for dtype in dtypes:
        a, b = pairs(dtype)
        book.one(op, f"corners {dtype}", [a, b], compute(a, b), (corner_check or check)(dtype))
        a, b = (sample(rng(dtype, low, i), dtype, odd(dtype), low, high) for i in range(2))
        book.one(op, f"odd {dtype}", [a, b], compute(a, b), check(dtype))
        a, b = (sample(rng(dtype, low, i), dtype, s, low, high) for i, s in enumerate(([4, 1, 3], [5, 1])))
        book.one(op, f"broadcast {dtype}", [a, b], compute(a, b), check(dtype))
    for dtype in main:
        for name, (s, t) in BROADCASTS.items():
            a, b = sample(rng(name, low, 1), dtype, s, low, high), sample(rng(name, low, 2), dtype, t, low, high)
            book.one(op, f"{name} {dtype}", [a, b], compute(a, b), check(dtype))
            if name in ("both ways", "middle axis", "column", "empty by broadcast"):
                book.views(op, f"views {name} {dtype}", [a, b], compute(a, b), check(dtype))
        a, b = (sample(rng(op, "rows", i), dtype, [5, 6], low, high) for i in range(2))
        book.one(op, f"rows {dtype}", [a, b], compute(a, b), check(dtype), rows=[0, 1])
        b = T(dtype, b.a[:1])
        book.one(op, f"rows by one {dtype}", [a, b], compute(a, b), check(dtype), rows=[0])
        book.one(op, f"one by rows {dtype}", [b, a], compute(b, a), check(dtype), rows=[1])
        a, b = (sample(rng(op, "large", i), dtype, [s], low, high) for i, s in enumerate((331, 200)))
        book.large(op, f"large {dtype}", [a, b], lambda t: compute(*t), [200, 331], check(dtype))
    for d, e in mixed:
        for d, e in ((d, e), (e, d)):
            a, b = sample(rng(op, d, 1), d, [2, 5], low, high), sample(rng(op, e, 2), e, [5], low, high)
            book.one(op, f"{d} with {e}", [a, b], compute(a, b), check(promote(d, e)))
    x, y = T(main[0], np.zeros(3)), T(main[0], np.zeros(4))
    book.one(op, "shapes that do not broadcast", [x, y], None, fails="verify")


def binary(book):
    exact = lambda dtype: "exact"
    each = lambda dtype: "exact" if dtype in INTS + ["bool"] else None if dtype == "c64" else "each"
    with np.errstate(all="ignore"):
        for op in ARITHMETIC:
            compute = compute_arithmetic(op)
            select = op in ("maximum", "minimum")
            kind = exact if select else each
            dtypes = REALS + (["bool"] if select else ["c64"] if op in ("add", "sub", "mul") else [])
            low = 0.25 if op == "pow" else -4.0
            dtypes_no_c = [d for d in dtypes if d != "c64"]
            binary_op(book, op, compute, dtypes_no_c, ["f32", "i32"], kind, MIXED, low=low)
            if "c64" in dtypes:
                a, b = pairs("c64")
                book.one(op, "corners c64", [a, b], compute(a, b))
                a, b = (sample(rng(op, "c64", i), "c64", s) for i, s in enumerate(([4, 1, 3], [5, 1])))
                book.one(op, "broadcast c64", [a, b], compute(a, b))
                book.views(op, "views c64", [a, b], compute(a, b))
                for d in ("f32", "i8", "f64", "bool"):
                    a, b = sample(rng(op, "c", d), "c64", [2, 5]), sample(rng(op, d), d, [5])
                    book.one(op, f"c64 with {d}", [a, b], compute(a, b))
            else:
                book.one(op, "c64", [T("c64", [1j]), T("c64", [1j])], None, fails="verify")
            if not select:
                book.one(op, "bools", [T("bool", [True]), T("bool", [True])], None, fails="verify")
        # Every pair of dtypes, once.
        for d in PLAIN:
            for e in PLAIN:
                if (d, e) != ("bool", "bool"):
                    a, b = sample(rng("promote", d), d, [5], 0, 9), sample(rng("promote", e, 2), e, [5], 0, 9)
                    book.one("add", f"promote {d} and {e}", [a, b], compute_arithmetic("add")(a, b), each(promote(d, e)))
        compute = compute_arithmetic("pow")
        a = T("f32", [2, 2, -2, -2, -2, 0, 0, 0, 10, 1.5, -0.0, -0.0])
        b = T("f32", [3, -2, 3, 2, 0.5, 0, 2, -1, -3, 10, 3, -3])
        book.one("pow", "chosen", [a, b], compute(a, b), "each")
        for op, f in FLOAT_BINARY.items():
            compute = compute_float(f)
            binary_op(book, op, compute, FLOATS, ["f32"], lambda d: "each", MIXED)
            for dtype in INTS + ["bool"]:
                a, b = (sample(rng(op, dtype, i), dtype, [3, 5]) for i in range(2))
                if op == "div" and dtype in INTS:
                    a, b = (T(dtype, v.a.reshape(-1)[:49]) for v in pairs(dtype))
                book.one(op, f"ints {dtype}", [a, b], compute(a, b), "each")
        compute = compute_float(np.divide)
        a, b = (sample(rng("div", "c64", i), "c64", [3, 5], 0.5, 4) for i in range(2))
        book.one("div", "odd c64", [a, b], compute(a, b))
        book.one("div", "c64 with f16", [a, b.to("f32").to("f16")], compute(a, b.to("f32").to("f16")))
        for op, f in COMPARE.items():
            binary_op(book, op, compute_to_bool(f), REALS + ["bool"], ["f32", "u8"], exact, MIXED)
            a, b = pairs("c64")
            if "equal" == op or op == "not_equal":
                book.one(op, "corners c64", [a, b], compute_to_bool(f)(a, b))
            else:
                book.one(op, "c64", [a, b], None, fails="verify")
        # A bool beside a number is a number.
        for op in ("sub", "mul", "floor_divide", "remainder", "pow"):
            compute = compute_arithmetic(op)
            for d in ("f32", "i32"):
                flags = sample(rng(op, "flags", d), "bool", [3, 5])
                x = sample(rng(op, "beside flags", d), d, [3, 5], 0.25 if op == "pow" else -4.0)
                for a, b in ((flags, x), (x, flags)):
                    book.one(op, f"{a.dtype} beside {b.dtype}", [a, b], compute(a, b), each(d))
        for op, f in LOGICAL.items():
            binary_op(book, op, compute_logical(f), REALS + ["bool"], ["bool", "f32"], exact, MIXED)
        for op, f in BITWISE.items():
            ints = [m for m in MIXED if promote(*m) in INTS]
            binary_op(book, op, compute_ints(f), INTS + ["bool"], ["i32", "u8"], exact, ints, low=-999, high=999)
            book.one(op, "floats", [T("f32", [1.0]), T("f32", [1.0])], None, fails="verify")
        for op, f in SHIFTS.items():
            ints = [m for m in MIXED if promote(*m) in INTS]
            binary_op(book, op, compute_ints(f), INTS, ["i32", "u8"], exact, ints, low=-9, high=99)
            book.one(op, "floats", [T("f32", [1.0]), T("f32", [1.0])], None, fails="verify")
    where(book)


def where(book):
    def compute(c, a, b):
        dtype = promote(a.dtype, b.dtype)
        return T(dtype, np.where(c.a, a.to(dtype).a, b.to(dtype).a))

    shapes = {
        "odd": ([3, 5, 7],) * 3,
        "scalars": ([], [], []),
        "scalar condition": ([], [3, 5], [3, 5]),
        "all three": ([4, 1, 1], [1, 3, 1], [1, 1, 5]),
        "lower ranks": ([2, 3, 4], [4], [3, 1]),
        "empty": ([0, 3], [1, 3], []),
    }
    for name, (s, t, u) in shapes.items():
        for d in ("f32", "u8"):
            c, a, b = sample(rng(name, 1), "bool", s), sample(rng(name, 2), d, t), sample(rng(name, 3), d, u)
            book.one("where", f"{name} {d}", [c, a, b], compute(c, a, b), "exact")
            book.views("where", f"views {name} {d}", [c, a, b], compute(c, a, b), "exact")
    for d in PLAIN:
        c = sample(rng("where", d), "bool", [3, 1])
        a, b = T(d, corners(d)), T(d, corners(d)[::-1])
        book.one("where", f"corners {d}", [c, a, b], compute(c, a, b), "exact")
    for d, e in MIXED + [("bool", "f16"), ("c64", "f32")]:
        c, a, b = sample(rng(d), "bool", [2, 5]), sample(rng(d, 1), d, [5]), sample(rng(e, 2), e, [2, 1])
        book.one("where", f"{d} or {e}", [c, a, b], compute(c, a, b), "exact")
    c, a, b = sample(rng("r"), "bool", [5, 1]), sample(rng("r", 1), "f32", [5, 4]), sample(rng("r", 2), "f32", [4])
    book.one("where", "rows", [c, a, b], compute(c, a, b), "exact", rows=[0, 1])
    c, a, b = sample(rng("l"), "bool", [331]), sample(rng("l", 1), "f32", [200]), sample(rng("l", 2), "f32", [331])
    book.large("where", "large", [c, a, b], lambda t: compute(*t), [200, 331, 200], "exact")
    book.one("where", "condition of i32", [T("i32", [1]), a, a], None, fails="verify")


def create(book):
    for d in PLAIN:
        t = T(d, corners(d))
        book.one("literal", f"corners {d}", [], t, "exact", dtype=d, shape=t.shape, data=t.bytes())
        t = sample(rng("literal", d), d, [2, 3, 5])
        book.one("literal", f"odd {d}", [], t, "exact", dtype=d, shape=t.shape, data=t.bytes())
        for name, shape in (("scalar", []), ("empty", [0, 3])):
            t = sample(rng("literal", d, name), d, shape)
            book.one("literal", f"{name} {d}", [], t, "exact", dtype=d, shape=shape, data=t.bytes())
    t = sample(rng("literal", "large"), "u8", [4093], 0, 255)
    book.one("literal", "large", [], t, "exact", dtype="u8", shape=t.shape, data=t.bytes())
    a = T("f32", [1.0, 2.0])
    nodes = [("literal", [], {"dtype": "f32", "shape": [3, 1], "data": T("f32", [1, 2, 3]).bytes()}), ("mul", [[0, 0], 0], {})]
    book.graph("literal", "used by another op", [a], nodes, [[1, 0]], [T("f32", [[1, 2], [2, 4], [3, 6]])], "exact")
    book.one("literal", "too few bytes", [], None, fails="verify", dtype="f32", shape=[2], data=b"1234567")
    book.one("literal", "a block type", [], None, fails="verify", dtype="q8_0", shape=[32], data=bytes(34))

    def arange(start, step, length, dtype):
        return T("f64", start + np.arange(length, dtype=np.float64) * step).to(dtype)

    for d in REALS:
        for start, step, n in ((0, 1, 7), (3, 2, 5), (100, -30, 9), (0.5, 0.25, 11), (-2.75, 0.5, 13), (0, 1, 0), (5, 0, 3), (250, 3, 5)):
            book.one("arange", f"{start} by {step} {d}", [], arange(start, step, n, d), "exact", start=start, step=step, length=n, dtype=d)
    big = arange(-7, 3, 60013, "i64")
    nodes = [("arange", [], {"start": -7, "step": 3, "length": 60013, "dtype": "i64"})]
    nodes.append(("slice", [[0, 0]], {"starts": [0], "stops": [60013], "steps": [997]}))
    book.graph("arange", "large", [], nodes, [[1, 0]], [T("i64", big.a[::997])], "exact")
    book.one("arange", "large numbers", [], arange(1e300, -1e299, 5, "f64"), "exact", start=1e300, step=-1e299, length=5, dtype="f64")
    book.one("arange", "saturates", [], arange(1e10, 1e10, 3, "i32"), "exact", start=1e10, step=1e10, length=3, dtype="i32")
    for d in ("bool", "c64", "q4_0"):
        book.one("arange", d, [], None, fails="verify", start=0, step=1, length=3, dtype=d)


def gelu(x):
    return np.where(np.isinf(x), np.where(x > 0, x, np.nan), x * special.ndtr(x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": lambda x: x * sigmoid(1.702 * x),
    "softplus": lambda x: np.logaddexp(x, 0),
}


def activation(book):
    with np.errstate(all="ignore"):
        for d in REALS:
            x = T(d, corners(d))
            relu = lambda t: T(t.dtype, maximum(t.a, np.zeros_like(t.a)) if t.dtype in FLOATS else np.maximum(t.a, 0))
            book.one("relu", f"corners {d}", [x], relu(x), "exact")
        for name, shape in SHAPES.items():
            x = sample(rng("relu", name), "f32", shape)
            book.one("relu", name, [x], relu(x), "exact")
        x = sample(rng("relu"), "f16", [4, 9])
        book.one("relu", "rows", [x], relu(x), "exact", rows=[0])
        book.views("relu", "views", [x], relu(x), "exact")
        x = sample(rng("relu", "large"), "f32", [331])
        book.large("relu", "large", [x], lambda t: relu(t[0]), [200], "exact")
        for op, f in ACTIVATIONS.items():
            for d in FLOATS + ["i32", "u8", "bool"]:
                to = floating(d)
                x = sample(rng(op, d), d, [3, 5, 7], -6, 6)
                book.one(op, f"odd {d}", [x], T(to, f(x.to(to).up)))
                if d in FLOATS:
                    x = T(d, [0.0, -0.0, 1.0, -1.0, 10.0, -10.0, 1e-3, np.nan])
                    book.one(op, f"corners {d}", [x], T(d, f(x.up)))
                    x = T(d, [np.inf])
                    book.one(op, f"infinity {d}", [x], T(d, f(x.up)))
            for name, shape in SHAPES.items():
                x = sample(rng(op, name), "f32", shape)
                book.one(op, name, [x], T("f32", f(x.up)))
            x = sample(rng(op), "bf16", [4, 9])
            book.one(op, "rows", [x], T("bf16", f(x.up)), rows=[0])
            book.views(op, "views", [x], T("bf16", f(x.up)))
            x = sample(rng(op, "large"), "f32", [331], -6, 6)
            book.large(op, "large", [x], lambda t: T("f32", f(t[0].up)), [200])
        gated(book)
        clamp(book)
        close(book)
        whole(book)


def whole(book):
    """Activations of the dtypes that become f32."""
    for d in INTS + ["bool"]:
        x, y = (sample(rng("whole", d, i), d, [3, 5, 7], -6, 6) for i in range(2))
        f32 = x.to("f32").up
        if d not in ("i32", "u8", "bool"):
            for op, f in ACTIVATIONS.items():
                book.one(op, f"odd {d}", [x], T("f32", f(f32)))
        for op, attributes, f in gates():
            if d != "i32":
                book.one(op, f"odd {d}", [x, y], compute_float(f)(x, y), **attributes)


def gates():
    """Gated activations: op, attributes, function of gate and up."""

    def limited(alpha, limit):
        def f(g, u):
            g = minimum(g, np.full_like(g, limit))
            u = np.where(np.isnan(u), u, np.clip(u, -limit, limit))
            return g * sigmoid(alpha * g) * (u + 1)

        return f

    forms = [("swiglu", {}, lambda g, u: silu(g) * u), ("geglu", {}, lambda g, u: gelu_tanh(g) * u)]
    for alpha, limit in ((1.702, 7.0), (1.0, 2.0)):
        forms.append(("swiglu_limit", {"alpha": alpha, "limit": limit}, limited(alpha, limit)))
    return forms


def gated(book):
    for op, attributes, f in gates():
        compute = compute_float(f)
        for d in FLOATS + ["i32"]:
            a, b = (sample(rng(op, d, i), d, [3, 5, 7], -9, 9) for i in range(2))
            book.one(op, f"odd {d}", [a, b], compute(a, b), **attributes)
        for name, shape in SHAPES.items():
            a, b = (sample(rng(op, name, i), "f32", shape) for i in range(2))
            book.one(op, name, [a, b], compute(a, b), **attributes)
        for d, e in (("f16", "bf16"), ("f32", "f16"), ("i32", "f16"), ("f64", "f32")):
            a, b = sample(rng(op, d, 7), d, [2, 5]), sample(rng(op, e, 8), e, [2, 5])
            book.one(op, f"{d} with {e}", [a, b], compute(a, b), **attributes)
        a, b = (sample(rng(op, "rows", i), "f32", [5, 6]) for i in range(2))
        book.one(op, "rows", [a, b], compute(a, b), rows=[0, 1], **attributes)
        book.views(op, "views", [a, b], compute(a, b), **attributes)
        a, b = (sample(rng(op, "large", i), "f32", [s]) for i, s in enumerate((331, 200)))
        book.large(op, "large", [a, b], lambda t: compute(*t), [200, 331], **attributes)
        a, b = T("f32", np.zeros([2, 3])), T("f32", np.zeros([3]))
        book.one(op, "shapes that differ", [a, b], None, fails="verify", **attributes)


def clamp(book):
    def compute(x, low, high):
        y = x.up
        if low is not None:
            y = maximum(*np.broadcast_arrays(y, low.to(x.dtype).up)) if x.dtype in FLOATS else np.maximum(y, low.to(x.dtype).a)
        if high is not None:
            y = minimum(*np.broadcast_arrays(y, high.to(x.dtype).up)) if x.dtype in FLOATS else np.minimum(y, high.to(x.dtype).a)
        return T(x.dtype, y)

    for d in REALS:
        x = T(d, corners(d))
        low, high = T(d, 2), T(d, 5)
        for name, lo, hi in (("both", low, high), ("low", low, None), ("high", None, high)):
            book.one("clamp", f"{name} {d}", [x, lo, hi], compute(x, lo, hi), "exact")
    x, low, high = sample(rng("c"), "f32", [3, 5, 7]), sample(rng("c", 1), "f32", [5, 1], -4, -1), sample(rng("c", 2), "f32", [7], 0, 4)
    book.one("clamp", "broadcast", [x, low, high], compute(x, low, high), "exact")
    book.views("clamp", "views", [x, low, high], compute(x, low, high), "exact")
    book.one("clamp", "rows", [x, low, high], compute(x, low, high), "exact", rows=[0])
    book.one("clamp", "neither", [x, None, None], x, "exact")
    low, high = T("f32", -1.5), T("i64", 2)
    for d in ("f16", "i8", "f64"):
        x = sample(rng("c", d), d, [4, 5])
        book.one("clamp", f"limits of other dtypes {d}", [x, low, high], compute(x, low, high), "exact")
    x, low = sample(rng("c", "large"), "f32", [331]), sample(rng("c", "large", 1), "f32", [331], -4, -1)
    book.large("clamp", "large", [x, low, T("f32", low.up + 4)], lambda t: compute(*t), [200] * 3, "exact")
    x = sample(rng("c", "empty"), "f32", [0, 3])
    book.one("clamp", "empty", [x, T("f32", 0), T("f32", 1)], x, "exact")
    x, low, high = (sample(rng("c", "flags", i), "bool", [3, 5]) for i in range(3))
    book.one("clamp", "bool", [x, low, high], T("bool", (x.a | low.a) & high.a), "exact")
    x = sample(rng("c", "scalar"), "f32", [])
    book.one("clamp", "scalar", [x, T("f32", 0), T("f32", 1)], compute(x, T("f32", 0), T("f32", 1)), "exact")


def close(book):
    def is_close(a, b, rtol, atol, equal_nan):
        dtype = floating(promote(a.dtype, b.dtype))
        x, y = np.broadcast_arrays(a.to(dtype).up, b.to(dtype).up)
        return np.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)

    def add(note, a, b, rtol, atol, equal_nan, rows=None):
        attributes = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
        out = is_close(a, b, **attributes)
        book.one("is_close", note, [a, b], T("bool", out), rows=rows, **attributes)
        book.one("all_close", note, [a, b], T("bool", out.all()), rows=rows, **attributes)

    for d in FLOATS:
        for equal_nan in (False, True):
            a, b = (T(d, [v for v in corners(d) if abs(v) < 60000 or not abs(v) < np.inf]) for _ in range(2))
            n = len(a.a)
            a, b = T(d, np.repeat(a.a, n)), T(d, np.tile(b.a, n))
            add(f"corners {d} {equal_nan}", a, b, 1e-3, 1e-2, equal_nan)
            x = T(d, [1.0, np.nan, np.inf, -2.0, 0.0])
            add(f"same {d} {equal_nan}", x, x, 1e-5, 1e-8, equal_nan)
    x = sample(rng("close"), "f32", [3, 5, 7])
    y = T("f32", x.up * (1 + rng("close", 2).choice([1e-6, 1e-2], [3, 5, 7])))
    add("odd", x, y, 1e-4, 0.0, False)
    add("rows", x, y, 1e-4, 0.0, False, rows=[0, 1])
    add("within", x, T("f32", x.up * (1 + 1e-6)), 1e-4, 0.0, False)
    add("broadcast", T("f32", [[1.0], [2.0]]), T("f32", [1.0, 2.0, 2.01]), 0.0, 0.1, False)
    add("scalars", T("f32", 1.0), T("f32", 1.05), 0.0, 0.1, False)
    add("empty", T("f32", np.zeros([0, 3])), T("f32", np.zeros([0, 3])), 0.0, 0.1, False)
    add("ints", T("i32", [1, 100, -5]), T("i32", [2, 101, -5]), 0.02, 0.0, False)
    add("mixed", T("f16", [1.0, 2.0]), T("i32", [1, 3]), 0.0, 0.1, False)
    add("the larger tolerance counts the second", T("f32", [10.0, 9.0]), T("f32", [9.0, 10.0]), 0.105, 0.0, False)
    for op in ("is_close", "all_close"):
        book.views(
            op, "views", [x, y],
            T("bool", is_close(x, y, 1e-4, 0.0, False) if op == "is_close" else is_close(x, y, 1e-4, 0.0, False).all()),
            rtol=1e-4, atol=0.0, equal_nan=False,
        )  # fmt: skip

    for d in INTS + ["bool"]:
        a = sample(rng("close", d), d, [3, 5, 7], 0, 99)
        apart = rng("close", d, 2).choice([0, 1], [3, 5, 7], p=[0.9, 0.1])
        b = T(d, a.a ^ apart.astype(bool)) if d == "bool" else T(d, a.a + apart)
        add(f"odd {d}", a, b, 0.02, 0.25, False)
        add(f"same {d}", a, a, 0.0, 0.0, False)

    def array_equal(note, a, b, equal_nan, out, rows=None):
        book.one("array_equal", note, [a, b], T("bool", out), rows=rows, equal_nan=equal_nan)

    nan = T("f32", [1.0, np.nan])
    array_equal("nan", nan, nan, False, False)
    array_equal("nan equal", nan, nan, True, True)
    array_equal("equal", x, x, False, True)
    array_equal("rows", x, x, False, True, rows=[0, 1])
    array_equal("one differs", x, T("f32", np.where(np.arange(7) == 6, x.a + 1, x.a)), False, False)
    array_equal("zeros of both signs", T("f64", [0.0, 1.0]), T("f64", [-0.0, 1.0]), False, True)
    array_equal("shapes differ", x, T("f32", x.a[:1]), False, False)
    array_equal("ranks differ", T("i32", [1]), T("i32", 1), False, False)
    array_equal("mixed", T("u8", [1, 2]), T("f16", [1, 2]), False, True)
    array_equal("ints", T("i64", [2**53, 2**53 + 1]), T("i64", [2**53, 2**53]), False, False)
    array_equal("empty", T("f32", np.zeros([0])), T("f32", np.zeros([0])), False, True)
    many = T("i8", np.arange(40000) % 100)
    array_equal("large", many, many, False, True)
    array_equal("large, the last differs", many, T("i8", np.where(np.arange(40000) == 39999, 7, many.a)), False, False)
    array_equal("scalars", T("bool", True), T("bool", True), False, True)
    for d in PLAIN:
        a = sample(rng("array_equal", d), d, [3, 5, 7])
        last = np.arange(105).reshape(3, 5, 7) == 104
        b = T(d, np.where(last, ~a.a if d == "bool" else a.a + (1j if d == "c64" else 1), a.a))
        array_equal(f"equal {d}", a, a, False, True)
        array_equal(f"the last differs {d}", a, b, False, False)
    book.views("array_equal", "views", [x, x], T("bool", True), equal_nan=False)


def fill(books):
    for name, f in (("unary", unary), ("binary", binary), ("activation", activation), ("create", create)):
        books[name] = Book(name)
        f(books[name])
