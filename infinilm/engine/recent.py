"""Recent prompts, to say of one that the cache does not know where it parted from one that came before."""

from __future__ import annotations

from array import array
from collections import deque

MAX_PROMPTS = 16
MAX_TOKENS = 1 << 20  # of all of them, 8 MB


class Recent:
    """The last prompts, each with its salt; nothing is compared across salts."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prompts: deque[tuple[bytes, array[int]]] = deque()

    def parting(self, salt: bytes, prompt: array[int]) -> int | None:
        """The position of the first token that differs from the prompt that begins most like this one. None
        where no prompt has its first block, or one of the two is the beginning of the other."""
        others = [other for own_salt, other in self.prompts if own_salt == salt]
        shared = ((num_shared(prompt, other, self.block_size), other) for other in others)
        parted = ((count, count < min(len(prompt), len(other))) for count, other in shared)
        count, is_parted = max(parted, default=(0, False))
        return count if count and is_parted else None

    def add(self, salt: bytes, prompt: array[int]) -> None:
        """What is the beginning of a prompt tells no more than the prompt does."""
        kept = (
            (own_salt, other)
            for own_salt, other in self.prompts
            if own_salt != salt or other != prompt[: len(other)]
        )
        self.prompts = deque([*kept, (salt, prompt)], MAX_PROMPTS)
        while sum(len(other) for _, other in self.prompts) > MAX_TOKENS:
            self.prompts.popleft()


def num_shared(a: array[int], b: array[int], block_size: int) -> int:
    """How many tokens two prompts begin with alike; 0 where it is not a block. Most differ in the first."""
    if min(len(a), len(b)) < block_size or a[:block_size] != b[:block_size]:
        return 0
    low, high = block_size, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
