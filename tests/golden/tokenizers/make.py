"""Makes the tokenizer goldens: small vocabularies, and what other people's code says about nasty texts.

    /tmp/venv/bin/python make.py      (needs tokenizers, transformers, sentencepiece, gguf, protobuf)

Writes beside itself, for each of gpt2, llama3, qwen2 (byte-level BPE) and llama (SentencePiece BPE):
    NAME.tokenizer.json   Hugging Face's format
    NAME.vocab.json       the same vocabulary as GGUF's tokenizer.ggml.* values, as JSON
    NAME.gguf             the same as a GGUF file without tensors
and cases.json (ids and decoded text from `tokenizers`; `sentencepiece` for llama's literal ids) and chat.json
(chat templates and what transformers' Jinja environment makes of them).
"""

import io
import json
import random
from pathlib import Path

import gguf
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_base import generate_merges
from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = Path(__file__).parent

TRAIN = [
    "The quick brown fox jumps over the lazy dog. It's what they've said, isn't it? I'm sure we'll see; he'd agree.",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
    "and darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters.",
    "Der schnelle braune Fuchs springt über den faulen Hund; größer, schöner, weiß man's? Überall Äpfel.",
    "Le cœur a ses raisons que la raison ne connaît point. L'été, à l'hôtel, garçon! Déjà vu: où êtes-vous?",
    "В начале сотворил Бог небо и землю. Земля же была безвидна и пуста, и тьма над бездною.",
    "元始に神天地を創造たまへり。地は定形なく曠空くして黑暗淵の面にあり。日本語のテキストです。",
    "起初神创造天地。地是空虚混沌，渊面黑暗；神的灵运行在水面上。你好，世界！",
    "태초에 하나님이 천지를 창조하시니라. 안녕하세요 세계",
    "בראשית ברא אלהים את השמים ואת הארץ. في البدء خلق الله السماوات والأرض",
    "def main(argc, argv):\n    for i in range(10):\n        if i % 2 == 0:\n            print(f\"{i:>3}\")\n    return 0\n",
    "fn main() {\n\tlet x: Vec<u32> = (0..100).map(|i| i * 2).collect();\n\tassert_eq!(x.len(), 100);\n}\n",
    "1 12 123 1234 12345 2024-11-21 3.14159 1,000,000 0xDEADBEEF 100% $5.00 #1 @user a@b.org https://x.y/z?q=1&r=2",
    "😀 😃 👍 ❤️ 🎉 naïve café résumé coöperate — “quoted” ‘single’ … • bullet",
    "the the the and and and of of of in in in to to to    four    spaces        eight spaces\n\n\n\ndone",
] * 4

NASTY = [
    "", " ", "  ", "   ", " a", "a ", " a ", "  a  b   c    ", "\t", "\n", "\r\n", "\n\n\n", " \n \n ", "\t\ttabs\tand  spaces \t x",
    "line one\r\nline two\r\n\r\nline four\n", "trailing newline\n", "hello world", "Hello, World!", "HELLO WORLD",
    "It's, IT'S, we'll, WE'LL, I'd, they're, 's 't 're 've 'm 'll 'd '", "don’t can’t won’t", "camelCaseWordsAreHard HTTPServer XMLHttpRequest",
    "👨‍👩‍👧‍👦 family", "🏳️‍🌈🏴‍☠️", "👍🏽👍🏿", "🇩🇪🇯🇵🇺🇸", "❤️‍🔥", "😀😃😄", "a😀b", "日本語テキスト", "中文文本，没有空格。", "한국어 텍스트", "混ぜmixed中English文",
    "e\u0301 n\u0303 a\u0308\u0323", "\u1e9b\u0323 \u0041\u030a \u212b", "Z\u0351\u036b\u0343\u036aa\u0321l\u0340go\u0489",
    "\u0915\u094d\u0937\u093f हिन्दी", "ไทยภาษา", "שלום עולם", "مرحبا بالعالم", "mixed שלום and مرحبا", "\u202eright to left override\u202c", "\u200b\u200c\u200d\u2060zero width\ufeff",
    "\u00a0nbsp\u00a0\u2003em\u3000ideographic", "nul\x00in the middle", "\x00", "\x01\x02\x1b[31mred\x1b[0m\x7f", "bell\x07 vt\x0b ff\x0c",
    "\ufffd", "a\ufffd\ufffdb", "\uffff\U0010ffff\ue000", "1", "12", "123", "1234567890", "1 22 333 4444 55555", "٣٤٥ Ⅷ ½ ² 一二三", "3.14e-10 0xFF 1_000", "$1,234.56 100% 5°C",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass", "for (int i=0;i<n;++i){a[i]+=b[i];}", "{\"key\": [1, 2.5, null, true], \"s\": \"\\u00e9\\n\"}",
    "<html><body class='x'>&amp;</body></html>", "a/b\\c|d~e`f^g", "!!!???...---___***===+++", "((((((((((", "))))]]]]}}}}", "----------------", "================================",
    "supercalifragilisticexpialidocious" * 3, "a" * 100, "ab" * 70, "the" * 40, " " * 37, "\n" * 23, "x" + " " * 65 + "y", "長" * 30,
    "<s>", "</s>", "<unk>", "text <s> inside </s> text", "<|begin_of_text|>", "<|endoftext|>", "say <|eot_id|> now", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|", "<0x41><0x0A>",
    "<tool_call>x</tool_call>", "\u2581", "a\u2581b", "\u2581\u2581 x", "Ġ Ċ ĉ", "ĠhelloĊ", "ﬁ ligature ﬀ", "ａｂｃ１２３", "ǅ ǈ titlecase", "ß SS ẞ İ ı", "ﷺ",
    " leading", "trailing ", "\n leading newline", "tab\t", "  two leading", "multiple\n\n  paragraphs\n\n\n   here", "In the beginning God created the heaven and the earth.",
    "It's 2024-11-21T12:34:56Z, isn't it?", "über größer Äpfel œuvre", "В начале сотворил Бог", "a\r\nb\rc\nd", "\r", "\u0085next\u2028line\u2029para",
]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK_V3 = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)


