"""A model that says what it is told to: it thinks, answers, and calls two tools if its template is told of any.

Its layers add nothing, its embeddings are unit vectors, and its head maps each token's vector to the next token: what comes
depends on the last token alone, at any temperature. A prompt of its template ends with one of three marks, each of which
begins a chain. So clients can be tested with tools that a model chooses to call, and with thoughts, which no small
trained model gives.
"""
import array
import contextlib
import json
import pathlib
import struct

# The chains, by the mark that a prompt ends with. No piece is in two places, as each says what comes next.
ANSWER = ["Moses", " was", " a", " man", " of", " the", " tribe", " of Levi", "."]
THOUGHT = ["I", " should", " look", " into", " Exodus"]
FIRST = ['{"name": "find"', ', "arguments": {"who": "', "Mo", "ses ", 'of Levi"}}']
SECOND = ['{"name":"count"', ',"arguments":{"what":"', "plag", 'ues"}}']
CHAINS = {
    "<|says|>": ANSWER,
    "<|thinks|>": ["<think>", *THOUGHT, "</think>", "\n\n"],
    "<|calls|>": ["<tool_call>", *FIRST, "</tool_call>", "\n<tool_call>", *SECOND, "</tool_call>\n"],
}
# The answer, the thought before it, and the calls.
SAID = "".join(ANSWER)
THOUGHT_SAID = "".join(THOUGHT)
CALLED = [("find", {"who": "Moses of Levi"}), ("count", {"what": "plagues"})]

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{% if tools %}<|calls|>{% elif enable_thinking %}<|thinks|>{% else %}<|says|>{% endif %}{% endif %}"
    "{# <think> and </think> stand around thoughts, </tool_call> after calls #}"
)
SIZE = 512


def byte_words():
    """How byte-level tokenizers write each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    words = {b: chr(b) for b in plain}
    rest = [b for b in range(256) if b not in words]
    return {**words, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def write(folder):
    """Writes the model's files into a new folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    words = byte_words()
    specials = ["<|bos|>", "<|eos|>", *CHAINS]
    ids = {word: i for i, word in enumerate(specials)}
    ids |= {words[b]: len(specials) + b for b in range(256)}
    pieces = ["<|says|>", *ANSWER, "<|thinks|>", *CHAINS["<|thinks|>"], "<|calls|>", *CHAINS["<|calls|>"]]
    after = {}
    for begin, chain in CHAINS.items():
        for one, next_ in zip([begin, *chain], [*chain, "<|says|>" if begin == "<|thinks|>" else "<|eos|>"]):
            assert one not in after, one
            after[one] = next_
    # A thought is followed by the answer, which begins as after its own mark.
    after["\n\n"] = ANSWER[0]
    for piece in pieces:
        word = piece if piece in ids else "".join(words[b] for b in piece.encode())
        ids.setdefault(word, len(ids))
    of = {piece: ids[piece if piece in ids else "".join(words[b] for b in piece.encode())] for piece in [*pieces, "<|eos|>"]}
    count = len(ids)
    assert count <= SIZE, count

    def unit(at):
        row = array.array("f", bytes(4 * SIZE))
        row[at] = 1.0
        return row.tobytes()

    # Whatever else comes last is followed by the answer.
    before = {of[ANSWER[0]]: [i for i in range(count) if i not in {of[one] for one in after}]}
    for one, next_ in after.items():
        before.setdefault(of[next_], []).append(of[one])
    head = []
    for token in range(count):
        row = array.array("f", bytes(4 * SIZE))
        for last in before.get(token, []):
            row[last] = 1.0
        head.append(row.tobytes())
    heads, width, inner = 4, 64, 64
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": ([count, SIZE], b"".join(unit(i) for i in range(count))),
        "lm_head.weight": ([count, SIZE], b"".join(head)),
        "model.norm.weight": ([SIZE], array.array("f", [1.0] * SIZE).tobytes()),
        f"{layer}input_layernorm.weight": ([SIZE], array.array("f", [1.0] * SIZE).tobytes()),
        f"{layer}post_attention_layernorm.weight": ([SIZE], array.array("f", [1.0] * SIZE).tobytes()),
    }
    nothing = {"self_attn.q_proj": (heads * width, SIZE), "self_attn.k_proj": (heads * width, SIZE), "self_attn.v_proj": (heads * width, SIZE),
               "self_attn.o_proj": (SIZE, heads * width), "mlp.gate_proj": (inner, SIZE), "mlp.up_proj": (inner, SIZE), "mlp.down_proj": (SIZE, inner)}
    for name, (rows, columns) in nothing.items():
        tensors[f"{layer}{name}.weight"] = ([rows, columns], bytes(4 * rows * columns))
    listed, at = {}, 0
    for name, (shape, data) in tensors.items():
        listed[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    told = json.dumps(listed).encode()
    told += b" " * (-len(told) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(told)) + told + b"".join(data for _, data in tensors.values()))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": count, "hidden_size": SIZE, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width, "hidden_act": "silu",
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "bos_token_id": ids["<|bos|>"], "eos_token_id": ids["<|eos|>"], "torch_dtype": "float32"}))
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": ids[word], "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for word in specials],
        "pre_tokenizer": bytes_, "decoder": bytes_,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": ids, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE}))
    return folder


@contextlib.contextmanager
def loaded(cell):
    """Within, a running Hotcell has the model `puppet`; its name."""
    if not (cell.folder / "puppet").exists():
        write(cell.folder / "puppet")
    cell.command("load", str(cell.folder / "puppet"), "--name", "puppet")
    try:
        yield "puppet"
    finally:
        cell.command("unload", "puppet")
