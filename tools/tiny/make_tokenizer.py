"""Trains the byte-level BPE of glm5-tiny on generated text and writes tokenizer.json.

Same structure as GLM's tokenizer.json (ignore_merges, Split + ByteLevel, 36 added tokens in the
same order with the same special flags); one difference: the pattern splits numbers into single
digits, so that arithmetic sees columns. Needs the `tokenizers` package.
"""
import argparse
import json
import random
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from corpus import stream, words

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
ADDED = """<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|>
<|observation|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>
<|begin_of_audio|> <|end_of_audio|> <|begin_of_transcription|> <|end_of_transcription|>
<|code_prefix|> <|code_middle|> <|code_suffix|> <think> </think> <tool_call> </tool_call>
<tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> /nothink
<|begin_of_box|> <|end_of_box|> <|image|> <|video|>""".split()
N_SPECIAL = 18          # <|endoftext|> … <|end_of_transcription|>; the rest are added, not special
VOCAB = 4096


def training_texts(n, seed):
    """Generated documents, cut at their control tokens, and every list word with a space."""
    rng = random.Random(seed)
    cut = re.compile("|".join(map(re.escape, ADDED)))
    for _ in range(n):
        yield from cut.split(stream.document(rng))
    pool = [w for v in vars(words).values() if isinstance(v, list) for w in v]
    for _ in range(40):
        rng.shuffle(pool)
        yield " " + " ".join(pool)
        yield "\n".join(pool)
        yield " ".join(w.lower() for w in pool)


def build(n, seed):
    tok = Tokenizer(models.BPE(ignore_merges=True, byte_fallback=False, fuse_unk=False))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    tok.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False,
                                              use_regex=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(ADDED), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(training_texts(n, seed), trainer)
    for i, t in enumerate(ADDED):
        token = AddedToken(t, single_word=False, lstrip=False, rstrip=False, normalized=False,
                           special=i < N_SPECIAL)
        (tok.add_special_tokens if i < N_SPECIAL else tok.add_tokens)([token])
    return tok


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", default="models/glm5-tiny/tokenizer.json")
    p.add_argument("--documents", type=int, default=60000)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    tok = build(a.documents, a.seed)
    if tok.get_vocab_size() != VOCAB:
        raise SystemExit(f"vocabulary has {tok.get_vocab_size()} entries, wanted {VOCAB}")
    with open(a.out, "w", encoding="utf-8") as f:
        f.write(json.dumps(json.loads(tok.to_str()), ensure_ascii=False, indent=1))
    print(f"{a.out}: {tok.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
