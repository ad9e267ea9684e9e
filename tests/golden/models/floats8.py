"""Tiny random models whose matrices are 8-bit floats (E4M3) with scales, in the ways of published checkpoints, and what
`transformers` computes in float32 with the numbers that these are.

  qwen3-fp8      rectangles of 24 × 40 with scales in bf16, as DeepSeek's and Qwen's checkpoints have them (theirs are 128 × 128)
  qwen3_moe-fp8  rectangles of 16 × 24 with scales in f32, experts one by one
  llama2-fp8     a scale for each row, or for a whole matrix, as compressed-tensors has them
"""

import json
import sys
from itertools import count

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from make import (
    HERE,
    MODELS,
    TEETH,
    build,
    make_tokenizer,
    prompts,
    random_weights,
    run,
    save_expected,
    save_folder,
    separated,
    with_weights,
)

LARGEST = 448.0
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
CHANNELS = {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"}
# name: (model, height and width of rectangles or None for rows, dtype of scales, end of their names, quantization_config)
FILES = {
    "qwen3-fp8": ("qwen3", (24, 40), torch.bfloat16, "_scale_inv", DEEPSEEK | {"weight_block_size": [24, 40]}),
    "qwen3_moe-fp8": ("qwen3_moe", (16, 24), torch.float32, "_scale_inv", DEEPSEEK | {"weight_block_size": [16, 24]}),
    "llama2-fp8": (
        "llama2", None, torch.float32, "_scale",
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"weights": CHANNELS}}},
    ),
}  # fmt: skip


def singles(weights):
    """Experts one by one, as published checkpoints have them."""
    out = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for i, (gate, up) in enumerate(np.split(e, 2) for e in value):
                out[f"{stem}{i}.gate_proj.weight"], out[f"{stem}{i}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{i}.down_proj.weight"): e for i, e in enumerate(value)}
        else:
            out[name] = value
    return out


def joined(weights, like):
    """Stacked again."""
    out = {}
    for name, value in like.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            pair = lambda i: np.concatenate([weights[f"{stem}{i}.gate_proj.weight"], weights[f"{stem}{i}.up_proj.weight"]])
            out[name] = np.stack([pair(i) for i in range(len(value))])
        elif name.endswith("experts.down_proj"):
            out[name] = np.stack([weights[name.replace("down_proj", f"{i}.down_proj.weight")] for i in range(len(value))])
        else:
            out[name] = weights[name]
    return out


def is_matrix(name):
    return name.endswith("_proj.weight")


def spread(scales, shape, height, width):
    return scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: shape[0], : shape[1]]


def quantise(name, value, rectangle, dtype):
    """The 8-bit floats, the scales as stored, and the numbers that both are."""
    w = torch.from_numpy(value)
    n, k = w.shape
    whole = rectangle is None and "down_proj" in name
    height, width = (n, k) if whole else rectangle or (1, k)
    down, across = -(-n // height), -(-k // width)
    scales = torch.zeros(down, across)
    for i in range(down):
        for j in range(across):
            part = w[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = part.abs().max() / LARGEST
    scales = scales.to(dtype)
    each = spread(scales.float(), w.shape, height, width)
    codes = (w / each).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    stored = scales.reshape(()) if whole else scales
    return codes, stored, (codes.float() * each).numpy()


def make_folder(index, name, tokenizer):
    base, rectangle, dtype, end, said = FILES[name]
    cfg = MODELS[base][0]()
    for seed in count(100_000 + 1000 * index):
        rng = np.random.default_rng(seed)
        asked = prompts(rng)
        weights = random_weights(build(cfg), rng)
        tensors, numbers = {}, {}
        for tensor, value in singles(weights).items():
            if is_matrix(tensor):
                codes, scales, numbers[tensor] = quantise(tensor, value, rectangle, dtype)
                tensors |= {tensor: codes, tensor + end: scales}
            else:
                tensors[tensor], numbers[tensor] = torch.from_numpy(value), value
        numbers = joined(numbers, weights)
        results = run(cfg, numbers, asked)
        if separated(results):
            break
    print(f"{name}: seed {seed}")

    def off(changed):
        prompt, right = asked["long"], results["long"]
        ids = torch.tensor([[*prompt, *right["path"][:-1]]])
        logits = with_weights(cfg, changed)(ids, use_cache=False).logits[0].numpy()
        return float(np.abs(logits[-len(right["decode"]) :] - right["decode"]).max())

    # Scales that go to other rectangles must show.
    wrong = {}
    for tensor, value in singles(weights).items():
        wrong[tensor] = value
        if is_matrix(tensor):
            scales = tensors[tensor + end].float()
            scales = scales.reshape(1, 1) if scales.ndim == 0 else scales.flip(0, 1)
            n, k = value.shape
            height, width = (n, k) if scales.numel() == 1 else rectangle or (1, k)
            wrong[tensor] = (tensors[tensor].float() * spread(scales, value.shape, height, width)).numpy()
    shown = off(joined(wrong, weights))
    print(f"  scales in another order: off by {shown:.2f}")
    assert shown > TEETH, (name, shown)

    save_folder(name, cfg, weights, tokenizer)
    folder = HERE / name
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": said}
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()
    save_expected(name, cfg, seed, asked, results)


def main():
    tokenizer = make_tokenizer()
    for index, name in enumerate(FILES):
        if name in (sys.argv[1:] or FILES):
            make_folder(index, name, tokenizer)


if __name__ == "__main__":
    main()
