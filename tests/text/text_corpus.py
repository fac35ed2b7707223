"""Text for the tokenizer tests: hard strings, random mixtures of scripts, plain English. Deterministic."""

import random
import unicodedata

SCRIPTS = [
    "The quick brown fox doesn't jump over the lazy dogs' 12345 times; they'd rather SLEEP.",
    "Crème brûlée — 2024-11-05, ٣٤٥, ①②, don't 🙂 x_y",
    "Größe, Straße, ÄÖÜ, naïve café, smörgåsbord, Łódź, İstanbul, ĲSSEL",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. 1-й день",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· ΣΊΣΥΦΟΣ",
    "敏捷的棕色狐狸跳过了懒狗。龘！三百二十五、３２５",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ カタカナ ー ㍿ ｶﾞ",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश किया",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า ๑๒๓",
    "Տեսիլ գեղեցիկ ქართული ენა አማርኛ ភាសាខ្មែរ မြန်မာ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 𐍈 𒀀 𓂀 𠮷野家 🄰 Ⅷ ½ ² ₃",
    "👨‍👩‍👧‍👦 👍🏽 🇩🇪🇯🇵 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ❤️‍🔥 1️⃣ ☺︎ 🙂🙃",
    "e\u0301 a\u0308\u0323 n\u0303 \u1100\u1161\u11a8 \u0344 \u2126 \ufb01 \u212b q\u0307\u0323",
    "def f(x: int) -> str:\n\treturn f\"{x!r:>10}\"  # comment\n\n\n    if x == 0x1F and y != 3.14e-10: pass\r\n",
    "{\"key\": [1, 2.5, null, true], \"url\": \"https://example.org/a?b=c&d=%20#e\"}",
    "<html>&amp;</html> $x^2 + \\frac{1}{2}$ ~~ ``` --- ***bold*** `code` @user #tag",
]

HARD = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t\t\n \n",
    "a",
    " a",
    "a ",
    "  a  ",
    "\n\na\n\n",
    " \n a",
    "a \n",
    "   \n   \r\n\r  x",
    "\x01\x02\x7f\x80\x9f\x0b\x0c\x1c\x1d\x1e\x1f\x85",
    "\u200b\u200c\u200d\u2060\ufeff\u00ad\u180e\u2028\u2029\u3000\u00a0\u1680\u205f",
    "a\u180eb \u180e\u180e c\u2003\u2003d \u00a0 e",
    "don't DON'T don’t I'LL we'Re it'ſ 'Sa 's 'S ''s '\u017fx o'clock 'ſ",
    "\u212a \u212bngstrom \u017f 'VE 'vE 'Ve 'l 'L 'LL 'lL",
    "0 12 123 1234 12345 1234567890 1,234.56 ١٢٣٤ ⅣⅧ 1²³ ½¼",
    "ABCdefGHI iPhone McDonald XMLHttpRequest snake_case camelCase",
    "!!! ... ?!?! ---- ==== ____ ~~~~ \"'`´",
    "a.b.c. (d) [e] {f} <g> /h/ \\i\\ |j|",
    "\ufffd\ufffe\uffff\U0001fffe\U0010ffff\ue000\U000f0000",
    "\U00011f04\U000323af\u1c89\U00010d40\U0001fae9\U0001ccfa",
    "\u0e33\u0eb3 \u0f77 \u0958 \ufb4f \ufdfa \u3300 \u33a5 \uff21\uff41",
    "a\u0315\u0300\u05ae\u0062 \u0061\u0301\u0328 \u1e0b\u0323 \u1100\u1161 \uac00\u11a8",
    "<|user|>hi<|assistant|><think>x</think> [gMASK]<sop> <|USER|> < |user|> <|user|",
    "<|user|><|user|> <|endoftext|>\n<|system|>",
    "x<tool_call>f<arg_key>a</arg_key></tool_call>y /nothink/nothink",
]


