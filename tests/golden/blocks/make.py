"""Raw blocks of every block format Hotcell reads, with their values by the `gguf` package.

One safetensors file per type:
  raw     u8  [blocks, bytes per block]   as they lie in a GGUF file
  values  f32 [blocks, values per block]  gguf.quants.dequantize(raw)
  source  f32 [n, values per block]       what raw[:n] was quantised from (absent where the package cannot or here does not make them; for
                                          F16 and BF16 only values that the type holds are stored)

The values are computed without fused multiply-add: (d * q) rounded, then the minimum subtracted or added.
Every value is finite or an infinity of F16, BF16 or MXFP4; there are no NaNs but those of F8_E4M3, which GGUF does not have: of it there
are all numbers, as PyTorch reads them.
"""

from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants
from safetensors.numpy import save_file

HERE = Path(__file__).parent

# f16 scales that a reader may get wrong: zeros, the smallest and largest denormal, the smallest
# normal, ones, the largest, an odd mantissa; each with both signs.
SCALES = np.array(
    [0.0, 2**-24, 2**-24 * 1023, 2**-14, 1.0, 0.3333, 1.0 / 127, 65504.0], dtype=np.float16
)
SCALES = np.concatenate([SCALES, -SCALES])


def nasty_sources(rng):
    """Rows of 32 whose scales stay finite in f16 and whose inverse scales stay finite in f32."""
    rows = [
        np.zeros(32),
        -np.zeros(32),
        np.full(32, 1.0),
        np.full(32, -1.0),
        np.full(32, 60000.0),
        np.tile([60000.0, -60000.0], 16),
        np.tile([1.0, -1.0], 16),
        np.where(np.arange(32) == 0, 127.0, 0.0),  # one outlier first
        np.where(np.arange(32) == 31, -127.0, 0.01),  # one outlier last
        np.arange(32) - 16.0,
        np.arange(32) - 15.0,
        -np.arange(32) / 31,
        np.arange(-8, 8).repeat(2) * 1.0,
        np.arange(32) + 0.5,  # halves: how ties are rounded
        np.arange(-63.5, 64.5, 4.0),
        rng.standard_normal(32) * 1e-3,
        rng.standard_normal(32) * 1e-5,  # scale is a denormal f16
        rng.standard_normal(32) * 1e-7,  # scale is zero in f16, the quants are not
        rng.standard_normal(32) * 1e-30,
        np.abs(rng.standard_normal(32)),
        -np.abs(rng.standard_normal(32)),
        100 + rng.standard_normal(32),  # far from zero: the minimum matters
        np.exp(rng.standard_normal(32) * 4),
    ]
    return np.array(rows, dtype=np.float32)


def with_scales(rng, qtype, count, offsets):
    """Random bytes, every f16 at `offsets` replaced: first all pairs from SCALES, then random finite ones."""
    size = GGML_QUANT_SIZES[qtype][1]
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for k, offset in enumerate(offsets):
        random = rng.integers(0, 0x10000, count).astype(np.uint16)
        not_finite = (random & 0x7C00) == 0x7C00
        scale = np.where(not_finite, random ^ 0x4000, random).astype(np.uint16).view(np.float16)
        n = min(len(SCALES), count)
        scale[:n] = np.roll(SCALES, k * 5)[:n]
        raw[:, offset : offset + 2] = scale.view(np.uint8).reshape(count, 2)
    return raw


def legacy(rng, qtype, offsets):
    source = np.concatenate(
        [nasty_sources(rng), rng.standard_normal((25, 32)).astype(np.float32) * 0.1]
    )
    raw = quants.quantize(source, qtype)
    return np.concatenate([raw, with_scales(rng, qtype, 32, offsets)]), source


