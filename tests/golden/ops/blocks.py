"""Random tensors of the block types, with their values by the `gguf` package, of f8_e4m3 by PyTorch."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from common import T

TYPES = {
    "q4_0": (GGMLQuantizationType.Q4_0, 32, [0]),
    "q4_1": (GGMLQuantizationType.Q4_1, 32, [0, 2]),
    "q5_0": (GGMLQuantizationType.Q5_0, 32, [0]),
    "q5_1": (GGMLQuantizationType.Q5_1, 32, [0, 2]),
    "q8_0": (GGMLQuantizationType.Q8_0, 32, [0]),
    "q4_k": (GGMLQuantizationType.Q4_K, 256, [0, 2]),
    "q5_k": (GGMLQuantizationType.Q5_K, 256, [0, 2]),
    "q6_k": (GGMLQuantizationType.Q6_K, 256, [208]),
    "mxfp4": (GGMLQuantizationType.MXFP4, 32, []),
    "nvfp4": (GGMLQuantizationType.NVFP4, 64, []),
    "q2_k": (GGMLQuantizationType.Q2_K, 256, [80, 82]),
    "q3_k": (GGMLQuantizationType.Q3_K, 256, [108]),
    "iq2_xxs": (GGMLQuantizationType.IQ2_XXS, 256, [0]),
    "iq2_xs": (GGMLQuantizationType.IQ2_XS, 256, [0]),
    "iq3_xxs": (GGMLQuantizationType.IQ3_XXS, 256, [0]),
    "iq1_s": (GGMLQuantizationType.IQ1_S, 256, [0]),
    "iq4_nl": (GGMLQuantizationType.IQ4_NL, 32, [0]),
    "iq3_s": (GGMLQuantizationType.IQ3_S, 256, [0]),
    "iq2_s": (GGMLQuantizationType.IQ2_S, 256, [0]),
    "iq4_xs": (GGMLQuantizationType.IQ4_XS, 256, [0]),
    "iq1_m": (GGMLQuantizationType.IQ1_M, 256, []),
    "tq1_0": (GGMLQuantizationType.TQ1_0, 256, [52]),
    "tq2_0": (GGMLQuantizationType.TQ2_0, 256, [64]),
}
# Those that `gguf` encodes.
ENCODED = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "tq1_0", "tq2_0"]
BYTES = {name: GGML_QUANT_SIZES[qtype][1] for name, (qtype, *_) in TYPES.items()}
# A block is one number; here as many as others have.
TYPES["f8_e4m3"], BYTES["f8_e4m3"] = (None, 32, []), 32
# Scales of one byte: where they are, and which are near 0.01.
BYTE_SCALES = {"mxfp4": (slice(0, 1), 118, 122), "nvfp4": (slice(0, 4), 4, 16)}


def block(r, dtype, rows, columns):
    """`[rows, columns]` of random quants with scales near 0.01: the tensor and its values in float64."""
    qtype, length, scales = TYPES[dtype]
    count = rows * columns // length
    raw = r.integers(0, 256, (count, BYTES[dtype]), dtype=np.uint8)
    for offset in scales:
        d = r.uniform(-0.02, 0.02, count).astype(np.float16)
        raw[:, offset : offset + 2] = d.view(np.uint8).reshape(count, 2)
    if dtype in BYTE_SCALES:
        where, low, high = BYTE_SCALES[dtype]
        raw[:, where] = r.integers(low, high, raw[:, where].shape, dtype=np.uint8)
    if dtype == "iq1_m":  # the scale's four digits are the highest of four words
        d = r.uniform(-0.02, 0.02, count).astype(np.float16).view(np.uint16)
        for i in range(4):
            raw[:, 49 + 2 * i] = raw[:, 49 + 2 * i] & 15 | (d >> (4 * i) & 15).astype(np.uint8) << 4
    if qtype is None:
        raw[(raw & 127) == 127] = 0
        values = torch.from_numpy(raw).view(torch.float8_e4m3fn).double().numpy()
    else:
        values = quants.dequantize(raw, qtype).astype(np.float64)
    return T(dtype, None, [rows, columns], raw.tobytes()), values.reshape(rows, columns)
