#!/usr/bin/env python3
"""Makes the bundled model: a tiny Llama trained on the King James Bible, on a CPU, in under an hour.

    train.py [--minutes 45] [--text verses.txt]     train, and write the Hugging Face folder beside this file
    train.py --resume                               go on from the last checkpoint in --work
    train.py --golden                               write golden.json from the saved folder (needs transformers)

Without --text the text comes from the program `bible` (Debian: apt-get install bible-kjv).
Training needs torch, numpy, tokenizers and safetensors. The schedule follows the clock, so a run on another
machine takes another number of steps and ends with other weights; the seed fixes everything else.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
BOS_ID, EOS_ID = 0, 1
VERSES = 31102

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}

# Formal only: the model knows no roles. The template writes the BOS token itself, as is the custom.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}"

# Validation: blocks of consecutive verses, spread evenly, never trained on.
BLOCK, BLOCKS, FIRST_BLOCK = 8, 48, 400

# Lengths of the training windows, in turn: short ones are cheap, long ones keep all positions usable.
CYCLE = (256, 512, 256, 512, 256, 512, 256, 1024)


# ---------------------------------------------------------------- text

def read_verses(path):
    """[(book, chapter, text)], labels and doubled spaces removed."""
    if path:
        raw = Path(path).read_text(encoding="utf-8")
    else:
        raw = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], check=True, capture_output=True, text=True).stdout
    verses = []
    for line in raw.splitlines():
        m = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.+)", line.strip())
        if m is None:
            sys.exit(f"not a verse: {line!r}")
        text = re.sub(r"[\[\]{}<>*#]", "", m[4])
        verses.append((m[1], int(m[2]), re.sub(r"\s+", " ", text).strip()))
    if len(verses) != VERSES:
        sys.exit(f"expected {VERSES} verses, got {len(verses)}")
    return verses


def arrange(verses):
    """Each verse with what precedes it: one verse a line, an empty line between chapters, a book is a document."""
    out = []
    for i, (book, chapter, text) in enumerate(verses):
        if i == 0 or verses[i - 1][0] != book:
            lead = None
        elif verses[i - 1][1] != chapter:
            lead = "\n"
        else:
            lead = ""
        out.append((lead, text + "\n"))
    return out


def held_out(n):
    step = (n - FIRST_BLOCK) // BLOCKS
    return {FIRST_BLOCK + b * step + k for b in range(BLOCKS) for k in range(BLOCK)}


# ---------------------------------------------------------------- tokenizer

def train_tokenizer(lines):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], min_frequency=2, special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)])
    assert tok.get_vocab_size() == CONFIG["vocab_size"]
    assert tok.token_to_id(BOS) == BOS_ID and tok.token_to_id(EOS) == EOS_ID
    every = "".join(map(chr, [*range(0x0, 0x800), 0x20AC, 0x4E2D, 0xFFFD, 0x1F525, 0x10FFFF]))
    for s in ("In the beginning", " two  spaces\t\r\n", every):
        assert tok.decode(tok.encode(s).ids) == s
    return tok


def write_folder(out, tok, state):
    """`state`: name → tensor under Hugging Face names; written as BF16."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    dump = lambda name, obj: (out / name).write_text(json.dumps(obj, indent=2, ensure_ascii=False) + "\n")
    dump("config.json", CONFIG)
    dump("generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "max_length": 1024})
    dump("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    })
    tok.save(str(out / "tokenizer.json"))
    part = out / "model.safetensors.part"
    save_file({k: v.detach().to(torch.bfloat16).contiguous() for k, v in state.items()}, part, {"format": "pt"})
    part.chmod(0o644)
    part.replace(out / "model.safetensors")


# ---------------------------------------------------------------- model

def build(torch, dtype, dropout):
    """The Llama of CONFIG. Parameters stay float32; the arithmetic runs in `dtype`."""
    import numpy as np
    F = torch.nn.functional
    c = CONFIG
    H, I, L, V = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["vocab_size"]
    nq, nk, hd, eps = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"]

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            xf = x.float()
            r = torch.linalg.vector_norm(xf, dim=-1, keepdim=True).square_().div_(H).add_(eps).rsqrt_()
            ctx.save_for_backward(x, w, r)
            return (xf * r).mul_(w).to(dtype)

        @staticmethod
        def backward(ctx, g):
            x, w, r = ctx.saved_tensors
            g, n = g.float(), x.float() * r
            gw = (g * n).sum((0, 1))
            g = g * w
            return (g - n * (g * n).mean(-1, keepdim=True)).mul_(r).to(x.dtype), gw

    class Loss(torch.autograd.Function):
        """Mean cross entropy; the logits exist only a chunk at a time, and the gradient is made on the way."""
        @staticmethod
        def forward(ctx, h, w, target):
            wl, n = w.to(dtype), (target >= 0).sum()
            gh, gw, total = torch.empty_like(h), torch.zeros_like(w), 0.0
            for i in range(0, h.shape[0], 1024):
                t = target[i:i + 1024]
                logits = (h[i:i + 1024] @ wl.T).float()
                lp = torch.log_softmax(logits, -1)
                rows, keep = torch.arange(len(t)), (t >= 0)
                total = total - lp[rows, t.clamp_min(0)][keep].sum()
                p = lp.exp_()
                p[rows, t.clamp_min(0)] -= 1
                p.mul_((keep / n)[:, None])
                p = p.to(dtype)
                gh[i:i + 1024] = p @ wl
                gw += p.T @ h[i:i + 1024]
            ctx.save_for_backward(gh, gw)
            return total / n

        @staticmethod
        def backward(ctx, g):
            gh, gw = ctx.saved_tensors
            return gh * g, gw * g, None

    class Llama(torch.nn.Module):
        def __init__(self):
            super().__init__()
            gen = torch.Generator().manual_seed(1611)
            mat = lambda o, i, s: torch.nn.Parameter(torch.randn(o, i, generator=gen) * s)
            one = lambda: torch.nn.Parameter(torch.ones(H))
            p = {"model.embed_tokens.weight": mat(V, H, 0.02)}
            for l in range(L):
                b = f"model.layers.{l}."
                p[b + "input_layernorm.weight"] = one()
                p[b + "self_attn.q_proj.weight"] = mat(nq * hd, H, 0.05)
                p[b + "self_attn.k_proj.weight"] = mat(nk * hd, H, 0.05)
                p[b + "self_attn.v_proj.weight"] = mat(nk * hd, H, 0.05)
                p[b + "self_attn.o_proj.weight"] = mat(H, nq * hd, 0.0)
                p[b + "post_attention_layernorm.weight"] = one()
                p[b + "mlp.gate_proj.weight"] = mat(I, H, 0.05)
                p[b + "mlp.up_proj.weight"] = mat(I, H, 0.05)
                p[b + "mlp.down_proj.weight"] = mat(H, I, 0.0)
            p["model.norm.weight"] = one()
            self.p = p                                        # Hugging Face names, which torch forbids (dots)
            self.all = torch.nn.ParameterList(p.values())
            f = 1.0 / c["rope_theta"] ** (torch.arange(0, hd, 2).float() / hd)
            a = torch.outer(torch.arange(c["max_position_embeddings"]).float(), f)
            a = torch.cat([a, a], -1)
            self.cos, self.sin = a.cos().to(dtype), a.sin().to(dtype)

        @staticmethod
        def drop(x, noise):
            if noise is None or not dropout:
                return x
            mask = torch.from_numpy(np.frombuffer(noise.bytes(x.numel()), np.uint8).copy()) >= round(dropout * 256)
            return x * (mask.view(x.shape).to(x.dtype) * (1 / (1 - round(dropout * 256) / 256)))

        def forward(self, ids, target, noise=None):
            """Mean loss. `noise` is the byte generator for dropout; without it there is none."""
            p, (B, T) = self.p, ids.shape
            cos, sin = self.cos[:T], self.sin[:T]
            emb = p["model.embed_tokens.weight"]
            x = self.drop(F.embedding(ids, emb), noise)              # the residual stream stays float32
            for l in range(L):
                b = f"model.layers.{l}."
                w = lambda *names: torch.cat([p[f"{b}{n}.weight"] for n in names]).to(dtype)
                h = RmsNorm.apply(x, p[b + "input_layernorm.weight"])
                qkv = F.linear(h, w("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
                qkv = qkv.view(B, T, nq + 2 * nk, hd).transpose(1, 2)
                qk, v = qkv[:, :nq + nk], qkv[:, nq + nk:]
                half = torch.cat([-qk[..., hd // 2:], qk[..., :hd // 2]], -1)
                qk = qk * cos + half * sin
                k = qk[:, nq:].repeat_interleave(nq // nk, 1)
                v = v.repeat_interleave(nq // nk, 1)
                o = F.scaled_dot_product_attention(qk[:, :nq], k, v, is_causal=True)
                o = o.transpose(1, 2).reshape(B, T, nq * hd)
                x = x + self.drop(F.linear(o, w("self_attn.o_proj")), noise)
                h = RmsNorm.apply(x, p[b + "post_attention_layernorm.weight"])
                g, u = F.linear(h, w("mlp.gate_proj", "mlp.up_proj")).chunk(2, -1)
                x = x + self.drop(F.linear(F.silu(g) * u, w("mlp.down_proj")), noise)
            h = RmsNorm.apply(x, p["model.norm.weight"])
            return Loss.apply(h.view(B * T, H), emb, target.reshape(-1))

    return Llama()


def build_muon(torch, dtype):
    class Muon(torch.optim.Optimizer):
        """Momentum, then each matrix's update made orthogonal by Newton-Schulz steps (Keller Jordan, 2024)."""
        def __init__(self, params, lr, weight_decay, pool, momentum=0.95):
            super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
            self.pool = pool

        def step(self):
            for group in self.param_groups:
                @torch.no_grad()
                def one(p):
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    m = state["m"].lerp_(p.grad, 1 - group["momentum"])
                    u = p.grad.lerp(m, group["momentum"])
                    flip = u.shape[0] > u.shape[1]
                    x = u.T if flip else u
                    x = (x / (x.norm() + 1e-7)).to(dtype)
                    for _ in range(5):
                        a = x @ x.T
                        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
                    u = (x.T if flip else x).float()
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(u, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)
                list(self.pool.map(one, group["params"]))

    return Muon


# ---------------------------------------------------------------- training

def train(args):
    import numpy as np
    import torch
    # Each thread takes whole micro-batches, rather than half of every operation: on a machine that has other work
    # to do, threads that meet at the end of every operation mostly wait for each other.
    pool = ThreadPoolExecutor(args.threads, initializer=lambda: torch.set_num_threads(1))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[args.dtype]

    verses = arrange(read_verses(args.text))
    out_of = held_out(len(verses))
    kept = [v for i, v in enumerate(verses) if i not in out_of]
    tok = train_tokenizer([(lead or "") + text for lead, text in kept])
    enc = lambda s: tok.encode(s, add_special_tokens=False).ids

    stream, starts, openings = [], [], []
    for lead, text in kept:
        if lead is None and stream:
            stream += [EOS_ID, BOS_ID]
        stream += enc(lead or "")
        starts.append(len(stream))
        if lead is None:
            openings.append(len(stream))
        stream += enc(text)
    stream.append(EOS_ID)
    n_bytes = sum(len((lead or "") + text) for lead, text in kept)
    stream, starts = np.array(stream), np.array(starts)
    print(f"train: {len(kept)} verses, {n_bytes} bytes, {len(stream)} tokens; held out: {len(out_of)} verses", flush=True)

    def blocks(first):
        """Evaluation rows: each block of verses after a BOS; (ids, target, bytes)."""
        rows, size = [], 0
        step = (len(verses) - FIRST_BLOCK) // BLOCKS
        for b in range(BLOCKS):
            s = "".join((lead or "") + text for lead, text in verses[first + b * step:][:BLOCK])
            rows.append([BOS_ID] + enc(s))
            size += len(s.encode())
        width = max(map(len, rows))
        ids = torch.tensor([r + [EOS_ID] * (width - len(r)) for r in rows])
        target = torch.tensor([r[1:] + [-1] * (width - len(r) + 1) for r in rows])
        return ids, target, size
    val, same = blocks(FIRST_BLOCK), blocks(FIRST_BLOCK + 300)   # the second lies in the training text

    def rows(length):
        """Endless windows of `length` + 1 tokens: BOS, then text from the start of a verse; shuffled each pass."""
        while True:
            cuts = np.arange(rng.integers(length), len(stream), length)
            cuts = np.minimum(cuts, len(stream) - length)
            cuts = starts[np.maximum(np.searchsorted(starts, cuts, "right") - 1, 0)]
            for s in rng.permutation(cuts):
                # Only here does BOS mean what it will mean before a prompt: a text begins.
                if rng.random() < args.openings:
                    s = min(rng.choice(openings), len(stream) - length)
                yield np.concatenate([[BOS_ID], stream[s:s + length]])

    feeds = {t: rows(t) for t in set(CYCLE)}

    model = build(torch, dtype, args.dropout)
    n = sum(p.numel() for p in model.all)
    print(f"parameters: {n}", flush=True)
    mats = [p for k, p in model.p.items() if p.ndim == 2 and "layers" in k]
    rest = [p for k, p in model.p.items() if p.ndim == 1]
    emb = [model.p["model.embed_tokens.weight"]]
    opts = [
        build_muon(torch, dtype)(mats, args.lr, args.weight_decay, pool),
        torch.optim.AdamW([{"params": emb, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}],
                          lr=args.lr_embed, betas=(0.9, 0.95), eps=1e-10),
    ]
    for o in opts:
        for g in o.param_groups:
            g["base"] = g["lr"]

    args.work.mkdir(parents=True, exist_ok=True)
    ckpt = args.work / "checkpoint.pt"
    elapsed, step, seen = 0.0, 0, 0
    if args.resume:
        c = torch.load(ckpt)
        model.load_state_dict(c["model"])
        for o, s in zip(opts, c["opts"]):
            o.load_state_dict(s)
        elapsed, step, seen = c["elapsed"], c["step"], c["seen"]
        rng = np.random.default_rng(args.seed + step)

    def evaluate():
        @torch.no_grad()
        def part(it):
            return model(*it).item() * (it[1] >= 0).sum().item()
        v, t = (sum(pool.map(part, zip(ids.split(4), target.split(4)))) / (target >= 0).sum().item()
                for ids, target, _ in (val, same))
        bits = v * (val[1] >= 0).sum().item() / val[2] / math.log(2)
        return v, t, bits

    def save():
        torch.save({"model": model.state_dict(), "opts": [o.state_dict() for o in opts],
                    "elapsed": elapsed, "step": step, "seen": seen}, ckpt.with_suffix(".part"))
        ckpt.with_suffix(".part").replace(ckpt)
        write_folder(args.out, tok, model.p)

    log = open(args.work / "log.txt", "a")
    def say(line):
        print(line, flush=True)
        print(line, file=log, flush=True)

    budget = args.minutes * 60
    params = list(model.p.values())
    began, mean, last_eval, last_save = time.monotonic() - elapsed, None, elapsed, elapsed
    while elapsed < budget:
        frac = elapsed / budget
        scale = min(1.0, (step + 1) / 60) * min(1.0, (1 - frac) / (1 - args.plateau))
        for o in opts:
            for g in o.param_groups:
                g["lr"] = g["base"] * scale
        length = CYCLE[step % len(CYCLE)]
        batch = torch.from_numpy(np.stack([next(feeds[length]) for _ in range(args.tokens // length)]))
        parts = batch.split(max(1, args.micro // length))
        def micro(i):
            noise = np.random.Generator(np.random.SFC64([args.seed, step, i]))
            loss = model(parts[i][:, :-1], parts[i][:, 1:], noise)
            return loss.item(), torch.autograd.grad(loss, params)
        done = list(pool.map(micro, range(len(parts))))
        loss = sum(d[0] for d in done) / len(done)
        for p, *g in zip(params, *(d[1] for d in done)):
            p.grad = torch.stack(g).mean(0) if len(g) > 1 else g[0]
        for o in opts:
            o.step()
            o.zero_grad(set_to_none=True)
        step, seen, elapsed = step + 1, seen + args.tokens, time.monotonic() - began
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        if elapsed - last_eval > args.every or elapsed >= budget:
            v, t, bits = evaluate()
            say(f"{elapsed:6.0f} s  step {step:5d}  passes {seen / len(stream):5.2f}  lr x{scale:.3f}  running {mean:.4f}  "
                f"train {t:.4f}  val {v:.4f} ({bits:.3f} bit/byte)  {seen / elapsed:.0f} tok/s")
            last_eval = elapsed
        if elapsed - last_save > args.save_every:
            save()
            last_save = elapsed
    save()


# ---------------------------------------------------------------- golden

def golden(args):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32, attn_implementation="eager").eval()
    prompt, n = "In the beginning", 48
    ids = tok(prompt)["input_ids"]
    with torch.no_grad():
        run = list(ids)
        for _ in range(n):                                    # no cache, no sampling settings: plain argmax
            run.append(int(model(torch.tensor([run])).logits[0, -1].argmax()))
        logits = model(torch.tensor([run])).logits[0]
    top = logits[len(ids) - 1:-1].topk(2).values
    print(f"smallest gap between the two best logits: {(top[:, 0] - top[:, 1]).min():.4f}")
    text = tok.decode(run, skip_special_tokens=True)
    (args.out / "golden.json").write_text(json.dumps(
        {"prompt": prompt, "ids": ids, "greedy": run[len(ids):], "text": text}, ensure_ascii=False) + "\n")
    print(text)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--text", help="file of labelled verses, as `bible -f` prints them")
    a.add_argument("--out", type=Path, default=HERE)
    a.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kjv-train", help="checkpoint and log")
    a.add_argument("--minutes", type=float, default=45)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    a.add_argument("--seed", type=int, default=1611)
    a.add_argument("--tokens", type=int, default=4096, help="tokens a step")
    a.add_argument("--micro", type=int, default=1024, help="tokens a micro-batch")
    a.add_argument("--lr", type=float, default=0.02, help="Muon, for the layers' matrices")
    a.add_argument("--lr-embed", type=float, default=0.003, help="AdamW, for embeddings and norms")
    a.add_argument("--weight-decay", type=float, default=0.1)
    a.add_argument("--dropout", type=float, default=0.05)
    a.add_argument("--plateau", type=float, default=0.3, help="share of the time before the rate falls to zero")
    a.add_argument("--openings", type=float, default=0.1, help="share of the windows that begin where a book begins")
    a.add_argument("--every", type=float, default=60, help="seconds between evaluations")
    a.add_argument("--save-every", type=float, default=180)
    a.add_argument("--resume", action="store_true")
    a.add_argument("--golden", action="store_true")
    args = a.parse_args()
    golden(args) if args.golden else train(args)


if __name__ == "__main__":
    main()
