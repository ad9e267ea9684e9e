"""Tiny random models in both file formats, and what `transformers` computes with them in float32.

Nothing here is trained and nothing is downloaded; names on the command line choose some of the models. Each model is seeded; a seed is taken only if the greedy
path is well separated (top-1 minus top-2 above GAP) in every file made from it, so that the expected tokens do
not depend on rounding. The README beside this folder says what the files are.
"""

import json
import re
import shutil
import sys
import tempfile
from itertools import count
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q, quants
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

HERE = Path(__file__).parent
STEPS = 32
GAP = 0.03
TEETH = 0.5  # a model read wrongly must be at least this far off

torch.set_num_threads(1)
torch.set_grad_enabled(False)


# --- tokenizer: 256 bytes in GPT-2's order, 24 merges, 8 special tokens = 288 ---

MERGES = """Ġ t|h e|Ġt he|i n|a n|o n|r e|e r|Ġ a|Ġa n|an d|Ġ w|l l|o u|Ġ c|Ġc e|Ġce ll|h o|ho t|o r|Ġw or|Ġ Ġ|Ã ©|1 0"""
MERGES = [tuple(pair.split()) for pair in MERGES.split("|")]
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unused|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOS, EOS, PAD = 280, 281, 282


def byte_characters():
    """GPT-2's printable stand-in for every byte, in the order of its vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]


def tokens():
    return byte_characters() + ["".join(pair) for pair in MERGES] + SPECIAL


def make_tokenizer():
    ordinary = tokens()[: -len(SPECIAL)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(ordinary)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    assert tokenizer.get_vocab_size() == 288 and tokenizer.token_to_id("<|bos|>") == BOS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tokenizer_cases(tokenizer):
    texts = [
        "",
        "the hot cell",
        "  and   then\tthe\n\nworker, isn't it? 10100 in 2024",
        "café naïve — 東京 🙂🏽",
        "and another",  # merges by rank: "an" before "Ġa"
        "<|user|>hello<|end|> the<|eos|>",
        "a\u0000b\u007f\u00a0c",
    ]
    cases = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        cases.append({"text": text, "ids": ids})
    messages = [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "is the cell hot?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    chat = {
        "messages": messages,
        "add_generation_prompt": True,
        "text": rendered,
        "ids": tokenizer.encode(rendered, add_special_tokens=False),
    }
    return {"cases": cases, "chat": chat}


# --- models ---

COMMON = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=288,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    bos_token_id=BOS,
    eos_token_id=EOS,
    initializer_range=0.2,
)


def plain_rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 8000.0,  # wavelengths 6, 19, 59, 182, ...: one kept, two blended, the rest stretched
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(cls, **changes):
    options = COMMON | {"dtype": "float32"} | changes
    if cls in (Qwen2Config,):  # derives it
        options.pop("head_dim")
    return cls(**options)


def gemma_ropes(full, local):
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def stretched_rope(theta, factor):
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def whole_norms(weights):
    """As if the weights of norms were not stored less one."""
    return {name: value - 1 if "norm" in name else value for name, value in weights.items()}


# name: (config, ways of reading it wrongly that must show: other options, weights to neutralise, or other weights)
MODELS = {
    "llama2": (
        lambda **c: config(
            LlamaConfig, **(dict(num_key_value_heads=4, num_hidden_layers=3, intermediate_size=96, tie_word_embeddings=False, rope_parameters=plain_rope(10000.0)) | c)
        ),
        {"rope theta": dict(rope_parameters=plain_rope(500000.0)), "rms eps": dict(rms_norm_eps=1e-2)},
    ),
    "llama3": (
        lambda **c: config(LlamaConfig, **(dict(tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE) | c)),
        {
            "rope scaling": dict(rope_parameters=plain_rope(8000.0)),
            "rope blend": dict(rope_parameters=LLAMA3_ROPE | {"high_freq_factor": 1.001}),
            "rope theta": dict(rope_parameters=LLAMA3_ROPE | {"rope_theta": 10000.0}),
        },
    ),
    "mistral": (
        lambda **c: config(
            MistralConfig, **(dict(sliding_window=24, intermediate_size=160, tie_word_embeddings=False, rope_parameters=plain_rope(50000.0)) | c)
        ),
        {
            "no window": dict(sliding_window=None),
            "window one too long": dict(sliding_window=25),
            "window one too short": dict(sliding_window=23),
        },
    ),
    "qwen2": (
        lambda **c: config(
            Qwen2Config, **(dict(tie_word_embeddings=True, vocab_size=304, rms_norm_eps=1e-6, rope_parameters=plain_rope(100000.0)) | c)
        ),
        {"rope theta": dict(rope_parameters=plain_rope(10000.0)), "no bias": "bias"},
    ),
    "qwen3": (
        lambda **c: config(
            Qwen3Config, **(dict(tie_word_embeddings=False, head_dim=32, intermediate_size=96, rms_norm_eps=1e-6, rope_parameters=plain_rope(1000000.0)) | c)
        ),
        {"rope theta": dict(rope_parameters=plain_rope(10000.0)), "no q norm weight": "q_norm", "no k norm weight": "k_norm"},
    ),
    "llama-k": (  # rows of 256, for K-quants; exists as GGUF only
        lambda **c: config(
            LlamaConfig, **(dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64, tie_word_embeddings=False, rope_parameters=plain_rope(10000.0)) | c)
        ),
        {"rope theta": dict(rope_parameters=plain_rope(500000.0))},
    ),
    "gemma3": (  # as published: five layers with a window, one without
        lambda **c: config(
            Gemma3TextConfig,
            **(
                dict(
                    hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
                    rms_norm_eps=1e-6, sliding_window=8, query_pre_attn_scalar=16, tie_word_embeddings=True,
                    rope_parameters=gemma_ropes(stretched_rope(1000.0, 8.0), 10000.0),
                )
                | c
            ),
        ),
        {
            "no window": dict(sliding_window=512),
            "window one too long": dict(sliding_window=9),
            "window one too short": dict(sliding_window=7),
            "window in every layer": dict(layer_types=["sliding_attention"] * 6),
            "window in another layer": dict(layer_types=["full_attention"] + ["sliding_attention"] * 5),
            "global theta": dict(rope_parameters=gemma_ropes(stretched_rope(10000.0, 8.0), 10000.0)),
            "no stretching": dict(rope_parameters=gemma_ropes(plain_rope(1000.0), 10000.0)),
            "local theta": dict(rope_parameters=gemma_ropes(stretched_rope(1000.0, 8.0), 1000.0)),
            "attention scale": dict(query_pre_attn_scalar=8),
            "norms not less one": whole_norms,
            "no q norm weight": "q_norm",
            "no k norm weight": "k_norm",
            "no norm after attention": "post_attention_layernorm",
            "no norm after feed forward": "post_feedforward_layernorm",
        },
    ),
    "gemma3-cap": (  # what no published Gemma 3 has: both caps, layers out of pattern, a head of its own
        lambda **c: config(
            Gemma3TextConfig,
            **(
                dict(
                    hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                    sliding_window=12, query_pre_attn_scalar=6, tie_word_embeddings=False, dtype="bfloat16",
                    attn_logit_softcapping=3.0, final_logit_softcapping=25.0, attention_bias=True,
                    layer_types=["full_attention", "sliding_attention", "full_attention"],
                    rope_parameters=gemma_ropes(plain_rope(5000.0), 200.0),
                )
                | c
            ),
        ),
        {
            "no attention cap": dict(attn_logit_softcapping=None),
            "no logit cap": dict(final_logit_softcapping=None),
            "attention scale": dict(query_pre_attn_scalar=16),
            "window in pattern": dict(layer_types=["sliding_attention"] * 3),
            "no bias": "bias",
            "embedding scale not rounded": (dict(dtype="float32"), 0.01),
        },
    ),
    "qwen3_moe": (
        lambda **c: config(
            Qwen3MoeConfig,
            **(
                dict(
                    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
                    moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1],
                    rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters=plain_rope(1000000.0),
                )
                | c
            ),
        ),
        {
            "weights not normalised": dict(norm_topk_prob=False),
            "one expert too few": dict(num_experts_per_tok=2),
            "one expert too many": dict(num_experts_per_tok=4),
            "experts in another order": lambda weights: reversed_experts(weights),
            "gate and up exchanged": lambda weights: exchanged_gates(weights),
            "rope theta": dict(rope_parameters=plain_rope(10000.0)),
        },
    ),
    "qwen3_moe-step": (  # experts in every second layer, weights as they are, a window, biases
        lambda **c: config(
            Qwen3MoeConfig,
            **(
                dict(
                    hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
                    moe_intermediate_size=16, num_experts=5, num_experts_per_tok=2, norm_topk_prob=False, decoder_sparse_step=2,
                    use_sliding_window=True, sliding_window=12, attention_bias=True, dtype="bfloat16",
                    rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters=plain_rope(10000.0),
                )
                | c
            ),
        ),
        {
            "weights normalised": dict(norm_topk_prob=True),
            "no window": dict(use_sliding_window=False),
            "window one too long": dict(sliding_window=13),
            "no bias": "bias",
        },
    ),
}


def reversed_experts(weights):
    return {name: value[::-1] if ".experts." in name else value for name, value in weights.items()}


def exchanged_gates(weights):
    swap = lambda value: np.concatenate(np.split(value, 2, axis=1)[::-1], axis=1)
    return {name: swap(value) if name.endswith("gate_up_proj") else value for name, value in weights.items()}


def as_stored(cfg):
    """The dtype that weights are stored in. All is computed in float32."""
    return torch.bfloat16 if str(cfg.dtype).endswith("bfloat16") else torch.float32


def in_float32(model, stored):
    """Computes in float32 what a model of the dtype `stored` is: Gemma rounds the scale of its embedding to that."""
    model = model.float().eval()
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale.copy_(torch.tensor(embedding.scalar_embed_scale).to(stored))
    return model


def build(cfg):
    return in_float32(AutoModelForCausalLM.from_config(cfg, attn_implementation="eager"), as_stored(cfg))


def options(cfg):
    """transformers computes Gemma's cap of attention, but leaves it to the caller to say so."""
    cap = getattr(cfg, "attn_logit_softcapping", None)
    return {} if cap is None else {"softcap": cap}


