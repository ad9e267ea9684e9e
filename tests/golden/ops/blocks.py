"""Random tensors of the block types, with their values by the `gguf` package."""

import numpy as np
from gguf import GGMLQuantizationType, quants

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
}
BYTES = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "q4_k": 144, "q5_k": 176, "q6_k": 210, "mxfp4": 17, "nvfp4": 36}
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
    values = quants.dequantize(raw, qtype).astype(np.float64)
    return T(dtype, None, [rows, columns], raw.tobytes()), values.reshape(rows, columns)
