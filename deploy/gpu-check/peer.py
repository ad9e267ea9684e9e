"""The same shape in PyTorch, as fast as it is without more than a few lines: transformers, a static cache, `torch.compile`.

    peer.py SHAPE [--device cuda] [--prompt 512] [--tokens 200] [--rounds 3]

Weights are random and of bfloat16. SHAPE is JSON with the names of transformers' LlamaConfig. Prints a line of JSON: the median
seconds until a prompt's first token (which is not compiled), tokens per second after it, and how often a step could not be recorded as a
graph of the device's: where that is not 0 it is not as fast as it can be. Ends with 3 where torch, transformers or the device are not here.
"""

import argparse
import json
import statistics
import sys
import time

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
except ImportError as e:
    print(e, file=sys.stderr)
    sys.exit(3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", type=json.loads)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        sys.exit(3)
    config = LlamaConfig(**args.shape)
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = LlamaForCausalLM(config).eval()

    def synchronize():
        if args.device == "cuda":
            torch.cuda.synchronize()

    def decode(token, at, cache):
        out = model(token, cache_position=at, past_key_values=cache, use_cache=True)
        return out.logits[:, -1:].argmax(-1)

    decode = torch.compile(decode, mode="reduce-overhead", fullgraph=True)
    # One cache for all rounds, and every place in it: what is recorded has their addresses.
    cache = StaticCache(config=config, max_cache_len=args.prompt + args.tokens)
    places = torch.arange(args.prompt + args.tokens, device=args.device)
    firsts, rates = [], []
    with torch.inference_mode():
        # The first two rounds compile and record.
        for round in range(args.rounds + 2):
            cache.reset()
            prompt = torch.randint(3, config.vocab_size, (1, args.prompt), device=args.device)
            synchronize()
            begun = time.perf_counter()
            at = places[: args.prompt]
            out = model(prompt, cache_position=at, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            token.item()
            first = time.perf_counter()
            for i in range(args.prompt, args.prompt + args.tokens - 1):
                token = decode(token.clone(), places[i : i + 1], cache)
            token.item()
            done = time.perf_counter()
            if round >= 2:
                firsts.append(first - begun)
                rates.append((args.tokens - 1) / (done - first))
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    told = {"first": statistics.median(firsts), "rate": statistics.median(rates), "skips": skips, "torch": torch.__version__}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