def random_weights(model, rng):
    """By numpy, not torch, so that they do not depend on torch's version."""
    weights, cfg = {}, model.config
    gemma = cfg.model_type == "gemma3_text"
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        value = rng.standard_normal(shape)
        if "norm" in name:
            value = (0 if gemma else 1) + 0.3 * value
            if gemma and cfg.tie_word_embeddings and name == "model.norm.weight":
                value += 8  # the head is as narrow as the embedding
        elif name.endswith("bias"):
            value *= 0.5
        elif "embed_tokens" in name or "lm_head" in name:
            value *= 0.7
            if gemma and (cfg.tie_word_embeddings or "embed_tokens" in name):
                value /= cfg.hidden_size**0.5  # it is multiplied by that, and else drowns what layers add
            value[BOS:] *= 0.05  # special tokens and padding are never the likeliest: greedy text does not end
        elif name.endswith("mlp.gate.weight"):
            value *= 0.5  # a router that has a mind
        else:
            value *= 0.2
        value = torch.from_numpy(value.astype(np.float32))
        weights[name] = value.to(as_stored(cfg)).float().numpy()
    return weights


def with_weights(cfg, weights):
    model = build(cfg)
    state = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    assert ("lm_head.weight" in missing) == cfg.tie_word_embeddings
    model.tie_weights()
    return model


