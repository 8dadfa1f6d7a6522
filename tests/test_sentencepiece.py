"""A folder with tokenizer.model alone: as sentencepiece itself and, around special tokens, transformers."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from engines import write_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece_files import (
    BYTE,
    CONTROL,
    PLAIN,
    UNKNOWN,
    UNUSED,
    field,
    model_file,
    piece,
    train,
    varint,
)
from servers import running

from infinilm import LLM, SamplingParams
from infinilm.tokenizer import Detokenizer, Tokenizer, TokenizerError
from infinilm.tokenizer.normalizer import CharacterTable
from infinilm.tokenizer.sentencepiece_format import SentencePieceFile

RECORDED = json.loads((Path(__file__).parent / "data" / "smollm2_tokenizer.json").read_text())
HARD_TEXTS = [
    *(case["text"] for case in RECORDED["texts"]),
    *(" <sym>", "<sym>a", "a<sym> b", "  <sym>  <sym>  ", "<sym><sym>x ①<sym>①", "</b><b> </b>"),
    *(
        "▁a▁",
        "a ▁ b",
        "a\u0301 e\u0301\u0302 \u1100\u1161\u11a8 가 ㍿ ﷺ",
        "<0x41><unk><ctl><s>",
        "\n \t ",
        "\0\x1b",
    ),
]
SYMBOLS = {"user_defined_symbols": ["<sym>", "▁▁", "①"], "control_symbols": ["<ctl>"]}
# Without "▁▁": of two ways that score the same, rounding decides, and the library rounds in double precision.
FEWER = {"user_defined_symbols": ["<sym>", "①"], "control_symbols": ["<ctl>"]}
PAIRS = {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True}
UNIGRAM = {"model_type": "unigram", "vocab_size": 150}
WITH_BYTES = {"vocab_size": 400, "byte_fallback": True}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 2": PAIRS | PLAIN | SYMBOLS,
    "Gemma": PAIRS | PLAIN | SYMBOLS | {"add_dummy_prefix": False},
    "one space for many": PAIRS | {"normalization_rule_name": "identity"},
    "pairs of NFKC": {"model_type": "bpe", "vocab_size": 160, **SYMBOLS},
    "unigram": UNIGRAM,
    "unigram with symbols": UNIGRAM | FEWER,
    "unigram with bytes, in lower case": UNIGRAM
    | WITH_BYTES
    | FEWER
    | {"normalization_rule_name": "nmt_nfkc_cf"},
    "unigram of plain text": UNIGRAM | WITH_BYTES | PLAIN | FEWER,
}


def write_folder(folder: Path, model: bytes, **config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(model)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, model: bytes, **config: Any) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(folder, model, **config))


@pytest.fixture(params=MODELS, scope="module")
def both(request, tmp_path_factory) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    model = train(**MODELS[request.param])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    return load(tmp_path_factory.mktemp("model"), model), theirs


def encode(ours: Tokenizer, text: str) -> list[int]:
    return ours.encode(text, add_special_tokens=False, allow_special=False)


def check(ours: Tokenizer, theirs: sentencepiece.SentencePieceProcessor, text: str) -> None:
    ids = theirs.encode(text)
    if not is_cut(ours, text):
        assert encode(ours, text) == ids
    if theirs.unk_id() not in ids and "▁" not in text:
        assert ours.decode(ids) == theirs.decode(ids)


def is_cut(ours: Tokenizer, text: str) -> bool:
    """A unigram model keeps "<" and "s>" apart, lest they become BOS; sentencepiece might join "s>a"."""
    is_unigram = ours._library.pre_tokenizer is not None
    return is_unigram and any(name in text for name in ("<s>", "</s>", "<unk>", "<ctl>", "<0x"))


def test_hard_texts_become_the_tokens_of_sentencepiece_and_come_back(both):
    for text in HARD_TEXTS:
        check(*both, text)


LETTERS = st.sampled_from(
    [*"abcdethe qo <>sym▁  \n\t你é①가", "<sym>", "e\u0301", "▁▁", "ﬁ", "\u1100\u1161", "😀"]
)


@settings(deadline=None, max_examples=200)
@given(text=st.lists(LETTERS, max_size=20).map("".join) | st.text(max_size=20))
@example(text="<sym>▁▁▁<sym>")
@example(text="e\u0301\u0302e\u0301")
def test_any_text_becomes_the_tokens_of_sentencepiece(both, text):
    check(*both, text)


@settings(deadline=None)
@given(data=st.data())
def test_pieces_stream_as_sentencepiece_decodes_them(both, data):
    ours, theirs = both
    normal = [i for i in range(len(theirs)) if not theirs.is_unknown(i) and not theirs.is_byte(i)]
    ids = data.draw(st.lists(st.sampled_from(normal)))
    detokenizer = Detokenizer(ours)
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert text == ours.decode(ids)
    assert text.lstrip() == theirs.decode(ids).lstrip()


@settings(deadline=None)
@given(data=st.data())
def test_what_follows_a_text_reads_as_the_whole_does(both, data):
    ours, theirs = both
    normal = [i for i in range(len(theirs)) if not theirs.is_unknown(i) and not theirs.is_byte(i)]
    shown = [i for i in normal if not theirs.is_control(i)]
    before, after = (
        data.draw(st.lists(st.sampled_from(shown), min_size=1)),
        data.draw(st.lists(st.sampled_from(normal))),
    )
    detokenizer = Detokenizer(ours, is_start=False)
    text = "".join(map(detokenizer.add, after)) + detokenizer.finish()
    assert ours.decode(before) + text == ours.decode(before + after)


def test_vocabulary_and_roles_are_those_of_the_model(both):
    ours, theirs = both
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (len(theirs), 1, (2,))
    specials = {i for i in range(len(theirs)) if theirs.is_control(i) or theirs.is_unknown(i)}
    assert ours.special_token_ids == specials


def test_written_special_tokens_are_text_where_they_are_not_allowed(both):
    ours, _ = both
    for text in ("<s>", "a</s>", "<unk><ctl> <0x41>", "<s><s>"):
        assert not (ours.special_token_ids - {0}) & set(encode(ours, text))


# --- Settings beside the model, against transformers --------------------------------------------------------

LLAMA = train(model_type="bpe", vocab_size=420, byte_fallback=True, **PLAIN)
SIZE = sentencepiece.SentencePieceProcessor(model_proto=LLAMA).get_piece_size()
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
ADDED = {
    "0": {"content": "<unk>"} | FLAGS,
    "1": {"content": "<s>"} | FLAGS,
    "2": {"content": "</s>"} | FLAGS,
    str(SIZE): {"content": "<|user|>"} | FLAGS | {"rstrip": True},
    str(SIZE + 1): {"content": "<|end|>"} | FLAGS,
    str(SIZE + 2): {"content": "<think>"} | FLAGS | {"special": False},
}
PHI = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "<|end|>",
    "unk_token": "<unk>",
    "added_tokens_decoder": ADDED,
}
# Where a text begins with a space transformers takes it for the one that every text gets, and loses it.
AROUND_SPECIALS = [
    *(text for text in HARD_TEXTS if text[:1] not in (" ", "▁") and "<s>" not in text),
    *("</s>a", "<|user|> hi<|end|>\n x", "a<|end|>b<|user|>\n\nc", "<|end|><|end|>a <think>b</think>"),
]


@pytest.mark.parametrize("legacy", [False, None, True])
@pytest.mark.parametrize("frame", [(True, False), (False, True)])
def test_special_and_added_tokens_are_found_as_by_transformers(tmp_path, legacy, frame):
    from transformers import LlamaTokenizer

    given = {} if legacy is None else {"legacy": legacy}
    framed = {"add_bos_token": frame[0], "add_eos_token": frame[1]}
    folder = write_folder(tmp_path, LLAMA, **PHI, **given, **framed)
    ours, theirs = Tokenizer.from_folder(folder), LlamaTokenizer.from_pretrained(folder)
    for text in AROUND_SPECIALS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        if "▁" not in text:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (ours.vocab_size, ours.eos_token_ids) == (len(theirs), (SIZE + 1,))


def test_a_model_trained_the_old_way_has_a_space_behind_each_special_token(tmp_path):
    tokens = {}
    for legacy in (False, True):
        ours = load(tmp_path, LLAMA, **PHI, legacy=legacy)
        ids = ours.encode("<|end|>the", add_special_tokens=False)
        tokens[legacy] = [ours.token_bytes(token_id) for token_id in ids]
    assert tokens == {False: [b"<|end|>", b"t", b"h", b"e"], True: [b"<|end|>", b" the"]}


def test_a_space_in_front_can_be_turned_off(tmp_path):
    ours = load(tmp_path, LLAMA, **PHI, add_prefix_space=False)
    assert ours.token_bytes(ours.encode("the", add_special_tokens=False)[0]) == b"t"
    assert ours.decode(ours.encode(" the")) == " the"


def test_a_token_of_the_models_own_can_be_given_another_name(tmp_path):
    renamed = {"2": {"content": "<|stop|>"} | FLAGS}
    ours = load(tmp_path, LLAMA, eos_token="<|stop|>", added_tokens_decoder=renamed)
    assert ours.encode("<|stop|>", add_special_tokens=False) == [2] and ours.eos_token_ids == (2,)


def test_tokens_are_added_by_the_file_that_older_folders_have(tmp_path):
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<b>": SIZE + 1, "[PAD]": SIZE}))
    ours = load(tmp_path, LLAMA, pad_token="[PAD]")
    assert ours.encode("[PAD]<b>", add_special_tokens=False) == [SIZE, SIZE + 1]
    assert SIZE in ours.special_token_ids and SIZE + 1 not in ours.special_token_ids


@pytest.mark.parametrize("given", [["<b>"], [{"content": "<b>"}]])
def test_a_symbol_that_the_settings_call_special_is(tmp_path, given):
    model = train(**PAIRS, **PLAIN, user_defined_symbols=["<b>", "<end_of_turn>", "</b>"])
    ours = load(tmp_path, model, additional_special_tokens=given)
    ids = ours.encode("<b><end_of_turn></b>", add_special_tokens=False)[-3:]
    assert [token_id in ours.special_token_ids for token_id in ids] == [True, True, False]
    assert not ours.special_token_ids & set(encode(ours, "<b><end_of_turn>"))


def test_a_chat_has_the_same_tokens_whether_or_not_a_message_names_a_special_one(tmp_path):
    template = "<|user|>{{ messages[0].content }}<|end|>"
    ours = load(tmp_path, LLAMA, **PHI, chat_template=template)
    (user, *plain, end), (_, *written, _) = (
        ours.encode_chat([{"role": "user", "content": content}]) for content in ("the<b>", "the<b><|end|>")
    )
    assert (user, end) == (SIZE, SIZE + 1)
    assert written[: len(plain)] == plain and end not in written


@pytest.mark.parametrize(
    "config, found",
    [
        ({"legacy": 1}, "'legacy' must be true or false, but is 1"),
        ({"add_bos_token": "yes"}, "'add_bos_token' must be true or false, but is 'yes'"),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, r"'added_tokens_decoder' must be an object, but is \[1\]"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "has 'x', which is no token id"),
        ({"added_tokens_decoder": {"-1": {"content": "a"}}}, "has '-1', which is no token id"),
        ({"added_tokens_decoder": {"9" * 99: {"content": "a"}}}, "which is no token id"),
        ({"added_tokens_decoder": {"5": "a"}}, "has 'a' for 5, but must have a text as 'content'"),
        ({"added_tokens_decoder": {"5": {"content": ""}}}, "must have a text as 'content'"),
        ({"added_tokens_decoder": {"5": {"content": "a", "rstrip": 1}}}, "true or false as lstrip, rstrip"),
        (
            {"added_tokens_decoder": {str(SIZE + 5): {"content": "<x>"}}},
            f"added token {SIZE + 5} is '<x>', .* without a gap",
        ),
        (
            {"added_tokens_decoder": {"2": {"content": "<s>"}}},
            "added token 1 is '<s>', but that is token 2 of tokenizer.model",
        ),
        ({"bos_token": "<x>"}, "'<x>' is to frame every text, but is no token of tokenizer.model"),
        ({"additional_special_tokens": "<x>"}, "'additional_special_tokens' must be a list, but is a str"),
        ({"eos_token": "</end>"}, "'eos_token' '</end>' is not in tokenizer.model"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_by_name(tmp_path, config, found):
    if found is None:
        assert load(tmp_path, LLAMA, **config).vocab_size == SIZE
        return
    with pytest.raises(TokenizerError, match=found):
        load(tmp_path, LLAMA, **config)


def test_tokenizer_json_is_read_where_there_are_both(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        load(tmp_path, LLAMA)


# --- Broken and hostile files -------------------------------------------------------------------------------

START = [piece("<unk>", kind=UNKNOWN), piece("<s>", kind=CONTROL), piece("</s>", kind=CONTROL)]
GOOD = [*START, piece("▁", -1.0), piece("a", -2.0), piece("▁a", -3.0)]
ALL_BYTES = [piece(f"<0x{byte:02X}>", kind=BYTE) for byte in range(256)]
TABLE = SentencePieceFile.parse(train(model_type="unigram", vocab_size=60)).table


def table(size: int, *units: int, rest: bytes = b"") -> bytes:
    return field(
        2, size.to_bytes(4, "little") + b"".join(unit.to_bytes(4, "little") for unit in units) + rest
    )


def test_a_file_written_field_by_field_is_read(tmp_path):
    ours = load(tmp_path, model_file(*GOOD))
    assert [ours.token_bytes(i) for i in ours.encode("a a")] == [b"<s>", b" a", b" a"]


def test_fields_that_nobody_knows_and_fields_in_other_orders_are_read_over(tmp_path):
    unknown = field(99, b"x") + field(98, 7) + field(97, 1.5) + varint(96 << 3 | 1) + bytes(8)
    turned = field(1, field(3, 1) + field(2, -3.0) + unknown + field(1, "▁a".encode()))
    ours = load(tmp_path, model_file(unknown, *GOOD[:-1], turned))
    assert ours.encode("a", add_special_tokens=False) == [5]


BROKEN = {
    "nothing": (b"", "has 0 pieces for what is unknown, but must have one"),
    "a text": (b"Hello, world!\n", "is (no protobuf|cut short, or no protobuf)"),
    "cut short": (model_file(*GOOD)[:-3], "is cut short, or no protobuf: a field of"),
    "a length beyond all": (b"\x0a" + varint(2**62), "a field of 4611686018427387904 bytes, 0 left"),
    "an integer without end": (b"\xff" * 99, "no integer at byte 0"),
    "a group": (b"\x0b", "a field of kind 3"),
    "no text": (model_file(*GOOD, piece("")), "piece 6 has text '', score 0.0 and kind 1"),
    "a score that is no number": (model_file(*GOOD, piece("b", float("nan"))), "score nan"),
    "a score without end": (model_file(*GOOD, piece("b", float("-inf"))), "score -inf"),
    "an unknown kind": (model_file(*GOOD, piece("b", kind=9)), "kind 9; but .* a kind from 1 to 6"),
    "a kind below all": (model_file(*GOOD, piece("b", kind=-1)), "kind -1"),
    "a kind that is a text": (
        model_file(*GOOD, field(1, field(3, b"x"))),
        "'kind' is of kind 2, but must be of kind 0",
    ),
    "a text that is a number": (
        model_file(*GOOD, field(1, field(1, 7))),
        "'text' is of kind 0, but must be of kind 2",
    ),
    "not UTF-8": (model_file(*GOOD, piece(b"\xff")), "'utf-8' codec"),
    "a piece twice": (model_file(*GOOD, piece("a")), "piece 4 is 'a', which is also piece 6"),
    "nothing unknown": (model_file(*GOOD[1:]), "has 0 pieces for what is unknown"),
    "two unknown": (model_file(*GOOD, piece("b", kind=UNKNOWN)), "has 2 pieces for what is unknown"),
    "unused": (model_file(*GOOD, piece("b", kind=UNUSED)), "piece 6, 'b', is marked as unused"),
    "a byte that is none": (
        model_file(*GOOD, piece("<0xZZ>", kind=BYTE)),
        "piece 6 is '<0xZZ>', but a byte is",
    ),
    "bytes without a use": (
        model_file(*GOOD, *ALL_BYTES),
        "has 256 pieces for bytes, but 'byte_fallback' is False",
    ),
    "half the bytes": (
        model_file(*GOOD, *ALL_BYTES[:128], trainer=field(3, 2) + field(35, 1)),
        "has 128 pieces for bytes, but 'byte_fallback' is True",
    ),
    "a long piece": (model_file(*GOOD, piece("a" * 513)), "but a token has at most 512 characters"),
    "a model of words": (
        model_file(*GOOD, trainer=field(3, 3)),
        "of type word are not supported; unigram and bpe are",
    ),
    "a model of type 77": (model_file(*GOOD, trainer=field(3, 77)), "of type 77 are not supported"),
    "spaces behind words": (
        model_file(*GOOD, trainer=field(3, 2) + field(24, 1)),
        "treat_whitespace_as_suffix is not",
    ),
    "spaces as they are": (
        model_file(*GOOD, normalizer=field(5, 0)),
        "escape_whitespaces = false is not supported",
    ),
    "a table for decoding": (
        model_file(*GOOD) + field(5, table(4, 0)),
        "a table for decoding is not supported",
    ),
    "a table too large": (
        model_file(*GOOD, normalizer=field(2, bytes(3 << 20))),
        "has 3145728 bytes, more than 2097152",
    ),
    "a table of nothing": (model_file(*GOOD, normalizer=table(0)), "has 4 bytes, 0 of them for keys"),
    "a table cut short": (model_file(*GOOD, normalizer=table(400, 0)), "has 8 bytes, 400 of them for keys"),
    "a table of odd size": (model_file(*GOOD, normalizer=table(5, 0, 0)), "has 12 bytes, 5 of them for keys"),
    "very many control pieces of a unigram model": (
        model_file(*GOOD, *(piece(f"<{i}>", kind=CONTROL) for i in range(2000)), trainer=b""),
        "has 2003 control pieces, but at most 1024",
    ),
}


@pytest.mark.parametrize("model, found", BROKEN.values(), ids=BROKEN)
def test_a_broken_model_is_refused_with_the_rule(tmp_path, model, found):
    with pytest.raises(TokenizerError, match=f"tokenizer.model: .*{found}"):
        load(tmp_path, model)


def test_ids_of_roles_that_are_no_tokens_are_none(tmp_path):
    trainer = field(3, 2) + field(41, 99) + field(42, -1) + field(43, -(2**40))
    ours = load(tmp_path, model_file(*GOOD, trainer=trainer))
    assert (ours.bos_token_id, ours.eos_token_ids) == (None, ())


LEAF = 1 << 8
UNITS = [0, 1, 0xFF, 0xFFFFFFFF, 1 << 31, 1 << 9 | 1 << 10, LEAF | 1 << 10, LEAF | 5 << 10 | ord("a")]


@pytest.mark.parametrize("unit", UNITS)
def test_a_key_leads_through_the_array_and_never_out_of_it(unit):
    raw = (400).to_bytes(4, "little") + unit.to_bytes(4, "little") * 100 + b"abc\0" * 3 + b"\xff"
    with suppress(ValueError):
        CharacterTable(raw).rewrite("aab\0\xe9\u4f60" * 20)


@settings(deadline=None, max_examples=200)
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=40))
def test_a_changed_table_rewrites_or_refuses(changes):
    raw = bytearray(TABLE)
    for place, byte in changes:
        raw[place % len(raw)] = byte
    with suppress(ValueError):
        CharacterTable(bytes(raw)).rewrite("aé①\u1100\u1161 \ufdfa" * 3)


def test_changed_models_are_loaded_and_encode_or_are_refused(tmp_path):
    rng, num_loaded = random.Random(2), 0
    originals = [LLAMA, model_file(*GOOD), model_file(*GOOD, trainer=field(3, 1), normalizer=field(4, 0))]
    for _ in range(600):
        raw = bytearray(rng.choice(originals))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(raw))
            raw[place : place + rng.randrange(3)] = rng.choice([b"", b"\0", b"\xff", rng.randbytes(1)])
        with suppress(TokenizerError):
            ours = load(tmp_path, bytes(raw))
            assert all(token_id < ours.vocab_size for token_id in ours.encode("a <s> \U0001f600 aa"))
            num_loaded += 1
    assert 0 < num_loaded < 600


# --- What follows a prompt ----------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "the quick"}]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> Path:
    """A model whose template ends in text, as that of Llama 2"""
    folder = write_model(tmp_path_factory.mktemp("speaking"), vocab_size=420)
    (folder / "tokenizer.json").unlink()
    model = train(**MODELS["Llama 2"])
    return write_folder(folder, model, chat_template="[INST] {{ messages[0].content }} [/INST]")


@pytest.fixture(scope="module")
def llm(speaking: Path) -> LLM:
    return LLM(speaking, kv_cache_memory="4MB", device="cpu")


@pytest.fixture(scope="module")
def only_fox(llm: LLM) -> dict[str, Any]:
    return {"allowed_token_ids": [encode(llm.tokenizer, "fox")[0]], "max_tokens": 2}


def test_a_continuation_has_the_space_that_parts_it_from_its_prompt(llm, only_fox):
    params = SamplingParams(**only_fox)
    ids = llm.tokenizer.encode("the quick")
    for prompt in ("the quick", ids):
        (found,) = llm.generate(prompt, params)
        assert found.outputs[0].text == " fox fox"
        assert "".join(text for _, text in llm.stream(prompt, params)) == " fox fox"
    assert llm.tokenizer.decode([*ids, *found.outputs[0].token_ids]) == "the quick fox fox"


def test_an_answer_begins_without_a_space(llm, only_fox):
    params, tokenizer = SamplingParams(**only_fox), llm.tokenizer
    (found,) = llm.chat(ASKED, params)
    assert found.outputs[0].text == "fox fox"
    control = tokenizer.encode("<ctl>", add_special_tokens=False)[-1]
    for prompt in (tokenizer.encode_chat(ASKED), [*tokenizer.encode("the quick"), control]):
        assert llm.generate(prompt, params)[0].outputs[0].text == "fox fox"
        assert "".join(text for _, text in llm.stream(prompt, params)) == "fox fox"


def test_a_message_of_the_assistant_that_is_continued_is_text_before(llm, only_fox):
    prompt = llm.tokenizer.encode_chat(ASKED, add_generation_prompt=False)
    assert llm.generate(prompt, SamplingParams(**only_fox))[0].outputs[0].text == " fox fox"


def test_an_echoed_prompt_and_its_continuation_are_one_text(speaking, only_fox):
    with running(speaking) as server:
        for prompt in ("the quick", [1, *only_fox["allowed_token_ids"]]):
            asked = {"prompt": prompt, "echo": True, **only_fox}
            text = server.post("/v1/completions", **asked).json()["choices"][0]["text"]
            assert text == ("the quick" if isinstance(prompt, str) else "<s> fox") + " fox fox"
            streamed = server.stream("/v1/completions", **asked)
            assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == text
        answer = server.post("/v1/chat/completions", messages=ASKED, **only_fox).json()
        assert answer["choices"][0]["message"]["content"] == "fox fox"
