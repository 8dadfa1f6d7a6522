"""Blocks alone: counts of holders, what is found again, and what is thrown away first."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilm.engine.blocks import Blocks, Chain, Digest, sha256

SIZE, NUM_BLOCKS = 2, 6


def constant(data: bytes) -> bytes:
    return b"x"


def one_bit(data: bytes) -> bytes:
    return bytes([sha256(data)[0] & 1])


@dataclass
class Text:
    """A stream as the scheduler keeps one: tokens, its blocks, and the chain of those others may find."""

    salt: bytes
    token_ids: array[int]
    block_ids: list[int]
    chain: Chain | None
    num_computed: int

    def path(self, index: int) -> tuple[bytes, tuple[int, ...]]:
        """All that decides what a block holds"""
        return self.salt, tuple(self.token_ids[: (index + 1) * SIZE])


class World:
    """Texts begin, grow, end and fail over one set of blocks; `paths` is what full ones hold in truth."""

    def __init__(self, digest: Digest) -> None:
        self.blocks = Blocks(NUM_BLOCKS, SIZE, digest=digest)
        self.is_exact = digest is sha256
        self.paths: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.texts: list[Text] = []

    def begin(self, salt: bytes, token_ids: list[int]) -> None:
        tokens = array("q", token_ids)
        known = dict(self.blocks.contents)
        chain, block_ids = self.blocks.find(self.blocks.root(salt), tokens)
        text = Text(salt, tokens, block_ids, chain, len(block_ids) * SIZE)
        assert text.num_computed < len(tokens)
        for index, block in enumerate(block_ids):
            assert block in known and self.paths[block] == text.path(index)
        self.texts.append(text)

    def compute(self, text: Text, token_ids: list[int]) -> None:
        """All that is known and some tokens more, as far as there are blocks"""
        text.token_ids.extend(token_ids)
        wanted = max(self.blocks.num_for(len(text.token_ids)) - len(text.block_ids), 0)
        expected = [*self.blocks.empty[::-1], *self.blocks.reusable][:wanted]
        taken = self.blocks.take(wanted)
        if taken is None:
            assert wanted > self.blocks.num_free or wanted > len(expected)
            return self.end(text)
        assert taken == expected
        for block in taken:
            self.paths.pop(block, None)
        text.block_ids += taken
        text.num_computed = len(text.token_ids)
        self.keep(text)

    def keep(self, text: Text) -> None:
        assert text.chain is not None
        first = text.chain.num_blocks
        text.chain = self.blocks.keep(text.chain, text.token_ids, text.num_computed, text.block_ids)
        assert text.chain.num_blocks == text.num_computed // SIZE
        for index in range(first, text.chain.num_blocks):
            self.paths[text.block_ids[index]] = text.path(index)

    def end(self, text: Text) -> None:
        self.texts.remove(text)
        before, left = list(self.blocks.reusable), [other.block_ids for other in self.texts]
        self.blocks.give_back(text.block_ids)
        freed = [block for block in reversed(text.block_ids) if not any(block in ids for ids in left)]
        assert list(self.blocks.reusable) == before + [b for b in freed if b in self.blocks.contents]

    def fail(self, text: Text) -> None:
        self.blocks.forget(text.block_ids)
        assert not self.blocks.contents.keys() & set(text.block_ids)
        self.end(text)

    def check(self) -> None:
        blocks = self.blocks
        holders = Counter(block for text in self.texts for block in text.block_ids)
        assert blocks.num_holders == [holders[block] for block in range(NUM_BLOCKS)]
        assert sorted([*blocks.empty, *blocks.reusable, *holders]) == list(range(NUM_BLOCKS))
        assert blocks.num_free == NUM_BLOCKS - len(holders)
        assert not blocks.contents.keys() & set(blocks.empty)
        assert set(blocks.reusable) <= blocks.contents.keys()
        assert {
            blocks.found[content.digest] for content in blocks.contents.values()
        } == blocks.contents.keys()
        assert all(content.digest in blocks.found for content in blocks.contents.values())
        serials = [content.serial for content in blocks.contents.values()]
        assert len(set(serials)) == len(serials) and 0 not in serials
        if self.is_exact:  # no two blocks for the same text
            paths = [self.paths[block] for block in blocks.contents]
            assert len(set(paths)) == len(paths)


TOKENS = st.lists(st.integers(0, 1), max_size=5)
DEEDS = st.one_of(
    st.tuples(
        st.just("begin"), st.sampled_from([b"", b"salt"]), st.lists(st.integers(0, 1), min_size=1, max_size=9)
    ),
    st.tuples(st.just("compute"), st.integers(0, 5), TOKENS),
    st.tuples(st.sampled_from(["end", "fail"]), st.integers(0, 5)),
)


@settings(max_examples=300, deadline=None)
@given(digest=st.sampled_from([sha256, constant, one_bit]), deeds=st.lists(DEEDS, min_size=8, max_size=40))
def test_whatever_texts_do_blocks_are_found_by_all_that_led_to_them_and_counted_right(
    digest: Digest, deeds: list[tuple[Any, ...]]
) -> None:
    world = World(digest)
    for name, *rest in deeds:
        if name == "begin":
            world.begin(*rest)
        elif world.texts:
            text = world.texts[rest[0] % len(world.texts)]
            getattr(world, name)(text, *rest[1:])
        world.check()
    for text in list(world.texts):
        world.end(text)
    assert world.blocks.num_free == NUM_BLOCKS


def held(blocks: Blocks, token_ids: list[int], salt: bytes = b"") -> list[int]:
    """The blocks of a text that has been computed, whether found or taken"""
    tokens = array("q", token_ids)
    chain, block_ids = blocks.find(blocks.root(salt), tokens)
    block_ids += blocks.take(blocks.num_for(len(tokens)) - len(block_ids)) or []
    blocks.keep(chain, tokens, len(tokens), block_ids)
    return block_ids


def num_found(blocks: Blocks, token_ids: list[int], salt: bytes = b"") -> int:
    _, block_ids = blocks.find(blocks.root(salt), array("q", token_ids))
    blocks.give_back(block_ids)
    return len(block_ids)


def test_more_than_there_are_is_not_taken_in_part() -> None:
    blocks = Blocks(3, SIZE)
    assert blocks.take(4) is None and blocks.num_free == 3
    assert sorted(blocks.take(3) or []) == [0, 1, 2] and blocks.take(0) == [] and blocks.take(1) is None


def test_the_last_token_is_never_found_since_its_logits_are_wanted() -> None:
    blocks = Blocks(8, SIZE)
    blocks.give_back(held(blocks, [1, 2, 3, 4, 5, 6]))
    assert [num_found(blocks, [1, 2, 3, 4, 5, 6][:length]) for length in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert num_found(blocks, [1, 2, 3, 4, 5, 6, 7]) == 3


def test_of_free_blocks_the_longest_out_of_use_go_first_and_of_a_text_its_end() -> None:
    blocks = Blocks(6, SIZE)
    first, second = held(blocks, [1, 2, 3, 4]), held(blocks, [5, 6, 7, 8])
    blocks.give_back(first)
    blocks.give_back(second)
    assert blocks.take(2) == [4, 5]  # empty ones
    assert num_found(blocks, [1, 2, 9]) == 1  # in use again: it goes last now
    assert blocks.take(4) == [first[1], second[1], second[0], first[0]]


def test_a_block_that_two_hold_is_free_when_both_have_given_it_back() -> None:
    blocks = Blocks(4, SIZE)
    first, second = held(blocks, [1, 2, 3]), held(blocks, [1, 2, 4])
    assert first[0] == second[0] and blocks.num_holders[first[0]] == 2
    blocks.give_back(first)
    assert first[0] not in blocks.reusable and blocks.num_free == 2
    blocks.give_back(second)
    assert first[0] in blocks.reusable and blocks.num_free == 4


@pytest.mark.parametrize("digest", [sha256, constant, one_bit])
def test_another_salt_finds_nothing(digest: Digest) -> None:
    blocks = Blocks(8, SIZE, digest=digest)
    held(blocks, [1, 2, 3], b"a")
    assert num_found(blocks, [1, 2, 3], b"a") == 1
    assert num_found(blocks, [1, 2, 3], b"b") == num_found(blocks, [1, 2, 3]) == 0


@pytest.mark.parametrize("digest", [constant, one_bit])
def test_a_digest_that_two_texts_share_is_not_believed(digest: Digest) -> None:
    blocks = Blocks(30, SIZE, digest=digest)
    for token in range(2, 10):
        held(blocks, [token, token, token])
        assert num_found(blocks, [token, token, token]) == 1
        assert num_found(blocks, [1, 1, 1]) == 0


def test_with_one_digest_for_all_the_second_block_of_another_text_is_not_taken_for_ones_own() -> None:
    blocks = Blocks(8, SIZE, digest=constant)
    held(blocks, [1, 1, 5, 5, 0])  # what is found now is its second block
    assert num_found(blocks, [5, 5, 0]) == num_found(blocks, [2, 2, 5, 5, 0]) == 0


def test_a_block_whose_beginning_was_thrown_away_is_not_found_behind_a_new_one() -> None:
    blocks = Blocks(8, SIZE)
    text = held(blocks, [1, 2, 3, 4, 0])
    blocks.forget(text[:1])
    again = held(blocks, [1, 2, 9])
    assert num_found(blocks, [1, 2, 3, 4, 0]) == 1 and again[0] not in text


def test_blocks_that_keep_nothing_are_empty_when_given_back() -> None:
    blocks = Blocks(4, SIZE, keeps_contents=False)
    blocks.give_back(held(blocks, [1, 2, 3, 4]))
    assert num_found(blocks, [1, 2, 3, 4]) == 0 and not blocks.contents and len(blocks.empty) == 4


def test_what_was_forgotten_is_empty_at_once_or_when_it_is_given_back() -> None:
    blocks = Blocks(4, SIZE)
    used, free = held(blocks, [1, 2]), held(blocks, [3, 4])
    blocks.give_back(free)
    blocks.forget(used + free)
    assert free[0] in blocks.empty and used[0] not in blocks.empty and not blocks.reusable
    blocks.give_back(used)
    assert used[0] in blocks.empty and not blocks.found
