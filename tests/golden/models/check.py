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
from safetensors.numpy import load_file as load_arrays

HERE = Path(__file__).parent

GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
# Gemma's norm before the feed-forward part is not the one after attention.
GEMMA_NAMES = GGUF_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


def load_file(path):
    """NumPy has no bfloat16: its 16 bits are the upper half of a float32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if all(t["dtype"] not in ("BF16", "F8_E4M3") for name, t in header.items() if name != "__metadata__"):
        return load_arrays(path)
    arrays = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in t["data_offsets"])
            if t["dtype"] == "F8_E4M3":
                values = E4M3[np.frombuffer(data[begin:end], dtype=np.uint8)]
            elif t["dtype"] == "BF16":
                values = (np.frombuffer(data[begin:end], dtype="<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(data[begin:end], dtype="<f4")
            arrays[name] = values.reshape(t["shape"])
    return arrays


def e4m3(code):
    """Sign, four bits of exponent, three of mantissa; all ones are no number."""
    e, m = code >> 3 & 15, code & 7
    value = np.nan if code & 127 == 127 else m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
    return -value if code >> 7 else value


E4M3 = np.array([e4m3(code) for code in range(256)])


def unscaled(tensors, rectangle):
    """Matrices times their scales, each found by where a weight is."""
    out = {}
    for name, w in tensors.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        scales = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
        if scales is not None:
            scales = scales.reshape(1, 1) if scales.size == 1 else scales
            down, across = scales.shape
            height, width = rectangle if rectangle else (-(-w.shape[0] // down), -(-w.shape[1] // across))
            rows, columns = np.indices(w.shape)
            w = w * scales[rows // height, columns // width]
        out[name] = w
    return out


def stack_experts(tensors):
    """Experts that are stored one by one, as GGUF has them."""
    for name in [name for name in tensors if ".experts.0." in name]:
        stem, rest = name.split(".experts.0.")
        count = sum(other.startswith(f"{stem}.experts.") and other.endswith(rest) for other in tensors)
        tensors[f"{stem}.experts.{rest}"] = np.stack([tensors[f"{stem}.experts.{i}.{rest}"] for i in range(count)])
    return tensors


def round_to_bf16(x):
    bits = np.float32(x).view(np.uint32)
    return float(np.uint32((int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) & 0xFFFF0000).view(np.float32))


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
        tensors[f"{prefix}{(GEMMA_NAMES if arch == 'gemma3' else GGUF_NAMES)[stem]}.{kind}"] = values
    base = get("rope.freq_base")
    other = {}
    if arch == "gemma3":
        # As llama.cpp: the pattern is 6 and local layers have a base of 10000 unless the file says otherwise.
        layers, pattern = get("block_count"), get("attention.sliding_window_pattern", 6)
        other = gemma(
            width=get("embedding_length"), slides=[(i + 1) % pattern != 0 for i in range(layers)], dim=dim,
            window=get("attention.sliding_window"), local=get("rope.freq_base_swa", 10000.0), scale=dim**-0.5,
        )  # fmt: skip
    if get("rope.scaling.type") == "linear":
        factors = factors * get("rope.scaling.factor")
    if arch == "qwen3moe":
        other = dict(used=get("expert_used_count"), normalised=True)
    return base_model(
        layers=get("block_count"), heads=heads, kv_heads=get("attention.head_count_kv"), dim=dim,
        eps=get("attention.layer_norm_rms_epsilon"), window=other.pop("window", None), tensors=tensors,
        frequencies=base ** (-np.arange(0, dim, 2) / dim) / factors, pairs=arch == "llama", **other,
    )  # fmt: skip


def base_model(dim, layers, window, **model):
    """What most models have, unless they say otherwise."""
    usual = dict(
        scale=dim**-0.5, slides=[True] * layers, local=model["frequencies"], caps=(None, None), one=0.0, embedding=1.0,
        gelu=False, used=None, normalised=False,
    )  # fmt: skip
    return usual | dict(dim=dim, layers=layers, window=window) | model


def gemma(width, slides, dim, window, local, scale, **more):
    local = local ** (-np.arange(0, dim, 2) / dim)
    return dict(slides=slides, window=window, local=local, scale=scale, embedding=width**0.5, gelu=True) | more


def read_folder(folder, config="config.json"):
    c = json.loads((folder / config).read_text())
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"]} | (c["rope_scaling"] or {})
    local = rope.get("sliding_attention", {"rope_theta": c.get("rope_local_base_freq")})["rope_theta"]
    rope = rope.get("full_attention", rope)
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if rope.get("rope_type") == "llama3":
        # As the Llama 3 reference code has it: a blend between the stretched and the plain frequency.
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        plain = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (plain + (1 - plain) / rope["factor"])
    if rope.get("rope_type") == "linear":
        frequencies = frequencies / rope["factor"]
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {k: v.astype(np.float64) for k, v in load_file(path).items()}
    tensors = unscaled(tensors, c.get("quantization_config", {}).get("weight_block_size"))
    tensors = stack_experts(tensors)
    window = c.get("sliding_window") if c.get("use_sliding_window", True) else None
    other = {}
    if c["model_type"] == "gemma3_text":
        types = c.get("layer_types") or [
            "sliding_attention" if (i + 1) % c["sliding_window_pattern"] else "full_attention"
            for i in range(c["num_hidden_layers"])
        ]
        other = gemma(
            width=c["hidden_size"], slides=[t == "sliding_attention" for t in types], dim=dim, window=window, local=local,
            scale=c["query_pre_attn_scalar"] ** -0.5, caps=(c["attn_logit_softcapping"], c["final_logit_softcapping"]), one=1.0,
        )  # fmt: skip
        if "bfloat16" in (c.get("dtype"), c.get("torch_dtype")):
            other["embedding"] = round_to_bf16(other["embedding"])
    if c["model_type"] == "qwen3_moe":
        other = dict(used=c["num_experts_per_tok"], normalised=c["norm_topk_prob"])
    return base_model(
        layers=c["num_hidden_layers"], heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"], dim=dim,
        eps=c["rms_norm_eps"], window=other.pop("window", window), tensors=tensors, frequencies=frequencies,
        pairs=False, **other,
    )  # fmt: skip


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, frequencies, pairs):
    angle = np.arange(len(x))[:, None, None] * frequencies
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else np.split(x, 2, axis=-1)
    a, b = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate([a, b], axis=-1)  # order within a head does not matter once q and k share it


def cap(x, limit):
    return x if limit is None else limit * np.tanh(x / limit)


def gate(x, gelu):
    if gelu:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def mixture(m, p, x):
    """Each token by itself, its experts in ascending order."""
    w = m["tensors"]
    scores = x @ w[f"{p}mlp.gate.weight"].T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for token, share in enumerate(shares):
        chosen = sorted(np.argsort(-share)[: m["used"]])
        total = share[chosen].sum() if m["normalised"] else 1.0
        for expert in chosen:
            g, u, d = (w[f"{p}mlp.experts.{part}_proj.weight"][expert] for part in ("gate", "up", "down"))
            out[token] += share[expert] / total * (d @ (gate(g @ x[token], m["gelu"]) * (u @ x[token])))
    return out


def logits(m, ids):
    w, n, one = m["tensors"], len(ids), m["one"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def normed(x, name):
        """Without such a norm, nothing."""
        return norm(x, one + w[f"{name}.weight"], m["eps"]) if f"{name}.weight" in w else x

    distance = np.arange(n)[:, None] - np.arange(n)[None]
    x = w["model.embed_tokens.weight"][ids] * m["embedding"]
    post = "pre_feedforward_layernorm" in " ".join(w)
    for i in range(m["layers"]):
        p = f"model.layers.{i}."
        sliding = m["window"] is not None and m["slides"][i]
        hidden = (distance < 0) | (distance >= m["window"]) if sliding else distance < 0
        h = normed(x, f"{p}input_layernorm")
        q = linear(h, f"{p}self_attn.q_proj").reshape(n, m["heads"], m["dim"])
        k = linear(h, f"{p}self_attn.k_proj").reshape(n, m["kv_heads"], m["dim"])
        v = linear(h, f"{p}self_attn.v_proj").reshape(n, m["kv_heads"], m["dim"])
        q, k = normed(q, f"{p}self_attn.q_norm"), normed(k, f"{p}self_attn.k_norm")
        frequencies = m["local"] if m["slides"][i] else m["frequencies"]
        q, k = (rotate(t, frequencies, m["pairs"]) for t in (q, k))
        k, v = (t.repeat(m["heads"] // m["kv_heads"], axis=1) for t in (k, v))
        scores = cap(np.einsum("qhd,khd->hqk", q, k) * m["scale"], m["caps"][0])
        scores = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        scores /= scores.sum(-1, keepdims=True)
        attended = linear(np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1), f"{p}self_attn.o_proj")
        if post:
            x = x + normed(attended, f"{p}post_attention_layernorm")
            h = normed(x, f"{p}pre_feedforward_layernorm")
        else:
            x = x + attended
            h = normed(x, f"{p}post_attention_layernorm")
        if f"{p}mlp.gate.weight" in w:
            fed = mixture(m, p, h)
        else:
            fed = linear(gate(linear(h, f"{p}mlp.gate_proj"), m["gelu"]) * linear(h, f"{p}mlp.up_proj"), f"{p}mlp.down_proj")
        x = x + (normed(fed, f"{p}post_feedforward_layernorm") if post else fed)
    x = normed(x, "model.norm")
    return cap(linear(x, "lm_head" if "lm_head.weight" in w else "model.embed_tokens"), m["caps"][1])


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