def prompts(rng):
    long = [BOS, *rng.integers(0, BOS, 39)]
    short = [*rng.integers(0, BOS, 7)]
    return {"long": np.array(long, dtype=np.int64), "short": np.array(short, dtype=np.int64)}


def greedy(model, prompt):
    """Prefill, then one token at a time over the cache; and the same in one forward pass without a cache."""
    kwargs = options(model.config)
    out = model(torch.from_numpy(prompt)[None], use_cache=True, **kwargs)
    prefill = out.logits[0].numpy()
    path = [int(prefill[-1].argmax())]
    decode = []
    for _ in range(STEPS):
        out = model(torch.tensor([path[-1:]]), past_key_values=out.past_key_values, use_cache=True, **kwargs)
        decode.append(out.logits[0, -1].numpy())
        path.append(int(decode[-1].argmax()))
    decode = np.array(decode)
    whole = model(torch.tensor([[*prompt, *path[:-1]]]), use_cache=False, **kwargs).logits[0].numpy()
    difference = float(np.abs(whole - np.concatenate([prefill, decode])).max())
    top = np.sort(np.concatenate([prefill[-1:], decode]), axis=1)
    gap = float((top[:, -1] - top[:, -2]).min())
    return dict(prefill=prefill, decode=decode, path=np.array(path, dtype=np.int64), gap=gap, difference=difference)