def byte_level(use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE = {
    "gpt-2": byte_level(use_regex=True),
    "llama-bpe": pre_tokenizers.Sequence([split(LLAMA3), byte_level()]),
    "qwen2": pre_tokenizers.Sequence([split(QWEN2), byte_level()]),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]),
    "tekken": pre_tokenizers.Sequence([split(TEKKEN), byte_level()]),
    "gpt-4o": pre_tokenizers.Sequence([split(GPT4O), byte_level()]),
    "deepseek-v3": pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), byte_level()]),
}


def train_bpe(pre, size=460):
    tok = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tok.pre_tokenizer = PRE[pre]
    tok.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tok.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(TRAIN, trainer)
    return tok


def special(tok, *texts):
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in texts])


def bpe_vocab(tok, pre, bos=None, eos=None, add_bos=None):
    """The tokenizer.ggml.* values as llama.cpp's converter writes them."""
    state = json.loads(tok.to_str())
    ids = tok.get_vocab(with_added_tokens=True)
    added = {t["content"]: t for t in state["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    types = [(3 if added[t]["special"] else 4) if t in added else 1 for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    return dict(model="gpt2", pre=pre, tokens=tokens, token_types=types, merges=merges, scores=[], bos=ids.get(bos),
                eos=ids.get(eos), unk=None, add_bos=add_bos, add_eos=None, add_space_prefix=None)


def train_sentencepiece():
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TRAIN for line in text.split("\n") if line]), model_writer=out,
        model_type="bpe", vocab_size=760, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True, character_coverage=0.98,
        user_defined_symbols=["<tool_call>"], minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    n = sp.get_piece_size()
    tokens = [sp.id_to_piece(i) for i in range(n)]
    scores = [sp.get_score(i) for i in range(n)]

    def kind(i):
        if sp.is_byte(i): return 6
        if sp.is_unknown(i): return 2
        if sp.is_control(i): return 3
        return 4 if tokens[i] == "<tool_call>" else 1

    types = [kind(i) for i in range(n)]
    vocab = {t: i for i, t in enumerate(tokens)}
    skip = [t for t, k in zip(tokens, types) if k != 1]
    merges = generate_merges(vocab, {t: s for t, s in zip(tokens, scores)}, skip)
    # As transformers' LlamaConverter (legacy) lays it out.
    tok = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    special(tok, "<unk>", "<s>", "</s>")
    tok.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    values = dict(model="llama", pre="default", tokens=tokens, token_types=types, merges=[], scores=scores, bos=1, eos=2,
                  unk=0, add_bos=True, add_eos=False, add_space_prefix=True)
    return tok, values, sp


