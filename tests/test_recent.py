"""Why a prefix was not found: where a prompt parts from a recent one of its salt."""

from __future__ import annotations

from array import array

import pytest
from engines import VOCAB_SIZE, Tiny, generated, prompt

from infinilm.engine.engine import Engine
from infinilm.engine.recent import Recent, num_shared


def changed(token_ids: list[int], *positions: int) -> list[int]:
    """The same, but for the tokens at these positions"""
    return [VOCAB_SIZE - 1 - each if at in positions else each for at, each in enumerate(token_ids)]


def miss(engine: Engine, token_ids: list[int], salt: str | None = None) -> int | None:
    return generated(engine, token_ids, salt, max_tokens=1).prefix_miss


@pytest.mark.parametrize("position", [16, 17, 31, 32, 50, 95])
def test_a_miss_tells_the_first_token_that_differs_from_the_prompt_most_like_it(
    position: int, tiny: Tiny
) -> None:
    engine = tiny.engine()
    whole = prompt(100)
    assert miss(engine, whole) is None
    assert miss(engine, prompt(100, 1)) is None  # shares nothing
    assert miss(engine, changed(whole, 16, 60)) == 16
    assert miss(engine, changed(whole, position, 97)) == (60 if position == 16 else position)


def test_there_is_no_miss_where_no_block_is_shared_or_all_is_found_or_nothing_differs(tiny: Tiny) -> None:
    engine = tiny.engine()
    assert miss(engine, prompt(100)) is None
    assert miss(engine, prompt(100)) is None
    assert miss(engine, changed(prompt(100), 15)) is None
    assert miss(engine, changed(prompt(100), 97)) is None  # in a block that is never looked for
    assert miss(engine, prompt(60)) is None
    assert miss(engine, prompt(100) + prompt(50, 1)) is None


def test_what_was_driven_out_of_the_cache_is_no_difference(tiny: Tiny) -> None:
    engine = tiny.engine(num_blocks=8)
    assert miss(engine, prompt(100)) is None
    assert miss(engine, prompt(100, 1)) is None
    again = generated(engine, prompt(100), max_tokens=1)
    assert again.num_cached_tokens < 96 and again.prefix_miss is None


def test_prompts_of_other_salts_are_never_compared(tiny: Tiny) -> None:
    engine = tiny.engine()
    miss(engine, prompt(100), "ours")
    for salt in (None, "theirs"):
        assert miss(engine, changed(prompt(100), 50), salt) is None
    assert miss(engine, changed(prompt(100), 60), "ours") == 60


def test_what_is_not_looked_up_or_not_kept_has_no_miss(tiny: Tiny) -> None:
    engine = tiny.engine()
    miss(engine, prompt(100))
    output = generated(engine, changed(prompt(100), 50), prompt_logprobs=0)
    assert output.prefix_miss is None
    without = tiny.engine(enable_prefix_caching=False)
    miss(without, prompt(100))
    assert miss(without, changed(prompt(100), 50)) is None and not without.scheduler.recent.prompts


def test_recent_prompts_are_few_and_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = Recent(16)
    for i in range(40):
        recent.add(b"", array("q", prompt(50, i)))
    assert len(recent.prompts) == 16
    assert recent.parting(b"", array("q", changed(prompt(50, 30), 40))) == 40
    assert recent.parting(b"", array("q", changed(prompt(50, 3), 40))) is None
    monkeypatch.setattr("infinilm.engine.recent.MAX_TOKENS", 120)
    recent.add(b"", array("q", prompt(50, 40)))
    assert [len(ids) for _, ids in recent.prompts] == [50, 50]
    recent.add(b"", array("q", prompt(121)))
    assert not recent.prompts


def test_a_conversation_takes_the_place_of_one_prompt_however_many_turns_it_has() -> None:
    recent = Recent(16)
    recent.add(b"", array("q", prompt(60, 1)))
    for length in range(20, 400, 10):
        recent.add(b"", array("q", prompt(length)))
    assert [len(ids) for _, ids in recent.prompts] == [60, 390]


def test_the_length_two_prompts_share_is_found_at_any_place() -> None:
    for length in (16, 17, 40, 1000):
        whole = array("q", range(length))
        assert num_shared(whole, whole[:], 16) == num_shared(whole, whole + whole, 16) == length
        for at in {0, 1, 15, length // 2, length - 1}:
            other = whole[:]
            other[at] = -1
            assert num_shared(whole, other, 16) == num_shared(other, whole, 16) == (at if at >= 16 else 0)
