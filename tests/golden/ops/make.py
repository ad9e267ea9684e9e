"""Cases for every row of the op catalogue: `<file of the catalogue>.json` and `.bin` (`place` and `products` have some of other files' rows).

The index is a list of cases, one per line:
  op       the row it is a case of
  note     what is special about it, unique within the op
  inputs   [dtype, shape, offset of its bytes], and `true` behind when axis 0 is the row dimension;
           a cache is {"cache": [dtype, blocks, block_len, kv_heads, head_dim], "at", "after": offsets of its bytes}
  nodes    [op, references, attributes] in order; a reference is the number of an input, [node, result] or null;
           bytes are {"at", "bytes"}
  results  references of what is compared with `outputs`
  outputs  [dtype, shape, offset]
  check    "exact": bit for bit (any NaN for a NaN); "each": every element within the tolerance by itself;
           absent: floats by the normalised mean squared error, others bit for bit
  rows     how many rows the row dimension has
  fails    there are no outputs: "verify", the graph is refused; "run", its execution is; "either"
Bytes are little-endian, row-major, at offsets that are multiples of 8.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import elementwise
import linear
import movement
import numeric
import placement
import products
import quantised
import recurrent
import scaled
import transformer


def main():
    books = {}
    for module in (elementwise, linear, movement, numeric, placement, products, quantised, recurrent, scaled, transformer):
        module.fill(books)
    for book in books.values():
        book.write(Path(__file__).parent)


if __name__ == "__main__":
    main()