def write_gguf(path, v):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(v["model"])
    if v["pre"] is not None: writer.add_tokenizer_pre(v["pre"])
    writer.add_token_list(v["tokens"])
    writer.add_token_types(v["token_types"])
    if v["merges"]: writer.add_token_merges(v["merges"])
    if v["scores"]: writer.add_token_scores(v["scores"])
    if v["bos"] is not None: writer.add_bos_token_id(v["bos"])
    if v["eos"] is not None: writer.add_eos_token_id(v["eos"])
    if v["unk"] is not None: writer.add_unk_token_id(v["unk"])
    if v["add_bos"] is not None: writer.add_add_bos_token(v["add_bos"])
    if v["add_eos"] is not None: writer.add_add_eos_token(v["add_eos"])
    if v["add_space_prefix"] is not None: writer.add_add_space_prefix(v["add_space_prefix"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cases(tok, sp=None):
    rows = []
    for text in NASTY:
        ids = tok.encode(text, add_special_tokens=True).ids
        tok.encode_special_tokens = True
        literal = tok.encode(text, add_special_tokens=False).ids
        tok.encode_special_tokens = False
        # Around user-defined symbols transformers and llama.cpp put the word mark elsewhere than SentencePiece does,
        # and it is their files that we read.
        if sp is not None and "<tool_call>" not in text:
            literal = sp.encode(text)
        rows.append(dict(text=text, ids=ids, literal=literal, decoded=tok.decode(ids, skip_special_tokens=True),
                         decoded_all=tok.decode(ids, skip_special_tokens=False)))
    return rows


def fuzz(sp):
    """Random strings over a mean little alphabet: SentencePiece itself says what the pieces are."""
    rng = random.Random(7)
    alphabet = list("aaeetthhnnoo  \n.,19ß") + ["▁", "神", "天", "é", "😀", "the ", "  ", "and", "\t", "\x00", "of of", "ing"]
    texts = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(300)]
    return [dict(text=t, literal=sp.encode(t)) for t in texts]


def save(name, tok, values):
    tok.save(str(HERE / f"{name}.tokenizer.json"), pretty=False)
    (HERE / f"{name}.vocab.json").write_text(json.dumps(values, ensure_ascii=False, separators=(",", ":")))
    write_gguf(HERE / f"{name}.gguf", values)


TEMPLATES = {
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "llama3.1": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The system message, if there is one. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "qwen3": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "blocks": """{% macro turn(role, text, tail='') %}
<{{ role }}>
{{ text }}{{ tail }}
</{{ role }}>
{% endmacro %}
{% set ns = namespace(n=0, text='') %}
  {% for m in messages if m.content %}
    {% if m.role == 'system' %}
      {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
    {% set ns.text = ns.text ~ m.role[0]|upper ~ loop.index %}
{{ turn(m.role, m.content|replace('a', 'A'), tail='!' * ns.n) }}
  {% endfor %}
{{ ns.text }} {{ ns.n > 1 and 'many' or 'few' }} {{ 'x' if ns.n is divisibleby 2 else 'y' ~ 'z' }}
{{ messages | map(attribute='role') | join(', ') }}
{{ messages[0] | tojson }} {{ {'a': 'é<&>\\'"\\n', 'b': [1, 2.5, none, true]} | tojson }}
{{ [1, [2, 'x']] | tojson(indent=2) }}
{% set kept %}
captured {{ messages|length }}
{{ 'a\n\nb'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent(width=3, blank=true) }}|{{ 'aXbXc'|replace('X', '-', 1) }}
{% endset %}
{{ kept|trim }} {{ [1, 2] + [3] }} {{ -1 + 2 * 3 }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{%- raw %} {{ not rendered ~ }} {% endraw -%}
{# a comment with {{ braces }} #}{{ none }} {{ true }} {{ not_defined }}|
""",
}

CHATS = [
    [("user", "Hi there!")],
    [("system", " You are terse. "), ("user", "What's 2+2?"), ("assistant", "4"), ("user", "  And 3+3?  \n")],
    [("user", "a\nb"), ("assistant", "<think>\nhmm\n</think>\n\nbanana"), ("user", "<|im_end|> ☃ 日本")],
]


def chats():
    rows = []
    for name, source in TEMPLATES.items():
        compiled = _compile_jinja_template(source)
        compiled.globals["strftime_now"] = lambda f: __import__("datetime").datetime(2026, 11, 21, 7, 8, 9).strftime(f)
        for chat in CHATS:
            for generate in (True, False):
                messages = [dict(role=r, content=c) for r, c in chat]
                text = compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=generate,
                                       bos_token="<s>", eos_token="</s>")
                rows.append(dict(template=name, messages=messages, add_generation_prompt=generate, expected=text))
    return dict(templates=TEMPLATES, now=1795244889, cases=rows)


def main():
    out = {}
    tok = train_bpe("gpt-2")
    special(tok, "<|endoftext|>")
    save("gpt2", tok, bpe_vocab(tok, "gpt-2", bos="<|endoftext|>", eos="<|endoftext|>"))
    out["gpt2"] = cases(tok)
    kinds = {}
    for pre, part in PRE.items():
        tok.pre_tokenizer = part
        tok.normalizer = normalizers.NFC() if pre == "qwen2" else None
        kinds[pre] = [tok.encode(text, add_special_tokens=False).ids for text in NASTY]
    out["kinds"] = kinds

    tok = train_bpe("llama-bpe")
    special(tok, "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    bos = tok.token_to_id("<|begin_of_text|>")
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                                      special_tokens=[("<|begin_of_text|>", bos)]),
    ])
    save("llama3", tok, bpe_vocab(tok, "llama-bpe", bos="<|begin_of_text|>", eos="<|eot_id|>"))
    out["llama3"] = cases(tok)

    tok = train_bpe("qwen2")
    special(tok, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    save("qwen2", tok, bpe_vocab(tok, "qwen2", bos="<|endoftext|>", eos="<|im_end|>", add_bos=False))
    out["qwen2"] = cases(tok)

    tok, values, sp = train_sentencepiece()
    save("llama", tok, values)
    out["llama"] = cases(tok, sp)
    out["fuzz"] = fuzz(sp)
    (HERE / "cases.json").write_text(json.dumps(out, ensure_ascii=True, separators=(",", ":")))
    (HERE / "chat.json").write_text(json.dumps(chats(), ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
