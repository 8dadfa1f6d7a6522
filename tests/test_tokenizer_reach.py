"""A text that is sure to have too many tokens is refused before it is encoded; no other text is."""

import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from infinilm.tokenizer import LARGE_TEXT, Tokenizer, TooLong
from infinilm.tokenizer.reach import BYTE_TOKENS, FIXED_LOSS, reach_of
from infinilm.tokenizer.spelling import BYTE_ALPHABET

MERGES = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("aaaa", "Ġ")]
WITHOUT_B = [letter for letter in BYTE_ALPHABET if letter != "b"]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def bpe(letters: Any, **options: Any) -> models.BPE:
    tokens = [*letters, *(left + right for left, right in MERGES), "<unk>"]
    return models.BPE({token: i for i, token in enumerate(dict.fromkeys(tokens))}, MERGES, **options)


def library_of(model: Any, *steps: Any, **parts: Any) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    for name, part in parts.items():
        setattr(library, name, part)
    return library


def byte_level(*steps: Any, **parts: Any) -> tokenizers.Tokenizer:
    return library_of(bpe(BYTE_ALPHABET), *steps, BYTE_LEVEL, **parts)


def with_bytes(**parts: Any) -> tokenizers.Tokenizer:
    letters = [*BYTE_TOKENS, "a", "Ġ"]
    return library_of(bpe(letters, unk_token="<unk>", fuse_unk=True, byte_fallback=True), **parts)


def adding(library: tokenizers.Tokenizer, text: str, **flags: bool) -> tokenizers.Tokenizer:
    library.add_tokens([AddedToken(text, **flags)])
    return library


def least(library: tokenizers.Tokenizer, text: str) -> int:
    return reach_of(library).fewest_tokens(text)


# The longest token is "aaaaĠ", or one for a byte, "<0x00>".
BOUNDED = {
    "bytes": (byte_level(), 5),
    "bytes, one of them unknown": (library_of(bpe(WITHOUT_B), BYTE_LEVEL), 5),
    "bytes of words": (byte_level(pre_tokenizers.Split(Regex(r"\s+"), "isolated")), 5),
    "composed bytes": (byte_level(normalizer=normalizers.NFC()), 20),
    "characters, and bytes of others": (with_bytes(), 6),
    "spaces as signs": (with_bytes(normalizer=normalizers.Replace(" ", "▁")), 6),
    "a shorter replacement": (with_bytes(normalizer=normalizers.Replace("aaa", "Ġ")), 18),
    "an added token": (adding(byte_level(), "<a long token>"), 14),
    "a frame": (
        byte_level(post_processor=processors.TemplateProcessing("$A <s>", special_tokens=[("<s>", 1)])),
        5,
    ),
}


@pytest.mark.parametrize("library, length", BOUNDED.values(), ids=BOUNDED)
def test_a_token_stands_for_no_more_than_the_longest(library: tokenizers.Tokenizer, length: int) -> None:
    assert reach_of(library).length == length


# What leaves text out without bound, or makes one token of any number of characters
LOSSY = {
    "white space beside a token": (adding(byte_level(), "<s>", rstrip=True), "<s>" + " " * 99),
    "white space at the ends": (byte_level(normalizer=normalizers.Strip()), " " * 99),
    "accents": (byte_level(normalizer=normalizers.StripAccents()), "\u0301" * 99),
    "what becomes nothing": (byte_level(normalizer=normalizers.Replace("b", "")), "b" * 99),
    "what a pattern finds": (byte_level(normalizer=normalizers.Replace(Regex("b+"), "b")), "b" * 99),
    "what a split removes": (byte_level(pre_tokenizers.Split("b", "removed")), "b" * 99),
    "white space between words": (byte_level(pre_tokenizers.WhitespaceSplit()), " " * 99),
    "letters of bytes that become others": (
        library_of(
            bpe(BYTE_ALPHABET),
            normalizer=normalizers.Sequence([normalizers.ByteLevel(), normalizers.Replace("b", "世")]),
        ),
        "b" * 99,
    ),
    "unknown bytes": (library_of(bpe(WITHOUT_B), BYTE_LEVEL), "b" * 99),
    "unknown bytes in place of others": (
        library_of(bpe(WITHOUT_B), BYTE_LEVEL, normalizer=normalizers.Replace("c", "b")),
        "c" * 99,
    ),
    "unknown bytes of letters of bytes": (
        library_of(bpe(set(BYTE_ALPHABET) - set("ÄĦ")), BYTE_LEVEL, normalizer=normalizers.ByteLevel()),
        "\x04" * 99,
    ),
    "unknown bytes of characters": (
        library_of(bpe([*BYTE_TOKENS][9:] + ["a", "Ġ"], byte_fallback=True)),
        "\x04" * 99,
    ),
    "unknown characters": (library_of(bpe("aĠ")), "b" * 99),
    "unknown characters as one": (library_of(bpe("aĠ", unk_token="<unk>", fuse_unk=True)), "b" * 99),
    "unknown words": (library_of(models.WordPiece({"a": 0, "<unk>": 1}, unk_token="<unk>")), "b" * 999),
    "unknown pieces": (library_of(models.Unigram([("a", 0.0), ("<unk>", 0.0)], 1, False)), "b" * 99),
    "a frame without a text": (
        byte_level(post_processor=processors.TemplateProcessing("<s>", special_tokens=[("<s>", 1)])),
        "b" * 99,
    ),
}


