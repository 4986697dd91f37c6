"""Prompts of a given length that no prefix cache has seen: common words in a random order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

# Each is one token of the common English tokenizers when a space stands before it.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will
no more if out so up said what its about than into them can only other time new some could
these two may first then do any like my now over such our man me even most made after also
did many off before must well back through years where much your way down should because
long each just state those people too little good world make very year still see own work
men day get here old life both between being under three never know same last another while
us might great go come since against right used take house use place water small
"""
_WORDS = _TEXT.split()


def of_words(count: int, seed: int) -> str:
    """`count` words; another seed shares no beginning worth caching."""
    chosen = random.Random(seed).choices(_WORDS, k=count)
    return " ".join(chosen)


def of_tokens(encode: Callable[[str], Sequence[int]], count: int, seed: int) -> str:
    """A prompt of exactly `count` tokens; raises ValueError if the tokenizer allows none."""
    words = of_words(count, seed).split()
    while words and len(encode(" ".join(words))) > count:
        words.pop()
    text = " ".join(words)
    for filler in (" the", " a", "a", "."):
        while len(encode(text + filler)) <= count:
            text += filler
    if len(encode(text)) != count:
        raise ValueError(f"no prompt of {count} tokens found; the nearest has {len(encode(text))}")
    return text
