"""Byte-level byte-pair encoding, learned deterministically from text."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

import regex

# Tokens do not cross these pieces: a word, a number of up to three digits, a run of punctuation, a
# line break with the indentation after it, or other white space. They cover every character.
PATTERN = r" ?[\p{L}\p{M}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}_]+|\n[ \t]*|[^\S\n]+(?!\S)|\s"


def learn_tokens(texts: Iterable[str], size: int, progress: Callable[[int], object]) -> list[bytes]:
    """Return up to `size` tokens: the 256 bytes, then merges of the most frequent pairs in turn.

    `progress` is called with the number of tokens.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(regex.findall(PATTERN, text))
    # Sorted: independent of how the text was split into pieces.
    words_by_bytes = sorted((word.encode(), count) for word, count in words.items())
    parts = [list(word) for word, _ in words_by_bytes]
    counts = [count for _, count in words_by_bytes]
    tokens = [bytes([byte]) for byte in range(256)]
    pair_counts: Counter[tuple[int, int]] = Counter()
    words_with: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for index, ids in enumerate(parts):
        for pair in pairwise(ids):
            pair_counts[pair] += counts[index]
            words_with[pair].add(index)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    known = set(tokens)
    while len(tokens) < size and heap:
        count, pair = heapq.heappop(heap)
        if -count != pair_counts[pair]:  # outdated
            if pair_counts[pair] > 0:
                heapq.heappush(heap, (-pair_counts[pair], pair))
            continue
        if count >= -1:  # pairs that occur once are not merged
            break
        merged = tokens[pair[0]] + tokens[pair[1]]
        if merged in known:  # another pair gives the same bytes
            pair_counts[pair] = 0
            continue
        known.add(merged)
        new = len(tokens)
        tokens.append(merged)
        changed: set[tuple[int, int]] = set()
        for index in words_with.pop(pair):
            before, after = parts[index], _merge(parts[index], pair, new)
            if len(after) == len(before):
                continue
            weight = counts[index]
            for removed in pairwise(before):
                pair_counts[removed] -= weight
            for added in pairwise(after):
                pair_counts[added] += weight
                if new in added:
                    words_with[added].add(index)
                    changed.add(added)
            parts[index] = after
        del pair_counts[pair]
        for added in changed:
            heapq.heappush(heap, (-pair_counts[added], added))
        if new % 64 == 0:
            progress(new)
    progress(len(tokens))
    return tokens


def _merge(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    merged: list[int] = []
    first, second = pair
    position, last = 0, len(ids) - 1
    while position <= last:
        if position < last and ids[position] == first and ids[position + 1] == second:
            merged.append(new)
            position += 2
        else:
            merged.append(ids[position])
            position += 1
    return merged