def k_quant(rng, qtype, offsets, scales):
    raw = with_scales(rng, qtype, 24, offsets)
    first = len(SCALES)  # those with ordinary scales from here on
    raw[first : first + 3, scales] = np.array([[0x00], [0xFF], [0x80]], dtype=np.uint8)
    raw[first + 3, scales] = np.resize([0x3F, 0xC0], scales.stop - scales.start)
    raw[first + 4, scales] = np.resize([0x7F, 0x81], scales.stop - scales.start)
    for row in range(first, first + 5):  # a scale of which one sees something
        for offset, value in zip(offsets, (0.0123, -0.0456)):
            raw[row, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    quants_only = [i for i in range(raw.shape[1]) if i not in range(scales.start, scales.stop)]
    quants_only = [i for i in quants_only if all(i not in (o, o + 1) for o in offsets)]
    raw[-1, quants_only] = 0xFF
    raw[-2, quants_only] = 0x00
    return raw


def mxfp4(rng):
    """What is quantised, then every exponent there is, with all sixteen codes in both halves."""
    source = np.concatenate([nasty_sources(rng), rng.standard_normal((25, 32)).astype(np.float32) * 0.1])
    # Of these the exponent does not fit into its byte.
    source = source[np.abs(source).max(axis=1) < 2.0**100]
    raw = quants.quantize(source, T.MXFP4)
    every = rng.integers(0, 256, (256, 17), dtype=np.uint8)
    every[:, 0] = np.arange(256)
    every[:, 1:] = np.arange(16, dtype=np.uint8) | np.uint8(15) - np.arange(16, dtype=np.uint8) << np.uint8(4)
    return np.concatenate([raw, every]), source


def nvfp4(rng):
    """Every scale there is, those of a NaN and with a sign too, each in another part of a block."""
    raw = rng.integers(0, 256, (64, 36), dtype=np.uint8)
    raw[:, :4] = np.arange(256, dtype=np.uint8).reshape(4, 64).T
    return raw


def codebook(rng, qtype, offsets):
    """Random blocks, more than there are points in a codebook, and all bits set or not."""
    raw = with_scales(rng, qtype, 80, offsets)
    fixed = [o + i for o in offsets for i in (0, 1)]
    others = [i for i in range(raw.shape[1]) if i not in fixed]
    raw[-1, others] = 0xFF
    raw[-2, others] = 0x00
    return raw


def ternary(rng, qtype, raw):
    """Blocks of 256 made of the nasty rows, each repeated and at other places, then near the halves, before those of `raw`."""
    rows = nasty_sources(rng)
    source = [np.roll(np.tile(row, 8), 7 * i) for i, row in enumerate(rows)]
    source += [rng.choice([-1.0, -0.5, -0.49999997, 0.0, 0.49999997, 0.5, 1.0], 256) * s for s in (1.0, 0.02, 3e4)]
    source += list(rng.standard_normal((8, 256)) * 0.1)
    source = np.array(source, dtype=np.float32)
    return np.concatenate([quants.quantize(source, qtype), raw]), source


def iq1_m(rng):
    raw = rng.integers(0, 256, (80, 56), dtype=np.uint8)
    scales = with_scales(rng, T.Q8_0, 80, [0])[:, :2].copy().view(np.uint16)[:, 0]
    for i in range(4):
        digit = (scales >> (4 * i) & 15).astype(np.uint8)
        raw[:, 49 + 2 * i] = raw[:, 49 + 2 * i] & 15 | digit << 4
    return raw


def half(rng, qtype):
    """Every exponent with both signs and six mantissas, infinities too, but no NaN."""
    bits = 10 if qtype == T.F16 else 7
    exponents = 1 << (15 - bits)
    top = (1 << bits) - 1
    patterns = [
        (sign << 15) | (exponent << bits) | mantissa
        for sign in (0, 1)
        for exponent in range(exponents)
        for mantissa in (0, 1, top // 2, top // 2 + 1, top - 1, top)
        if exponent < exponents - 1 or mantissa == 0
    ]
    patterns = np.array(patterns, dtype=np.uint16)
    patterns = np.resize(patterns, -(-len(patterns) // 32) * 32)  # whole rows of 32
    return patterns.view(np.uint8).reshape(-1, 64)


def main():
    rng = np.random.default_rng(20240607)
    made = {}
    for qtype, offsets in ((T.Q4_0, [0]), (T.Q4_1, [0, 2]), (T.Q5_0, [0]), (T.Q5_1, [0, 2]), (T.Q8_0, [0])):
        made[qtype] = legacy(rng, qtype, offsets)
    for qtype, offsets, scales in (
        (T.Q4_K, [0, 2], slice(4, 16)),
        (T.Q5_K, [0, 2], slice(4, 16)),
        (T.Q6_K, [208], slice(192, 208)),
    ):
        made[qtype] = k_quant(rng, qtype, offsets, scales), None
    for qtype in (T.F16, T.BF16):
        made[qtype] = half(rng, qtype), None
    made[T.MXFP4] = mxfp4(rng)
    made[T.NVFP4] = nvfp4(rng), None
    # Those that are decoded only. Of IQ1_M the scale lies in four places.
    for qtype, offsets in (
        (T.Q2_K, [80, 82]),
        (T.Q3_K, [108]),
        (T.IQ2_XXS, [0]),
        (T.IQ2_XS, [0]),
        (T.IQ2_S, [0]),
        (T.IQ3_XXS, [0]),
        (T.IQ3_S, [0]),
        (T.IQ1_S, [0]),
        (T.IQ4_NL, [0]),
        (T.IQ4_XS, [0]),
        (T.TQ1_0, [52]),
        (T.TQ2_0, [64]),
    ):
        made[qtype] = codebook(rng, qtype, offsets), None
    for qtype in (T.TQ1_0, T.TQ2_0):
        made[qtype] = ternary(np.random.default_rng(20261123), qtype, made[qtype][0])
    made[T.IQ1_M] = iq1_m(rng), None

    for qtype, (raw, source) in made.items():
        with np.errstate(over="ignore"):
            values = quants.dequantize(raw, qtype)
        assert raw.dtype == np.uint8 and values.dtype == np.float32
        assert not np.isnan(values).any()
        assert qtype in (T.F16, T.BF16, T.MXFP4) or np.isfinite(values).all()
        tensors = {"raw": np.ascontiguousarray(raw), "values": np.ascontiguousarray(values)}
        if source is not None:
            tensors["source"] = source
        save_file(tensors, HERE / f"{qtype.name.lower()}.safetensors")
        print(qtype.name, raw.shape, values.shape)

    every = np.arange(256, dtype=np.uint8).reshape(256, 1)
    values = torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy()
    assert np.isnan(values).sum() == 2
    save_file({"raw": every, "values": values}, HERE / "f8_e4m3.safetensors")


if __name__ == "__main__":
    main()