def run(cfg, weights, asked):
    model = with_weights(cfg, weights)
    return {name: greedy(model, prompt) for name, prompt in asked.items()}


def separated(results):
    return all(r["gap"] > GAP and len(set(r["path"].tolist())) > STEPS // 2 and r["path"].max() < BOS for r in results.values())


def check_teeth(name, weights, asked, results):
    """Every named way of misreading the model changes the logits of the very positions that are stored."""
    make, ablations = MODELS[name]
    for what, change in ablations.items():
        wrong, least = dict(weights), TEETH
        if isinstance(change, tuple):
            change, least = change
        cfg = make(**change) if isinstance(change, dict) else make()
        if isinstance(change, str):
            neutral = 0.0 if change == "bias" or cfg.model_type == "gemma3_text" else 1.0
            for key in wrong:
                if change in key:
                    wrong[key] = np.full_like(wrong[key], neutral)
        elif callable(change):
            wrong = change(wrong)
        prompt, right = asked["long"], results["long"]
        ids = torch.tensor([[*prompt, *right["path"][:-1]]])
        logits = with_weights(cfg, wrong)(ids, use_cache=False, **options(cfg)).logits[0].numpy()
        off = float(np.abs(logits[-STEPS:] - right["decode"]).max())
        print(f"  {what}: off by {off:.2f}")
        assert off > least, (name, what, off)


def save_expected(name, cfg, seed, asked, results):
    tensors, facts = {}, {"model": name, "seed": seed, "vocab_size": cfg.vocab_size, "steps": STEPS}
    for which, prompt in asked.items():
        r = results[which]
        assert r["difference"] < 2e-3, (name, r["difference"])
        prefill = r["prefill"] if which == "short" else r["prefill"][-1:]
        tensors |= {f"{which}.prompt": prompt, f"{which}.prefill": prefill, f"{which}.decode": r["decode"], f"{which}.tokens": r["path"]}
        facts[which] = {
            "prompt": prompt.tolist(),
            "tokens": r["path"].tolist(),
            "smallest_gap": round(r["gap"], 5),
            "largest_logit": round(float(np.abs(r["decode"]).max()), 3),
            "cache_against_whole": float(f"{r['difference']:.1e}"),
        }
    folder = HERE / "expected"
    folder.mkdir(exist_ok=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / f"{name}.safetensors")
    write_json(folder / f"{name}.json", facts)


def write_json(path, value):
    """Indented, but each list of ids on one line."""
    text = json.dumps(value, indent=1)
    text = re.sub(r"\[\s+(\d+(?:,\s+\d+)*)\s+\]", lambda ids: "[" + ", ".join(ids[1].split(",\n")) + "]", text)
    path.write_text(re.sub(r"(?<=\d,) +(?=\d)", " ", text) + "\n")


# --- Hugging Face folders ---


def save_folder(name, cfg, weights, tokenizer):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = with_weights(cfg, weights).to(as_stored(cfg))
    model.save_pretrained(folder, max_shard_size="160KB" if name == "llama3" else "50GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    if name in ("llama2", "gemma3"):
        old_style(folder)
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().rstrip("\n") + "\n")


def old_config(new):
    """config.json as transformers 4 wrote it."""
    old = {k: v for k, v in new.items() if k not in ("dtype", "rope_parameters", "layer_types")}
    rope = dict(new["rope_parameters"])
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern", 6)
        rope = dict(rope["full_attention"])
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    old["torch_dtype"] = new["dtype"]
    old["transformers_version"] = "4.45.0"
    return dict(sorted(old.items()))


def old_style(folder):
    """The whole folder as transformers 4 wrote it: rope_theta, and the chat template in tokenizer_config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(old_config(json.loads(path.read_text())), indent=2) + "\n")
    template = folder / "chat_template.jinja"
    path = folder / "tokenizer_config.json"
    options = json.loads(path.read_text())
    options["chat_template"] = template.read_text()
    options["tokenizer_class"] = "PreTrainedTokenizerFast"
    options.pop("backend", None)
    path.write_text(json.dumps(options, indent=2, ensure_ascii=False) + "\n")
    template.unlink()


def check_folder(folder, asked, results):
    """transformers reads back what was written, in both styles of config."""
    stored = json.loads((Path(folder) / "config.json").read_text())
    stored = torch.bfloat16 if "bfloat16" in (stored.get("dtype"), stored.get("torch_dtype")) else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = in_float32(model, stored)
    for which, prompt in asked.items():
        again = greedy(model, prompt)
        off = float(np.abs(again["decode"] - results[which]["decode"]).max())
        assert off < 1e-4, (folder, off)  # not zero: where the weights lie in memory decides how torch sums


def check_folder_with(folder, config_file, asked, results):
    with tempfile.TemporaryDirectory() as other:
        for path in folder.iterdir():
            shutil.copy(path, other)
        shutil.copy(config_file, Path(other) / "config.json")
        check_folder(other, asked, results)


# --- GGUF ---

ARCH = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}  # fmt: skip


def permute(weight, heads):
    """Rows from halves (rotate x[i] with x[i + d/2]) to pairs (x[2i] with x[2i + 1]), as convert_hf_to_gguf does for llama."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight, heads):
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def rope_factors(cfg):
    """What each of ggml's rope frequencies is divided by, as convert_hf_to_gguf writes it for llama3."""
    rope = cfg.rope_parameters
    dim, old = cfg.head_dim, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < old / high:
            factors.append(1)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def is_matrix(name):
    return name.endswith(".weight") and "norm" not in name


def split_experts(weights):
    """Gates and up projections apart, as GGUF has them."""
    out = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            out[f"{stem}gate_proj.weight"], out[f"{stem}up_proj.weight"] = np.split(value, 2, axis=1)
        else:
            out[f"{name}.weight" if name.endswith("experts.down_proj") else name] = value
    return out


def joined_experts(weights):
    out = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_proj.weight"):
            stem = name.removesuffix("gate_proj.weight")
            out[f"{stem}gate_up_proj"] = np.concatenate([value, weights[f"{stem}up_proj.weight"]], axis=1)
        elif name.endswith("experts.down_proj.weight"):
            out[name.removesuffix(".weight")] = value
        elif not name.endswith("experts.up_proj.weight"):
            out[name] = value
    return out


def gguf_tensors(cfg, weights, types):
    """GGUF name -> (bytes as stored, type), and the Hugging Face weights that a reader gets from them."""
    # A weight that is already {"type", "data"} is stored as it is: `gguf` cannot make K-quants.
    names = gguf.get_tensor_name_map(ARCH[cfg.model_type], cfg.num_hidden_layers)
    # Of a mixture's dense layers, which its own map leaves out.
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, cfg.num_hidden_layers)
    stored, read_back = {}, {}
    for hf_name, value in split_experts(weights).items():
        suffixes = (".weight", ".bias")
        name = names.get_name(hf_name, suffixes) or dense.get_name(hf_name, suffixes)
        if cfg.model_type == "gemma3_text" and "norm" in hf_name:
            # Less one there, whole here, as convert_hf_to_gguf has it.
            stored[name], read_back[hf_name] = (value + np.float32(1), Q.F32), value
            continue
        heads = None
        if cfg.model_type == "llama" and is_matrix(hf_name):
            if ".q_proj." in hf_name:
                heads = cfg.num_attention_heads
            elif ".k_proj." in hf_name:
                heads = cfg.num_key_value_heads
        if isinstance(value, dict):
            kind, data = value["type"], value["data"]
        else:
            kind = types(name) if is_matrix(hf_name) else Q.F32
            data = quants.quantize(permute(value, heads) if heads else value, kind)
        stored[name] = (data, kind)
        value = quants.dequantize(data, kind)
        read_back[hf_name] = unpermute(value, heads) if heads else value
    if "rope_type" in cfg.rope_parameters and cfg.rope_parameters["rope_type"] == "llama3":
        stored["rope_freqs.weight"] = (rope_factors(cfg), Q.F32)
    return stored, joined_experts(read_back)


