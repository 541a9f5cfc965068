"""What a monitor of tokens should log, from lists of ids."""

from __future__ import annotations

import math
from collections import Counter


def by_hand(rows: list[list[int]], n: int) -> dict[str, float]:
    """Metrics by name, of sequences and n-grams of n tokens; without which token is the most frequent one."""
    tokens = Counter(token for row in rows for token in row)
    total = sum(tokens.values())
    shares = [count / total for count in tokens.values()]
    repeated, worst, grams = 0, 0.0, 0
    for row in rows:
        seen: set[tuple[int, ...]] = set()
        again = 0
        for start in range(len(row) - n + 1):
            gram = tuple(row[start : start + n])
            again += gram in seen
            seen.add(gram)
        grams += len(row) - n + 1
        repeated += again
        worst = max(worst, again / (len(row) - n + 1))
    return {
        "stability/token_entropy": -sum(s * math.log(s) for s in shares),
        "stability/token_top_share": max(shares),
        "stability/repeated_ngrams": repeated / grams,
        "stability/repeated_ngrams_worst": worst,
    }
