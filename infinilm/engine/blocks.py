"""Blocks: which blocks of the cache are whose, and full ones found again by the tokens that led to them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True)
class Content:
    """What a full block holds. Serials are never used twice, so a parent's names all tokens before the block;
    before the first one there is the salt."""

    digest: bytes
    serial: int
    parent: int | bytes
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """The full blocks at the beginning of a stream that can be found again: how many, and the last of them,
    or the salt where there is none."""

    digest: bytes
    serial: int | bytes
    num_blocks: int = 0


class Blocks:
    """A block has a count of those who hold it. With nobody left it is free, and keeps what it held until it
    is needed: free blocks are handed out empty ones first, then those longest out of use."""

    def __init__(
        self, num_blocks: int, size: int, keeps_contents: bool = True, digest: Digest = sha256
    ) -> None:
        self.num_blocks = num_blocks
        self.size = size
        self.keeps_contents = keeps_contents
        self.digest = digest
        self.num_holders = [0] * num_blocks
        self.empty = list(range(num_blocks))[::-1]  # a stack: memory is touched as far as it is needed
        # Of those that nobody holds, the longest out of use first
        self.reusable: OrderedDict[int, None] = OrderedDict()
        self.contents: dict[int, Content] = {}
        self.found: dict[bytes, int] = {}
        self.last_serial = 0

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.reusable)

    def num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """So many free blocks, or None if there are fewer."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self.empty.pop() if self.empty else self.reusable.popitem(last=False)[0]
            self.forget([block])
            self.num_holders[block] = 1
            taken.append(block)
        return taken

    def give_back(self, block_ids: Sequence[int]) -> None:
        """The last first, so that the beginning of a text, which others may share, is kept longest."""
        for block in reversed(block_ids):
            self.num_holders[block] -= 1
            if self.num_holders[block] == 0:
                self._set_free(block)

    def free_all(self) -> None:
        """Nobody holds a block, also none that was on its way to somebody."""
        self.num_holders = [0] * self.num_blocks
        self.found = {content.digest: block for block, content in self.contents.items()}
        self.reusable = OrderedDict.fromkeys(self.contents)
        self.empty = [block for block in range(self.num_blocks)[::-1] if block not in self.contents]

    def forget(self, block_ids: Iterable[int]) -> None:
        """Nobody will find what these blocks hold."""
        for block in block_ids:
            content = self.contents.pop(block, None)
            if content is not None and self.found.get(content.digest) == block:
                del self.found[content.digest]
            if block in self.reusable:
                del self.reusable[block]
                self.empty.append(block)

    def _set_free(self, block: int) -> None:
        if block in self.contents:
            self.reusable[block] = None
        else:
            self.empty.append(block)

    # ---- prefixes ------------------------------------------------------------------------------------------

    def root(self, salt: bytes) -> Chain:
        return Chain(self.digest(salt), salt)

    def find(self, chain: Chain, token_ids: array[int]) -> tuple[Chain, list[int]]:
        """The longest beginning of token_ids that blocks hold, which the caller holds from now on. The last
        token is never among them, since its logits are wanted."""
        block_ids: list[int] = []
        while self.keeps_contents and (chain.num_blocks + 1) * self.size < len(token_ids):
            tokens = self._tokens(token_ids, chain.num_blocks)
            block = self._holding(self._next_digest(chain, tokens), chain, tokens)
            if block is None:
                break
            self._hold(block)
            block_ids.append(block)
            content = self.contents[block]
            chain = Chain(content.digest, content.serial, chain.num_blocks + 1)
        return chain, block_ids

    def keep(self, chain: Chain, token_ids: array[int], num_computed: int, block_ids: Sequence[int]) -> Chain:
        """Let others find the full blocks of a stream whose first num_computed tokens have keys."""
        while self.keeps_contents and (chain.num_blocks + 1) * self.size <= num_computed:
            tokens = self._tokens(token_ids, chain.num_blocks)
            digest = self._next_digest(chain, tokens)
            block = self._holding(digest, chain, tokens)
            if block is None:
                block = block_ids[chain.num_blocks]
                self._keep_one(block, digest, chain, tokens)
            chain = Chain(digest, self.contents[block].serial, chain.num_blocks + 1)
        return chain

    def adopt(self, chain: Chain, tokens: tuple[int, ...]) -> tuple[Chain | None, int | None]:
        """The chain with these tokens after it, and an empty block for their keys, which others find then.

        No block, if they can be found already; no chain either, if there is no empty block.
        """
        digest = self._next_digest(chain, tokens)
        block, new = self._holding(digest, chain, tokens), None
        if block is None and not (self.empty and self.keeps_contents):
            return None, None
        if block is None:
            block = new = self.empty.pop()
            self._keep_one(block, digest, chain, tokens)
            self.reusable[block] = None
        return Chain(digest, self.contents[block].serial, chain.num_blocks + 1), new

    def _tokens(self, token_ids: array[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.size : (index + 1) * self.size])

    def _next_digest(self, chain: Chain, tokens: tuple[int, ...]) -> bytes:
        return self.digest(chain.digest + array("q", tokens).tobytes())

    def _holding(self, digest: bytes, chain: Chain, tokens: tuple[int, ...]) -> int | None:
        """The block that holds these tokens after this chain. A digest alone is not believed."""
        block = self.found.get(digest)
        if block is None:
            return None
        content = self.contents[block]
        return block if content.parent == chain.serial and content.token_ids == tokens else None

    def _keep_one(self, block: int, digest: bytes, chain: Chain, tokens: tuple[int, ...]) -> None:
        if digest in self.found:  # of what can no longer be reached, its parent being gone
            self.forget([self.found[digest]])
        self.forget([block])
        self.last_serial += 1
        self.contents[block] = Content(digest, self.last_serial, chain.serial, tokens)
        self.found[digest] = block

    def _hold(self, block: int) -> None:
        self.reusable.pop(block, None)
        self.num_holders[block] += 1
