"""Reads a file that hotcell-tests' synth wrote with PyPI's gguf: python tests/golden/synthetic.py FILE…

Checks what another reader relies on: keys, types, shapes, the tokenizer's lists, and that all weights of every tensor are
finite, with a mean near 0 and the spread that their row calls for.
"""

import sys

import numpy as np
from gguf import GGUFReader, dequantize


def check(path: str) -> None:
    reader = GGUFReader(path)
    field = lambda key: reader.get_field(key).contents()
    assert field("general.architecture") == "llama"
    tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    assert len(tokens) == field("llama.vocab_size") == len(set(tokens))
    assert len(field("tokenizer.ggml.token_type")) == len(tokens)
    known = set(tokens)
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known, merge
    hidden, types, count = field("llama.embedding_length"), {}, 0
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), tensor.name
        assert values.shape == tuple(reversed(tensor.shape.tolist())), tensor.name
        count += values.size
        if tensor.name.endswith("norm.weight"):
            assert (values == 1).all(), tensor.name
            continue
        types.setdefault(tensor.tensor_type.name, []).append(tensor.name)
        is_logits = tensor.name in ("token_embd.weight", "output.weight")
        expected = (4 if is_logits else 1) / np.sqrt(hidden if is_logits else values.shape[1])
        deviation, mean = values.std(dtype=np.float64), values.mean(dtype=np.float64)
        assert abs(deviation / expected - 1) < 0.05, (tensor.name, deviation, expected)
        assert abs(mean) < 0.02 * expected, (tensor.name, mean)
    print(path, count, "weights;", ", ".join(f"{len(names)} {name}" for name, names in types.items()))


for path in sys.argv[1:]:
    check(path)
