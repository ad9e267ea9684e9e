"""Writes kernels/src/cpu/dequant/grids.rs: the points of the codebooks of IQ1, IQ2 and IQ3, out of the `gguf` package (MIT).

Each point is one number: the places of its coordinates among the levels, the first coordinate's in the lowest bits.
"""

from pathlib import Path

import numpy as np
from gguf import quants

HERE = Path(__file__).parent
HEAD = """//! The points of the codebooks of IQ1, IQ2 and IQ3 as ggml (MIT) defines them, made by `tests/golden/blocks/grids.py`.
//!
//! Each is one number: the places of its coordinates among a type's levels, the first coordinate's in the lowest bits.
"""


def main():
    text = HEAD
    for name, of, bits in (
        ("IQ1", quants.IQ1_S, 2),
        ("IQ2_XXS", quants.IQ2_XXS, 2),
        ("IQ2_XS", quants.IQ2_XS, 2),
        ("IQ2_S", quants.IQ2_S, 2),
        ("IQ3_XXS", quants.IQ3_XXS, 3),
        ("IQ3_S", quants.IQ3_S, 3),
    ):
        of.init_grid()
        points = np.asarray(of.grid).reshape(of.grid_shape)
        levels = list(of.grid_map)
        places = np.array([[levels.index(v) for v in p] for p in points])
        codes = [int(sum(int(v) << (bits * i) for i, v in enumerate(p))) for p in places]
        shown = ", ".join(map(str, levels))
        text += f"\n/// Levels {shown}.\n#[rustfmt::skip]\npub(super) static {name}: [u16; {len(codes)}] = [\n"
        line = "   "
        for code in codes:
            if len(line) > 118:
                text += line + "\n"
                line = "   "
            line += f" {code},"
        text += line + "\n];\n"
    (HERE / "../../../kernels/src/cpu/dequant/grids.rs").resolve().write_text(text)


if __name__ == "__main__":
    main()
