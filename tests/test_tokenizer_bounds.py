"""No tokenizer.json can make a text endless or search it endlessly: it is refused, and real ones are not."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from infinilm.tokenizer import Tokenizer, TokenizerError
from infinilm.tokenizer.bounds import _growth, check_bounds
from infinilm.tokenizer.regex import cost_of_regex

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def file(**stages: Any) -> dict[str, Any]:
    vocab = {letter: token_id for token_id, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    model = {"type": "BPE", "vocab": vocab, "merges": []} | stages.pop("model", {})
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], "model": model} | parts | stages


def load(folder: Path, content: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.from_folder(folder)


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def normalizers(*steps: Any) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def pre_tokenizers_of(*steps: Any) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


def precompiled(*entries: str) -> dict[str, Any]:
    """Sentencepiece's table of replacements: with an index of no keys, for its entries are what counts."""
    table = b"\4\0\0\0" + bytes(4) + "".join(entry + "\0" for entry in entries).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def framed(*pieces: Any) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}


DOUBLE = replace("a", "aa")
HOSTILE = {
    "doubling": (
        normalizers(*[DOUBLE] * 40),
        r"Replace \(2\), .* 1.1e\+12 times longer, but 256 times is the limit",
    ),
    "doubling in sequences": (normalizers(*[normalizers(DOUBLE, DOUBLE)["normalizer"]] * 20), "times longer"),
    "doubling spread over stages": (
        normalizers(*[DOUBLE] * 5) | pre_tokenizers_of(*[BYTE_LEVEL] * 3),
        "times longer",
    ),
    "a long replacement": (
        normalizers(replace("a", "b" * 10**6)),
        r"Replace \(1e\+06\): may make a text 1e\+06",
    ),
    "a replacement of nothing": (normalizers(replace("", "b" * 200)), r"Replace \(401\)"),
    "a replacement of what may be nothing": (
        normalizers(replace("x*", "b" * 200, "Regex")),
        r"Replace \(401\)",
    ),
    "a long prefix": (normalizers({"type": "Prepend", "prepend": "b" * 10**6}), r"Prepend \(1e\+06\)"),
    "decompositions": (normalizers(*[{"type": "NFKD"}] * 3), r"NFKD \(11\), NFKD \(11\), NFKD \(11\)"),
    "bytes of bytes": (pre_tokenizers_of(*[BYTE_LEVEL] * 40), r"ByteLevel \(4\)"),
    "marks before marks": (pre_tokenizers_of(*[METASPACE] * 40), r"Metaspace \(4\)"),
    "a long entry of a table": (normalizers(precompiled("ab", "b" * 10**6)), r"Precompiled \(1e\+06\)"),
    "a frame of many texts": ({"post_processor": framed(*[TEXT] * 1000)}, r"TemplateProcessing \(1e\+03\)"),
    "a decoder that doubles": (
        {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40}},
        r"1.1e\+12 times",
    ),
    "many steps": (
        normalizers(*[replace("a", "b")] * 10**4),
        "10000 steps are asked for, but 100 is the limit",
    ),
    "a step without a type": (
        normalizers({"pattern": {"String": "a"}, "content": "aa"}),
        "an object with a 'type'",
    ),
    "a step of no known type": (normalizers({"type": "Double"}), "step {'type': 'Double'} is not known"),
    "a pattern of neither kind": (
        normalizers(DOUBLE | {"pattern": {"Glob": "a"}}),
        "a 'String' or a 'Regex'",
    ),
    "a long prefix of letters": (
        {"model": {"continuing_subword_prefix": "#" * 10**6}},
        "put to every character",
    ),
    "a long suffix of words": ({"model": {"end_of_word_suffix": "#" * 10**6}}, "put to every character"),
    "long words": (
        {"model": {"max_input_chars_per_word": 10**9}},
        "'max_input_chars_per_word' is 1000000000",
    ),
    "backtracking in a split": (
        pre_tokenizers_of(split("(a+)+$")),
        r"'\(a\+\)\+\$' has too many ways to match",
    ),
    "backtracking in a replacement": (
        normalizers(replace("(a+)+$", "", "Regex")),
        "has too many ways to match",
    ),
}


@pytest.mark.parametrize("stages, found", HOSTILE.values(), ids=HOSTILE)
def test_a_file_whose_steps_have_no_end_is_refused_by_name(tmp_path, stages, found):
    with pytest.raises(TokenizerError, match=f"tokenizer.json: .*{found}"):
        load(tmp_path, file(**stages))


def test_an_added_token_does_not_meet_a_hostile_normalizer_first(tmp_path):
    """The library normalises added tokens while it loads."""
    token = {"id": 0, "content": "a", "special": False, "normalized": True}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    with pytest.raises(TokenizerError, match="times longer"):
        load(tmp_path, file(added_tokens=[token], **normalizers(*[DOUBLE] * 40)))


# --- Real files ---------------------------------------------------------------------------------------------

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
REAL_PATTERNS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    "GPT-4o": rf"{CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Llama 3": rf"{WORDS}|\p{{N}}{{1,3}}|{REST}",
    "Qwen 2": rf"{WORDS}|\p{{N}}|{REST}",
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek, Chinese": "[一-龥぀-ゟ゠-ヿ]+",
    "Kimi": r"[\p{Han}]+|[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "digits in threes from the right": r"\d{1,3}(?=(?:\d{3})*\b)",
    "T5": " {2,}",
    "POSIX": "[[:punct:]]+|[]x]",
}


@pytest.mark.parametrize("pattern", REAL_PATTERNS.values(), ids=REAL_PATTERNS)
def test_real_patterns_are_understood_and_bounded(pattern):
    Regex(pattern)
    assert cost_of_regex(pattern).effort < 20_000


