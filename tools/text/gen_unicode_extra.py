#!/usr/bin/env python3
"""Writes src/text/unicode_extra.h: categories of characters that the system's PCRE2 and utf8proc may not know yet.

The reference encoder (Hugging Face tokenizers) carries its own regex engine with a newer Unicode version than the
distributions' libraries. Characters assigned since then are "unassigned" for the libraries and letters, digits, ... for the
reference. This script asks the reference for the category of every character that Python's unicodedata (run it with a Python
whose unicodedata.unidata_version is 14.0.0) calls unassigned.

    python3 tools/text/gen_unicode_extra.py > src/text/unicode_extra.h
"""
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split()
ALL = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def members(category):
    split = pre_tokenizers.Split(Regex(r"\p{%s}" % category), "removed", invert=True)
    return {ord(c) for piece, _ in split.pre_tokenize_str(ALL) for c in piece}


def main():
    assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version
    ranges, moved = [], []
    for category in CATEGORIES:
        for cp in sorted(members(category)):
            old = unicodedata.category(chr(cp))
            if old == "Cn":
                if ranges and ranges[-1][2] == category and ranges[-1][1] == cp - 1:
                    ranges[-1][1] = cp
                else:
                    ranges.append([cp, cp, category])
            elif old != category:
                moved.append((hex(cp), old, category))
    print("changed category:", moved, file=sys.stderr)
    print("/* Made by tools/text/gen_unicode_extra.py with tokenizers %s: characters assigned after Unicode 14.0," % tokenizers.__version__)
    print(" * first, last and general category. X is called once per range, in order of category. */")
    print("#pragma once\n\n/* clang-format off */\n#define NBI_UNICODE_EXTRA(X) \\")
    print(" \\\n".join("    X(0x%05X, 0x%05X, %s)" % (a, b, c.upper()) for a, b, c in ranges))
    print("/* clang-format on */")


if __name__ == "__main__":
    main()
