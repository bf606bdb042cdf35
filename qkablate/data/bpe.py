"""Byte-level byte-pair encoding, learned from text. The same text gives the same tokens."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

import regex

# What may become part of one token: a word, a number of up to three digits, a run of signs, a line
# break with the indentation after it, or other white space. Every character is in one of them.
PATTERN = r" ?[\p{L}\p{M}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}_]+|\n[ \t]*|[^\S\n]+(?!\S)|\s"


def learn(texts: Iterable[str], size: int, progress: Callable[[int], object]) -> list[bytes]:
    """`size` tokens, fewer if the text has not so many: the 256 bytes, then each merge in turn of
    the two neighbours that stand side by side most often. `progress` hears how many there are.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(regex.findall(PATTERN, text))
    # In an order that does not depend on how the text was cut into pieces.
    spelled = sorted((word.encode(), count) for word, count in words.items())
    parts = [list(word) for word, _ in spelled]
    counts = [count for _, count in spelled]
    tokens = [bytes([byte]) for byte in range(256)]
    together: Counter[tuple[int, int]] = Counter()
    where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for index, ids in enumerate(parts):
        for pair in pairwise(ids):
            together[pair] += counts[index]
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in together.items()]
    heapq.heapify(heap)
    known = set(tokens)
    while len(tokens) < size and heap:
        count, pair = heapq.heappop(heap)
        if -count != together[pair]:  # it has changed since
            if together[pair] > 0:
                heapq.heappush(heap, (-together[pair], pair))
            continue
        if count >= -1:  # what stands together once is no pattern
            break
        merged = tokens[pair[0]] + tokens[pair[1]]
        if merged in known:  # another pair spelled it already: an encoder could not tell them apart
            together[pair] = 0
            continue
        known.add(merged)
        new = len(tokens)
        tokens.append(merged)
        changed: set[tuple[int, int]] = set()
        for index in where.pop(pair):
            before, after = parts[index], _merge(parts[index], pair, new)
            if len(after) == len(before):
                continue
            weight = counts[index]
            for old in pairwise(before):
                together[old] -= weight
            for fresh in pairwise(after):
                together[fresh] += weight
                if new in fresh:
                    where[fresh].add(index)
                    changed.add(fresh)
            parts[index] = after
        del together[pair]
        for fresh in changed:
            heapq.heappush(heap, (-together[fresh], fresh))
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