REAL_FILES = {
    "SmolLM2": pre_tokenizers_of({"type": "Digits", "individual_digits": True}, BYTE_LEVEL)
    | {"decoder": BYTE_LEVEL},
    "Llama 2": normalizers({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    | {
        "decoder": {
            "type": "Sequence",
            "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
        }
    },
    "Llama 3": pre_tokenizers_of(split(REAL_PATTERNS["Llama 3"]), BYTE_LEVEL)
    | {
        "post_processor": {"type": "Sequence", "processors": [BYTE_LEVEL, framed(TEXT)]},
        "decoder": BYTE_LEVEL,
    },
    "Qwen 2": pre_tokenizers_of(split(REAL_PATTERNS["Qwen 2"]), BYTE_LEVEL)
    | {"normalizer": {"type": "NFC"}, "post_processor": BYTE_LEVEL, "decoder": BYTE_LEVEL},
    "CLIP": normalizers({"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"})
    | pre_tokenizers_of(split(REAL_PATTERNS["CLIP"]), BYTE_LEVEL),
}


@pytest.mark.parametrize("stages", REAL_FILES.values(), ids=REAL_FILES)
def test_real_files_load(tmp_path, stages):
    assert load(tmp_path, file(**stages)).encode("ab")


def test_the_widest_real_file_is_within_bounds():
    longest = "صلى الله عليه وسلم"  # what U+FDFA stands for: no entry of Unicode's tables is longer
    check_bounds(
        file(**normalizers(precompiled(longest), replace(" {2,}", "▁", "Regex")), pre_tokenizer=METASPACE)
    )


# --- The bounds hold ----------------------------------------------------------------------------------------

SHORT = st.text("ab▁é", max_size=3)
REPLACES = st.builds(replace, SHORT, SHORT) | st.builds(
    replace, st.sampled_from(["a*", "a+", "b?|a", "."]), SHORT, st.just("Regex")
)
STEPS = REPLACES | st.builds(lambda text: {"type": "Prepend", "prepend": text}, SHORT)
BERT = {"type": "BertNormalizer"} | dict.fromkeys(
    ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), True
)
OTHERS = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "StripAccents", "ByteLevel"]


@settings(deadline=None)
@given(
    step=STEPS | st.sampled_from([BERT, *({"type": kind} for kind in OTHERS)]),
    text=st.text(min_size=1) | SHORT.filter(len),
)
@example(step={"type": "NFKC"}, text="\ufdfa")
@example(step={"type": "NFD"}, text="\uac01")
@example(step={"type": "Lowercase"}, text="\u0130")
def test_no_step_makes_a_text_longer_than_its_factor_says(step, text):
    normalizer = tokenizers.Tokenizer.from_str(json.dumps(file(normalizer=step))).normalizer
    assert len(normalizer.normalize_str(text).encode()) <= _growth(step) * len(text.encode())


HOSTILE_PATTERNS = [
    *("(a+)+$", "(a|a)+$", "(a|aa)+$", "(a*)*", "(.*)*x", "a**", "(?i)(a+)+b", "(?>(a+)+)b"),
    *("a*a*b", r"\s+\s+\s+$", "a{5,}a{5,}b", "a{0,99999}a{0,99999}b", "a{1001,}a{1001,}b"),
    *("(?:.?){22}[^\\s\\S]", ".?" * 22 + "[^\\s\\S]", "((a{0,9}){0,9})b", "(?:a{1000}){1000}b"),
    *("(?=(a+)+$)", "(?:(?=a*b)c)*d", "a*(?!a+b)c", "(?:a*(?:(?=a*d)e)?)f"),
]


@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS)
def test_patterns_with_too_many_ways_are_refused(pattern):
    with pytest.raises(ValueError, match="has too many ways to match"):
        cost_of_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(a)\\1",
            r"\g<0>",
            "(?<n>a)",
            "(?~a)",
            "(*FAIL)",
            "(?x)a",
            "(?#a)b",
            "a(?i)b",
            "a{2}?",
            r"\c(",
            r"\Ka",
        ),
        *("(a", "a)", "*a", "[a", r"[\c](a+)+]", "[[:" + "a" * 30 + ":](a+)+]"),
    ],
)
def test_patterns_that_are_not_understood_are_refused(pattern):
    with pytest.raises(ValueError, match="is not understood at"):
        cost_of_regex(pattern)


ATOMS = st.sampled_from(["a", "[ab]", ".", "b", "$", r"\b", "[^b]", r"\w"])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{0,3}", "{2}", "{2,}", "*?", "++", "{,2}", "{1,9}?"])


def joined(pieces: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequence = st.lists(st.tuples(pieces, REPEATS).map("".join), min_size=1, max_size=4).map("".join)
    branches = st.lists(sequence, min_size=1, max_size=2).map("|".join)
    return st.tuples(st.sampled_from(["(", "(?:", "(?=", "(?!", "(?>"]), branches, st.just(")")).map("".join)


def is_accepted(pattern: str) -> bool:
    try:
        cost_of_regex(pattern)
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=200)
@given(pattern=st.recursive(ATOMS, joined, max_leaves=8).filter(is_accepted))
def test_patterns_that_are_accepted_are_searched_without_exhausting_the_engine(pattern):
    """It gives up after ten million tries at one place, with a panic."""
    try:
        splitting = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:  # such as a look-behind the engine does not take
        return
    start = time.process_time()
    for text in ("a" * 300, "ab" * 100 + "\n", "b" + "a" * 60 + "c"):
        splitting.pre_tokenize_str(text)
    assert time.process_time() - start < 5