@pytest.mark.parametrize("library, text", LOSSY.values(), ids=LOSSY)
def test_nothing_is_told_of_tokens_that_may_stand_for_any_text(
    library: tokenizers.Tokenizer, text: str
) -> None:
    assert least(library, text) <= len(library.encode(text).ids)


def test_a_text_is_refused_once_it_cannot_have_so_few_tokens(smollm: Tokenizer) -> None:
    longest = "\n" + " " * 80  # of the vocabulary
    text = longest * (LARGE_TEXT // len(longest) + 1)
    num_tokens = len(smollm.encode(text))
    assert len(smollm.encode(text, max_tokens=num_tokens)) == num_tokens
    with pytest.raises(TooLong, match=f"at least {num_tokens + 1} tokens, .* take {num_tokens} at most"):
        smollm.encode(text + "a", max_tokens=num_tokens)


def test_a_conversation_is_refused_by_the_text_that_its_template_writes(smollm: Tokenizer) -> None:
    with pytest.raises(TooLong):
        smollm.encode_chat([{"role": "user", "content": "a" * LARGE_TEXT}], max_tokens=9)


def test_bytes_that_no_token_has_do_not_count(smollm: Tokenizer) -> None:
    assert smollm.encode("\x04" * (LARGE_TEXT + 1) + "a", max_tokens=9) == smollm.encode("a")


def test_unicode_composes_no_more_characters_than_is_said() -> None:
    composed = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    longest = max(len(unicodedata.normalize("NFD", unicodedata.normalize("NFC", one))) for one in composed)
    assert longest == FIXED_LOSS["NFC"] == FIXED_LOSS["NFKC"]


STEPS = [
    *(normalizers.NFC(), normalizers.NFKC(), normalizers.NFD(), normalizers.Lowercase(), normalizers.Strip()),
    *(normalizers.Replace("ab", "b"), normalizers.Replace(" ", "Ġ"), normalizers.Replace("aa", "")),
    *(normalizers.Prepend("Ġ"), normalizers.StripAccents(), normalizers.ByteLevel(), normalizers.Nmt()),
]
CUTS = [
    *(pre_tokenizers.Digits(True), pre_tokenizers.Metaspace(), pre_tokenizers.Whitespace(), BYTE_LEVEL),
    *(pre_tokenizers.Split("a", how) for how in ("removed", "isolated", "merged_with_next", "contiguous")),
    pre_tokenizers.Punctuation(),
]
ADDED = st.builds(
    lambda text, *flags: AddedToken(
        text, **dict(zip(("lstrip", "rstrip", "normalized"), flags, strict=True))
    ),
    st.text("ab<é", min_size=1, max_size=9),
    *[st.booleans()] * 3,
)
MODELS = [
    lambda: bpe(BYTE_ALPHABET),
    lambda: bpe([*BYTE_ALPHABET][30:] + ["a", "Ġ"], unk_token="<unk>", fuse_unk=True),
    lambda: bpe([*BYTE_TOKENS, "a", "Ġ"], byte_fallback=True),
    lambda: bpe([*BYTE_TOKENS][9:] + ["a", "Ġ"], unk_token="<unk>", fuse_unk=True, byte_fallback=True),
]


@settings(deadline=None, max_examples=200)
@given(
    model=st.sampled_from(MODELS),
    steps=st.lists(st.sampled_from(STEPS), max_size=3),
    cuts=st.lists(st.sampled_from(CUTS), max_size=3),
    ends_in_bytes=st.booleans(),
    added=st.lists(ADDED, max_size=2),
    text=st.text("ab <é\u0313\u0300\u0345ᄀ\u1161\u11a8α\n1!\x04K") | st.text(" a", min_size=20) | st.text(),
)
@example(MODELS[0], [normalizers.NFC()], [], True, [], "α\u0313\u0300\u0345" * 30)
def test_no_text_has_fewer_tokens_than_is_told(
    model: Any, steps: Any, cuts: Any, ends_in_bytes: bool, added: Any, text: str
) -> None:
    last = [BYTE_LEVEL] if ends_in_bytes else []
    library = library_of(model(), *cuts, *last, normalizer=normalizers.Sequence(steps))
    library.add_tokens(added)
    assert least(library, text) <= len(library.encode(text).ids)