def write_gguf(name, cfg, stored, file_type):
    folder = HERE / "gguf"
    folder.mkdir(exist_ok=True)
    w = gguf.GGUFWriter(folder / f"{name}.gguf", gguf.MODEL_ARCH_NAMES[ARCH[cfg.model_type]])
    w.add_type(gguf.GGUFType.MODEL)
    w.add_name(name)
    w.add_file_type(file_type)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(cfg.num_hidden_layers)
    w.add_context_length(cfg.max_position_embeddings)
    w.add_embedding_length(cfg.hidden_size)
    w.add_feed_forward_length(cfg.intermediate_size)
    w.add_head_count(cfg.num_attention_heads)
    w.add_head_count_kv(cfg.num_key_value_heads)
    w.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    rope = cfg.rope_parameters
    if cfg.model_type == "gemma3_text":
        rope = rope["full_attention"]
        assert cfg.query_pre_attn_scalar == cfg.head_dim and cfg.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
        w.add_sliding_window(cfg.sliding_window)
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    w.add_rope_freq_base(rope["rope_theta"])
    if cfg.model_type == "qwen3_moe":
        w.add_expert_count(cfg.num_experts)
        w.add_expert_used_count(cfg.num_experts_per_tok)
        w.add_expert_feed_forward_length(cfg.moe_intermediate_size)
    if cfg.model_type == "llama":
        w.add_vocab_size(cfg.vocab_size)
        w.add_rope_dimension_count(cfg.head_dim)
    if cfg.model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
        w.add_key_length(cfg.head_dim)
        w.add_value_length(cfg.head_dim)

    names = tokens()
    types = [gguf.TokenType.NORMAL] * BOS + [gguf.TokenType.CONTROL] * len(SPECIAL)
    for i in range(len(names), cfg.vocab_size):
        names.append(f"[PAD{i}]")
        types.append(gguf.TokenType.UNUSED)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(names)
    w.add_token_types(types)
    w.add_token_merges([" ".join(pair) for pair in MERGES])
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_pad_token_id(PAD)
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)

    for tensor, (data, kind) in stored.items():
        w.add_tensor(tensor, data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def f32(_):
    return Q.F32


def q8_0(_):
    return Q.Q8_0


def q4_0(name):
    return Q.Q8_0 if name == "token_embd.weight" else Q.Q4_0


def q8_0_experts(name):
    """What is rounded elsewhere may make the router choose otherwise, which would hide how experts are read."""
    return Q.Q8_0 if "_exps." in name else Q.F32


# model: file -> (types, general.file_type). F32 files compute what the folder does.
GGUF = {
    "llama3": {
        "llama3-f32": (f32, gguf.LlamaFileType.ALL_F32),
        "llama3-q8_0": (q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
        "llama3-q4_0": (q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    },
    "qwen2": {"qwen2-f32": (f32, gguf.LlamaFileType.ALL_F32)},
    "qwen3": {"qwen3-f32": (f32, gguf.LlamaFileType.ALL_F32)},
    "gemma3": {"gemma3-f32": (f32, gguf.LlamaFileType.ALL_F32)},
    "qwen3_moe": {
        "qwen3_moe-f32": (f32, gguf.LlamaFileType.ALL_F32),
        "qwen3_moe-q8_0": (q8_0_experts, gguf.LlamaFileType.MOSTLY_Q8_0),
    },
}

# A mixture, as Q4_K_M files have it, that meets every K-quant in every role with several row counts.
K_TYPES = {
    "embed_tokens": Q.Q4_K, "q_proj": Q.Q4_K, "k_proj": Q.Q5_K, "v_proj": Q.Q6_K, "o_proj": Q.Q5_K,
    "gate_proj": Q.Q4_K, "up_proj": Q.Q5_K, "down_proj": Q.Q6_K, "lm_head": Q.Q6_K,
}  # fmt: skip


def k_quant_weights(model, rng):
    """Random super-blocks: any bytes are valid once the f16 scales are finite."""
    weights = random_weights(model, rng)
    for name, value in weights.items():
        kind = next((k for part, k in K_TYPES.items() if part in name), None)
        if kind is None:
            continue
        rows, columns = value.shape
        raw = rng.integers(0, 256, (rows, columns // 256, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        spread = 0.3 if "lm_head" in name or "embed" in name else 0.1
        # A random super-block has a standard deviation of about 270 (Q4_K, minima 7.5 times d), 530 (Q5_K, 15.5
        # times) or 1370 (Q6_K) times d.
        d = spread * rng.uniform(0.7, 1.3, raw.shape[:2]) / {Q.Q4_K: 270, Q.Q5_K: 530, Q.Q6_K: 1370}[kind]
        if "lm_head" in name:
            d[BOS:] *= 0.05
        if kind == Q.Q6_K:
            d *= rng.choice([-1, 1], d.shape)
            scales = {208: d}
        else:
            scales = {0: d, 2: d * (7.5 if kind == Q.Q4_K else 15.5)}
        for offset, scale in scales.items():
            raw[..., offset : offset + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
        raw = raw.reshape(rows, -1)
        value = quants.dequantize(raw, kind)
        print(f"  {name} {kind.name}: std {value.std():.3f} mean {value.mean():+.3f}")
        weights[name] = {"type": kind, "data": raw}
    return weights


def make_model(index, name, tokenizer):
    make, _ = MODELS[name]
    cfg = make()
    for seed in count(1000 * (index + 1)):
        rng = np.random.default_rng(seed)
        asked = prompts(rng)
        if name == "llama-k":
            files = {"llama-k": (None, gguf.LlamaFileType.MOSTLY_Q4_K_M)}
            weights = k_quant_weights(build(cfg), rng)
        else:
            files = GGUF.get(name, {})
            weights = random_weights(build(cfg), rng)
        made = {}
        base = None
        if name != "llama-k":
            base = run(cfg, weights, asked)
            if not separated(base):
                continue
        for file, (types, _) in files.items():
            stored, read_back = gguf_tensors(cfg, weights, types)
            if types is f32:
                assert all(np.array_equal(read_back[k], v) for k, v in weights.items())
                made[file] = stored, read_back, base
                continue
            results = run(cfg, read_back, asked)
            if not separated(results):
                break
            made[file] = stored, read_back, results
        else:
            break
    print(f"{name}: seed {seed}")

    if base:
        check_teeth(name, weights, asked, base)
        save_folder(name, cfg, weights, tokenizer)
        check_folder(HERE / name, asked, base)
        save_expected(name, cfg, seed, asked, base)
    if name == "llama3":
        new = json.loads((HERE / name / "config.json").read_text())
        old = HERE / "llama3.old-config.json"
        old.write_text(json.dumps(old_config(new), indent=2) + "\n")
        check_folder_with(HERE / name, old, asked, base)
    for file, (stored, read_back, results) in made.items():
        write_gguf(file, cfg, stored, files[file][1])
        if results is not base:
            save_expected(file, cfg, seed, asked, results)
            if not base:
                check_teeth(name, read_back, asked, results)


def main():
    tokenizer = make_tokenizer()
    (HERE / "expected").mkdir(exist_ok=True)
    write_json(HERE / "expected" / "tokenizer.json", tokenizer_cases(tokenizer))
    chosen = sys.argv[1:] or MODELS
    for index, name in enumerate(MODELS):
        if name in chosen:
            make_model(index, name, tokenizer)


if __name__ == "__main__":
    main()
