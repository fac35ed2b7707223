"""Tokenizer files in the style of public models, trained on the corpus with the reference library."""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import text_corpus

CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
CL100K_FIRST = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                r"|\s+(?!\S)|\s+")
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
GPT2_FIRST = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK_WORDS = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                  r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
# The public files have the two line ends themselves, not their escapes.
DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_WORDS.replace(r"\r\n", "\r\n")]
GLM_SPECIAL = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
               "<|observation|>"]
GLM_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
             "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def train(pre_tokenizer, normalizer=None, vocab=2500, ignore_merges=False, special=GLM_SPECIAL, plain=GLM_PLAIN):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    t.pre_tokenizer = pre_tokenizer
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    if normalizer:
        t.normalizer = normalizer
    t.train_from_iterator(text_corpus.training(), trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    t.add_tokens([AddedToken(s, normalized=False, special=False) for s in plain])
    return t


def flagged(normalizer):
    t = train(pre_tokenizers.Sequence([split(CL100K), BYTES]), normalizer)
    t.add_tokens([
        AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True), AddedToken("<both>", lstrip=True, rstrip=True),
        AddedToken("Word", single_word=True), AddedToken("Normal", normalized=True), AddedToken("Raw", normalized=False),
        AddedToken("Raw longer", normalized=False), AddedToken("ÉTÉ", normalized=True),
        AddedToken("é", normalized=False, single_word=True),
    ])
    return t


def legacy(t):
    """The older spelling: merges as strings."""
    spec = json.loads(t.to_str())
    spec["model"]["merges"] = [" ".join(m) for m in spec["model"]["merges"]]
    del spec["model"]["ignore_merges"]
    return json.dumps(spec, ensure_ascii=False)


def bos(t):
    t.post_processor = processors.TemplateProcessing("[gMASK] <sop> $A", "$A $B", [
        ("[gMASK]", t.token_to_id("[gMASK]")), ("<sop>", t.token_to_id("<sop>"))])
    return t


def seq(*steps):
    return pre_tokenizers.Sequence([*steps, BYTES])


STYLES = {
    "glm": lambda: train(seq(split(CL100K)), ignore_merges=True),
    "glm_inverted": lambda: train(seq(split(CL100K, "removed", True))),
    "cl100k_first": lambda: train(seq(split(CL100K_FIRST))),
    "qwen2": lambda: train(seq(split(QWEN2)), normalizers.NFC()),
    "qwen35": lambda: train(seq(split(QWEN35)), normalizers.NFC()),
    "deepseek": lambda: train(seq(*[split(p) for p in DEEPSEEK]), normalizers.Sequence([])),
    "digits": lambda: train(seq(pre_tokenizers.Digits(True), split(DEEPSEEK_WORDS))),
    "digit_runs": lambda: train(seq(pre_tokenizers.Digits(False), split(CL100K))),
    "o200k": lambda: train(seq(split(O200K))),
    "tekken": lambda: train(seq(split(TEKKEN))),
    "starcoder": lambda: train(pre_tokenizers.Sequence([
        pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    "only_numbers": lambda: train(seq(split(r"\p{N}+", "removed", True), split(r"\p{N}"))),
    "gpt2": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2_prefix": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "gpt2_first": lambda: legacy(train(seq(split(GPT2_FIRST)))),
    "prefix_only": lambda: train(pre_tokenizers.Sequence([
        split(CL100K), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])),
    "bos": lambda: bos(train(seq(split(CL100K)))),
    "nfd": lambda: train(seq(split(CL100K)), normalizers.NFD()),
    "nfkc_lower": lambda: train(seq(split(CL100K)), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "accents": lambda: train(seq(split(CL100K)), normalizers.Sequence([
        normalizers.NFKD(), normalizers.StripAccents(), normalizers.Strip()])),
    "replace": lambda: train(seq(split(CL100K)), normalizers.Sequence([
        normalizers.Replace(Regex(r"\s{2,}"), "  "), normalizers.Replace("...", "…"), normalizers.Prepend("_"),
        normalizers.Replace(Regex("xy?"), "-")])),
    "flags": lambda: flagged(None),
    "flags_lower": lambda: flagged(normalizers.Lowercase()),
    "punctuation": lambda: train(seq(pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.WhitespaceSplit())),
    "next": lambda: train(seq(split(r"\s", "merged_with_next"), split(r"\w+", "merged_with_previous"))),
    "contiguous": lambda: train(seq(split(r"[\d\s]", "contiguous"), split(r"\b", "isolated"))),
    "literal": lambda: train(seq(pre_tokenizers.Split("o", "merged_with_next"), pre_tokenizers.Split(" ", "removed"),
                                 pre_tokenizers.CharDelimiterSplit("e"))),
    "dialect": lambda: train(seq(split(r"[\s\S]{5}|\h+|\u0041[^\S\n]"), split(r"^\p{P}|\P{L}$|\W(?!\s)|[\w']+", "isolated"))),
    "empty_matches": lambda: train(seq(split(r"x*|\p{N}*"))),
}


def write(style, folder: pathlib.Path):
    """Writes folder/tokenizer.json and returns the reference."""
    made = STYLES[style]()
    text = made if isinstance(made, str) else made.to_str()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return Tokenizer.from_str(text)