def _pools():
    ranges = [
        (0x20, 0x7F), (0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700),
        (0x900, 0xE80), (0x1100, 0x1200), (0x1D00, 0x2100), (0x2100, 0x2C00), (0x3000, 0x3100), (0x4E00, 0x5000),
        (0xAC00, 0xAD00), (0xF900, 0xFFFE), (0x10000, 0x10200), (0x10D40, 0x10D90), (0x11F00, 0x11F60), (0x1D400, 0x1D800),
        (0x1F300, 0x1FB00), (0x20000, 0x20100), (0x31350, 0x31360), (0xE0000, 0xE0200), (0xF0000, 0xF0010),
    ]
    return [[chr(c) for c in range(a, b) if not 0xD800 <= c < 0xE000] for a, b in ranges]


def random_strings(n, seed=7, length=60):
    """Strings that mix scripts, spaces, digits, quotes and newlines at random."""
    rng = random.Random(seed)
    pools = _pools()
    glue = [" ", "  ", "\n", "\r\n", "\t", "'", "'s", "'LL", "123", " 7", ".", ", ", "!", "\u00a0", "\u3000", "_", "<|user|>"]
    out = []
    for _ in range(n):
        parts = []
        for _ in range(rng.randrange(1, length)):
            if rng.random() < 0.4:
                parts.append(rng.choice(glue))
            else:
                pool = rng.choice(pools)
                parts.append("".join(rng.choice(pool) for _ in range(rng.randrange(1, 6))))
        out.append("".join(parts))
    return out


def every_character():
    """All of Unicode in rows of 64, once alone and once between letters."""
    chars = [chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) != "Co"]
    rows = ["".join(chars[i:i + 64]) for i in range(0, len(chars), 64)]
    return rows[:2200] + ["x".join(r) for r in rows[:2200:3]] + [" ".join(r) for r in rows[1:2200:3]]


WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than into them can
only other time new some could these two may first then do any like my now over such our man me even most made after also did many
before must through years where much your way well down should because each just those people how too little state good very make
world still own see men work long here get both between life being under never day same another know while last might us great old
year off come since against go came right used take three garden river morning evening village mountain teacher children window
kitchen bicycle lantern meadow harvest journey library whisper thunder gentle bright curious remember forgotten wonderful together
although necessary understand experience government information development environment particularly opportunity""".split()


def english(n_bytes, seed=3):
    """Plain sentences of common words with punctuation, numbers and paragraphs."""
    rng = random.Random(seed)
    out, size = [], 0
    while size < n_bytes:
        words = [rng.choice(WORDS) for _ in range(rng.randrange(4, 18))]
        if rng.random() < 0.15:
            words[rng.randrange(len(words))] = str(rng.randrange(3000))
        if rng.random() < 0.1:
            words[0] += "'s"
        if len(words) > 8:
            words[5] += ","
        s = " ".join(words).capitalize() + rng.choice([". ", ". ", ". ", "? ", "! ", ".\n\n"])
        out.append(s)
        size += len(s)
    return "".join(out)[:n_bytes]


def training():
    """What the tests train their vocabularies on."""
    return SCRIPTS * 3 + [english(60000)] + random_strings(60, seed=99)


def long_strings():
    """Near 1 MB each: runs that a careless tokenizer needs quadratic time for."""
    n = 1 << 20
    return {
        "letter": "a" * n,
        "letters": "ab" * (n // 2),
        "space": " " * n,
        "space_word": " " * n + "x",
        "newline": "\n" * n,
        "digits": "7" * n,
        "dots": "." * n,
        "quote": "'" * n,
        "chinese": "狐狸龘" * (n // 9),
        "marks": "e" + "\u0301\u0323" * (n // 4),
        "emoji": "👨\u200d👩\u200d" * (n // 14),
        "english": english(n),
        "mixed": ("".join(SCRIPTS) * (n // 1200))[: n // 2],
        "control": "<|user|>" * (n // 8),
        "almost_control": "<|use" * (n // 5),
    }
