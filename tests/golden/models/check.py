"""Computes every model again, in float64 with numpy alone, from the files as they lie on disk.

It shares no code with make.py or transformers. GGUF files are computed as ggml does: the rows of q and k of
`llama` files rotate in pairs (2i, 2i + 1), frequencies are divided by rope_freqs.weight. So a mistake in how the
files were written shows here, and the difference printed is what float32 rounding costs the expected logits.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import quants
from safetensors.numpy import load_file

HERE = Path(__file__).parent

GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def read_gguf(path):
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()

    def get(key, default=None):
        field = reader.fields.get(f"{arch}.{key}")
        return default if field is None else field.contents()

    heads = get("attention.head_count")
    dim = get("attention.key_length", get("embedding_length") // heads)
    tensors, factors = {}, np.ones(dim // 2)
    for t in reader.tensors:
        values = quants.dequantize(t.data, t.tensor_type).astype(np.float64)
        if t.name == "rope_freqs.weight":
            factors = values
            continue
        prefix, (stem, kind) = "", t.name.rsplit(".", 2)[-2:]
        if t.name.startswith("blk."):
            prefix = f"model.layers.{t.name.split('.')[1]}."
        tensors[f"{prefix}{GGUF_NAMES[stem]}.{kind}"] = values
    base = get("rope.freq_base")
    return dict(
        layers=get("block_count"), heads=heads, kv_heads=get("attention.head_count_kv"), dim=dim,
        eps=get("attention.layer_norm_rms_epsilon"), window=None, tensors=tensors,
        frequencies=base ** (-np.arange(0, dim, 2) / dim) / factors, pairs=arch == "llama",
    )  # fmt: skip


def read_folder(folder, config="config.json"):
    c = json.loads((folder / config).read_text())
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"]} | (c["rope_scaling"] or {})
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if rope.get("rope_type") == "llama3":
        # As the Llama 3 reference code has it: a blend between the stretched and the plain frequency.
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        plain = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (plain + (1 - plain) / rope["factor"])
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {k: v.astype(np.float64) for k, v in load_file(path).items()}
    window = c.get("sliding_window") if c.get("use_sliding_window", True) else None
    return dict(
        layers=c["num_hidden_layers"], heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"], dim=dim,
        eps=c["rms_norm_eps"], window=window, tensors=tensors, frequencies=frequencies, pairs=False,
    )  # fmt: skip


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, frequencies, pairs):
    angle = np.arange(len(x))[:, None, None] * frequencies
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else np.split(x, 2, axis=-1)
    a, b = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate([a, b], axis=-1)  # order within a head does not matter once q and k share it


def logits(m, ids):
    w, n = m["tensors"], len(ids)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    distance = np.arange(n)[:, None] - np.arange(n)[None]
    hidden = distance < 0 if m["window"] is None else (distance < 0) | (distance >= m["window"])
    x = w["model.embed_tokens.weight"][ids]
    for i in range(m["layers"]):
        p = f"model.layers.{i}."
        h = norm(x, w[f"{p}input_layernorm.weight"], m["eps"])
        q = linear(h, f"{p}self_attn.q_proj").reshape(n, m["heads"], m["dim"])
        k = linear(h, f"{p}self_attn.k_proj").reshape(n, m["kv_heads"], m["dim"])
        v = linear(h, f"{p}self_attn.v_proj").reshape(n, m["kv_heads"], m["dim"])
        if f"{p}self_attn.q_norm.weight" in w:
            q = norm(q, w[f"{p}self_attn.q_norm.weight"], m["eps"])
            k = norm(k, w[f"{p}self_attn.k_norm.weight"], m["eps"])
        q, k = (rotate(t, m["frequencies"], m["pairs"]) for t in (q, k))
        k, v = (t.repeat(m["heads"] // m["kv_heads"], axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(m["dim"])
        scores = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        scores /= scores.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1), f"{p}self_attn.o_proj")
        h = norm(x, w[f"{p}post_attention_layernorm.weight"], m["eps"])
        gate = linear(h, f"{p}mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{p}mlp.up_proj"), f"{p}mlp.down_proj")
    x = norm(x, w["model.norm.weight"], m["eps"])
    return linear(x, "lm_head" if "lm_head.weight" in w else "model.embed_tokens")


def main():
    models = {f.stem: (f.stem, read_gguf(f)) for f in sorted((HERE / "gguf").glob("*.gguf"))}
    models = {n: (n.removesuffix("-f32"), m) for n, (_, m) in models.items()}
    for path in sorted(HERE.glob("*/config.json")):
        models[path.parent.name] = path.parent.name, read_folder(path.parent)
    models["llama3 (old config)"] = "llama3", read_folder(HERE / "llama3", "../llama3.old-config.json")
    for name, (expected, model) in models.items():
        wanted = load_file(HERE / "expected" / f"{expected}.safetensors")
        worst = 0.0
        for which in ("long", "short"):
            prompt, path = wanted[f"{which}.prompt"], wanted[f"{which}.tokens"]
            rows = np.concatenate([wanted[f"{which}.prefill"], wanted[f"{which}.decode"]])
            got = logits(model, np.concatenate([prompt, path[:-1]]))[-len(rows) :]
            worst = max(worst, float(np.abs(got - rows).max()))
            assert (got[-len(path) :].argmax(-1) == path).all(), name
        print(f"{name}: off by at most {worst:.1e}")
        assert worst < 1e-3, name


if __name__ == "__main__":
    main()
