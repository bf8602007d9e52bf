"""Page tags in plain Python integers: splitmix64, the tag of a page, the key of a prefix, the hash of a page's bytes."""

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The first output of splitmix64 for this state, as published by S. Vigna."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def chain(start: int, *values: int) -> int:
    for value in values:
        start = splitmix64(start ^ value)
    return start


def tag(seed: int, position: int, page: int, allocations: int) -> int:
    return chain(splitmix64(seed), position, page, 2 * allocations)


def prefix_key(seed: int, tokens) -> int:
    return chain(splitmix64(seed), *tokens)


def content_hash(parts) -> int:
    """Of the bytes of one page: each part in 64-bit little-endian words, dealt to four chains that are folded."""
    result = 0
    for data in parts:
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
        whole = len(words) // 4 * 4
        lanes = [chain(first, *words[lane:whole:4]) for lane, first in enumerate((result, 1, 2, 3))]
        result = chain(chain(lanes[0], *words[whole:]), *lanes[1:])
    return result
