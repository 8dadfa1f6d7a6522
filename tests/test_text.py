"""Text against the plain rule: the text ends where the first stop string ends, however it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinilm.engine.text import StopStrings, Text
from infinilm.sampling import SamplingParams
from infinilm.tokenizer import Tokenizer
from infinilm.tokenizer.spelling import Spelling

SPECIAL = b"<|end|>"


class Pieces:
    """A tokenizer whose tokens are these bytes, numbered as they come."""

    _spelling = Spelling()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.special_token_ids = frozenset(i for i, piece in enumerate(pieces) if piece == SPECIAL)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def grow(tokenizer: Any, ids: Sequence[int], **params: Any) -> tuple[list[str], str | None]:
    """The text after each token and after the end, and the stop string."""
    text, found = Text(tokenizer, SamplingParams(**params)), [""]
    for token_id in ids:
        text.add(token_id)
        found.append(text.text)
    text.finish()
    return [*found, text.text], text.stop


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


def rule(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Where the text ends, and by which stop string."""
    for end in range(1, len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(met, key=len)
            return end - len(stop), stop
    return len(text), None


def num_pending(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of text that begins a stop string without being all of it."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max(
        (length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings), default=0
    )


# Few letters, so that stop strings overlap, begin each other and come often; some take several bytes.
LETTERS = st.text(alphabet="ab\né😀", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\né😀", min_size=1, max_size=5), max_size=5)
CUTS = st.lists(st.integers(0, 200), max_size=20)


@settings(deadline=None, max_examples=500)
@given(text=LETTERS, stops=STOPS, cuts=CUTS, keep=st.booleans())
@example(text="abab", stops=["abb", "ba"], cuts=[], keep=False)
@example(text="abc", stops=["abc", "b"], cuts=[], keep=False)
def test_the_text_ends_where_the_first_stop_string_ends(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    pieces = pieces_of(text.encode(), cuts)
    found, stop = grow(Pieces(pieces), range(len(pieces)), stop=stops, include_stop_str_in_output=keep)
    length, wanted = rule(text, stops)
    assert stop == wanted
    assert found[-1] == text[: length + len(wanted or "") * keep]
    assert all(later.startswith(earlier) for earlier, later in pairwise(found))


@settings(deadline=None, max_examples=500)
@given(text=LETTERS, stops=STOPS, cuts=CUTS)
def test_only_what_could_become_a_stop_string_is_held_back(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    text = text[: rule(text, stops)[0]]
    pieces = pieces_of(text.encode(), cuts)
    found, _ = grow(Pieces(pieces), range(len(pieces)), stop=stops)
    for num_pieces, shown in enumerate(found[:-1]):
        whole = b"".join(pieces[:num_pieces]).decode(errors="ignore")
        assert shown == whole[: len(whole) - num_pending(whole, stops)]


@settings(deadline=None)
@given(data=st.binary(max_size=40), stops=STOPS, cuts=CUTS)
def test_bytes_that_are_no_text_become_the_same_however_they_are_cut(
    data: bytes, stops: list[str], cuts: list[int]
) -> None:
    stops = [*stops, "\ufffda"]
    pieces = pieces_of(data, cuts)
    found, stop = grow(Pieces(pieces), range(len(pieces)), stop=stops)
    text = data.decode(errors="replace")
    length, wanted = rule(text, stops)
    assert (found[-1], stop) == (text[:length], wanted)
    assert all(later.startswith(earlier) for earlier, later in pairwise(found))


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF)), data=st.data())
def test_real_tokens_give_the_text_up_to_its_stop_string(smollm: Tokenizer, text: str, data: Any) -> None:
    ids = smollm.encode(text, allow_special=False)
    text = smollm.decode(ids)
    begin = data.draw(st.integers(0, len(text)))
    stops = [text[begin : begin + 3] or "none", "the"]
    found, stop = grow(smollm, ids, stop=stops)
    length, wanted = rule(text, stops)
    assert (found[-1], stop) == (text[:length], wanted)
    assert all(later.startswith(earlier) for earlier, later in pairwise(found))


def test_the_longest_of_the_stop_strings_that_end_together_is_the_one() -> None:
    assert grow(Pieces([b"xa", b"b"]), [0, 1], stop=["b", "ab"]) == (["", "x", "x", "x"], "ab")


def test_without_stop_strings_every_whole_character_is_shown_at_once() -> None:
    face = "😀".encode()
    found, stop = grow(Pieces([b"a", face[:2], face[2:], face[:3]]), range(4))
    assert found == ["", "a", "a", "a😀", "a😀", "a😀\ufffd"] and stop is None


def test_a_stop_string_may_be_ended_by_the_sign_for_broken_text() -> None:
    found, stop = grow(Pieces([b"ab", b"\xf0"]), range(2), stop="b\ufffd")
    assert (found[-1], stop) == ("a", "b\ufffd")


def test_special_tokens_are_text_only_if_they_are_not_skipped() -> None:
    pieces = Pieces([b"a", SPECIAL, b"b"])
    assert grow(pieces, range(3), stop="<|end|>", skip_special_tokens=False) == (
        ["", "a", "a", "a", "a"],
        "<|end|>",
    )
    assert grow(pieces, range(3), stop="ab")[1] == "ab"


def test_nothing_is_added_after_a_stop_string_or_the_end() -> None:
    text = Text(Pieces([b"a.b", b"c"]), SamplingParams(stop="."))  # type: ignore[arg-type]
    for token_id in (0, 1):
        text.add(token_id)
    text.finish()
    text.add(1)
    assert text.text == "a"
    ended = Text(Pieces([b"a"]), SamplingParams())  # type: ignore[arg-type]
    ended.finish()
    ended.add(0)
    assert ended.text == ""


def test_stop_strings_that_end_within_min_tokens_are_text() -> None:
    pieces = Pieces([b"a.", b"b.", b"c", b"."])
    found, stop = grow(pieces, range(4), stop=".", min_tokens=2)
    assert found == ["", "a.", "a.b.", "a.b.c", "a.b.c", "a.b.c"] and stop == "."
    # begun within them, ended after them
    assert grow(Pieces([b"xa", b"b"]), range(2), stop="ab", min_tokens=1) == (["", "x", "x", "x"], "ab")
    # begun inside one that does not count
    found, stop = grow(Pieces([b"xab", b"c"]), range(2), stop=["ab", "bc"], min_tokens=1)
    assert (found, stop) == (["", "xa", "xa", "xa"], "bc")


def test_without_detokenising_there_is_no_text(smollm: Tokenizer) -> None:
    assert grow(smollm, smollm.encode("Hello there"), detokenize=False)[0][-1] == ""


def test_no_more_is_kept_at_hand_than_could_become_a_stop_string() -> None:
    text = Text(Pieces([b"a" * 9 + b"b"]), SamplingParams(stop=("a" * 1024,)))  # type: ignore[arg-type]
    for _ in range(1000):
        text.add(0)
        assert len(text._held) < 10
    assert len(text._pieces) == 1000 and len(text.text) == 10_000


def test_reading_the_largest_stop_strings_takes_a_bounded_number_of_steps() -> None:
    stops = ["a" * (1024 - number) + "b" for number in range(1, 65)]
    automaton = StopStrings(stops)
    steps = 0

    class Counted(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    automaton._shorter = Counted(automaton._shorter)
    node = 0
    for character in ("a" * 1023 + "c") * 10:
        node = automaton.follow(node, character)
    assert steps <= 10 * 1024
