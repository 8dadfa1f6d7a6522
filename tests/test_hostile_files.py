"""A model's files as an attacker writes them: each is refused by name, in little time and memory.

What could take much of either is loaded in forks of one process, this file run as a program, and measured.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import tokenizers
import torch
from gguf_files import (
    BOOL,
    CONFIG,
    FLOAT32,
    LETTERS,
    STRING,
    array,
    integer,
    real,
    string,
    strings,
    text,
    u32,
    u64,
    whole_file,
)
from sentencepiece_files import CONTROL, UNKNOWN, field, model_file, piece
from tokenizers import decoders, models, processors

from infinilm.checkpoint import CheckpointError
from infinilm.config import LIMITS, UNSUPPORTED, LlamaConfig
from infinilm.engine.request import RequestError
from infinilm.llm import LLM
from infinilm.sampling import SamplingParams
from infinilm.startup import load_model
from infinilm.tokenizer import TokenizerError

FLAGS = [field.name for field in dataclasses.fields(LlamaConfig) if field.type == "bool"]

INDEX = "model.safetensors.index.json"
NAME = "model.layers.0." + "a_module_with_a_long_name." * 6 + "weight"
UINT16, UINT8 = 2, 0


@dataclass(frozen=True)
class Row:
    """What is done to a good folder, the error it has to end in (None: it loads), and what it may cost.

    Without a limit in megabytes a row is loaded right here, which is much faster.
    """

    change: Callable[[Path], Path | None]
    error: str | None
    megabytes: int | None = None
    seconds: int = 8  # of CPU time; most take a hundredth of it


# A good folder and a good GGUF file


def tiny_tokenizer(tokens: str = LETTERS) -> dict[str, Any]:
    library = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    library.decoder = decoders.ByteLevel()
    found: dict[str, Any] = json.loads(library.to_str())
    return found


def good_folder(folder: Path) -> Path:
    gguf_files.write_folder(folder, gguf_files.llama_weights(), bos_token_id=None, eos_token_id=3)
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "a", "chat_template": "{{ messages }}"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


# Ways to change them


def config(**changes: Any) -> Callable[[Path], None]:
    return write("config.json", json.dumps(CONFIG | changes))


def raw_config(key: str, value: str) -> Callable[[Path], None]:
    """A value as it is written, which json.dumps would not write."""
    return write("config.json", json.dumps(CONFIG)[:-1] + f', "{key}": {value}}}')


def write(name: str, content: str | bytes | Callable[[], str]) -> Callable[[Path], None]:
    """The content of a file; what is large is made when it is needed."""

    def change(folder: Path) -> None:
        made = content() if callable(content) else content
        (folder / name).write_bytes(made if isinstance(made, bytes) else made.encode())

    return change


def tokenizer(**changes: Any) -> Callable[[Path], None]:
    return write("tokenizer.json", json.dumps(tiny_tokenizer() | changes))


def added_token(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content} | flags


def sentencepiece_model(make: Callable[[], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(make())

    return change


def good_pieces() -> list[bytes]:
    letters = [piece(letter, -float(index)) for index, letter in enumerate(LETTERS[:36])]
    return [piece("<unk>", kind=UNKNOWN), piece("<s>", kind=CONTROL), piece("</s>", kind=CONTROL), *letters]


def gguf_value(key: str, make: Callable[[], bytes]) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        file = whole_file()
        file.set(key, make())
        (folder / "tiny.gguf").write_bytes(file.encode())
        return folder / "tiny.gguf"

    return change


def as_qwen(folder: Path) -> Path:
    file = whole_file()
    for key, value in list(file.values):
        if str(key).startswith("llama."):
            file.values.remove((key, value))
            file.set(str(key).replace("llama.", "qwen2."), value)
    file.set("general.architecture", text("qwen2"))
    file.set("qwen2.attention.sliding_window", integer(16))
    (folder / "tiny.gguf").write_bytes(file.encode())
    return folder / "tiny.gguf"


def link_out(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        outside = Path(tempfile.mkdtemp(dir=folder.parent)) / name
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return change


def link_index_out(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text("{}")
    link_out(INDEX)(folder)


def link_gguf_out(folder: Path) -> Path:
    gguf_value("general.name", lambda: text("tiny"))(folder)
    (folder / "only").mkdir()
    (folder / "only" / "tiny.gguf").symlink_to(folder / "tiny.gguf")
    return folder / "only"


def link_nowhere(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("nowhere")

    return change


def folder_as_file(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def hub_cache(folder: Path) -> Path:
    """As the hub keeps a repository: each file of a snapshot is a link to a blob."""
    snapshot, blobs = folder / "models--a--b" / "snapshots" / "0123abc", folder / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    return snapshot


def index(content: str | Callable[[], str]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        write(INDEX, content)(folder)

    return change


def safetensors_header(make: Callable[[], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        header = make()
        (folder / "model.safetensors").write_bytes(u64(len(header)) + header)

    return change


def whole(key: str) -> str:
    return f"config: {key} must be a whole number from 1 to {LIMITS[key]}, but is "


# The rows: config.json

WRONG = {"text": "x", "a fraction": 1.5, "true": True, "a list": [], "an object": {}, "negative": -1}
HUGE = {"10^9": 10**9, "2^70": 2**70, "10^400": 10**400, "10^4000": 10**4000}
QWEN = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, **FACTORS}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 32, **LLAMA3}
DEEP = "[" * 300 + "]" * 300

ROWS: dict[str, Row] = {
    "nothing": Row(lambda folder: None, None),
    "layers without end, with windows": Row(
        config(**QWEN, num_hidden_layers=10**9), whole("num_hidden_layers"), 64
    ),
    "heads of 2^28": Row(config(head_dim=2**28), whole("head_dim") + "268435456", 64),
    "yarn of theta 1": Row(
        config(rope_theta=1, rope_scaling=YARN), "config: rope_theta 1.0, .*no frequencies"
    ),
    "yarn of beta 1e308": Row(
        config(rope_scaling=YARN | {"beta_fast": 1e308}),
        "rope_scaling: beta_fast must be .*, but is 1e\\+308",
    ),
    "dynamic rope of heads of 2": Row(
        config(head_dim=2, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "head_dim 2, .*no frequencies",
    ),
    "longrope trained on one token": Row(
        config(max_position_embeddings=1, rope_scaling=LONGROPE), "rope_scaling .*no frequencies"
    ),
    "a scaling for each type of layer": Row(
        config(rope_parameters={"full_attention": YARN}), "does not know \\['full_attention'\\]"
    ),
    "a rope type that is a list": Row(
        config(rope_scaling={"rope_type": []}), "rope_scaling: type \\[\\] is unknown"
    ),
    "rope factors without end": Row(
        config(rope_scaling=LONGROPE | {"short_factor": [1] * 80_000}),
        "short_factor must be 8 positive numbers",
    ),
    "rope factor 10^400 in a list": Row(
        config(rope_scaling=LONGROPE | {"long_factor": [10**400] * 8}), "long_factor\\[0\\] must be a number"
    ),
    "layer types unknown": Row(
        config(layer_types=["chunked_attention"] * 2), "layer_types has 'chunked_attention'"
    ),
    "layer types of lists": Row(config(layer_types=[[], []]), "layer_types has \\[\\]"),
    "layer types a text": Row(config(layer_types="xx"), "layer_types must name 2 layers, but is 'xx'"),
    "layer types a number": Row(config(layer_types=7), "layer_types must name 2 layers, but is 7"),
    "too many layer types": Row(
        config(layer_types=["full_attention"] * 9000), "layer_types must name 2 layers"
    ),
    "windows without a size": Row(
        config(layer_types=["sliding_attention"] * 2),
        "layer_types has 'sliding_attention', but sliding_window",
    ),
    "windows on by text": Row(
        config(**QWEN | {"use_sliding_window": "false"}),
        "use_sliding_window must be true or false, but is 'false'",
    ),
    "first window a text": Row(
        config(**QWEN | {"max_window_layers": "x"}), "max_window_layers must be a whole number"
    ),
    "model type a list": Row(config(model_type=[]), "model_type \\[\\] is unknown"),
    "dtype a list": Row(config(torch_dtype=[]), "dtype must be one of .*, but is \\[\\]"),
    "activation a tower of lists": Row(
        raw_config("hidden_act", DEEP), "hidden_act \\[+\\.\\.\\.\\]+ is not supported"
    ),
    "activation unknown": Row(config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "NaN": Row(raw_config("rope_theta", "NaN"), "config.json: .*key 'rope_theta' is nan"),
    "infinity": Row(raw_config("rope_theta", "Infinity"), "config.json: .*key 'rope_theta' is inf"),
    "infinity in a list": Row(raw_config("x", "[[1, -Infinity]]"), "config.json: .*key 'x' is .*-inf"),
    "infinity by its size": Row(raw_config("rope_theta", "1e400"), "config.json: .*key 'rope_theta' is inf"),
    "5000 digits": Row(
        raw_config("rope_theta", "9" * 5000), "config.json: not valid JSON: Exceeds the limit"
    ),
    "a tower of brackets": Row(raw_config("x", "[" * 100_000), "config.json: not valid JSON"),
    "a million keys": Row(
        write("config.json", lambda: "{" + ",".join(f'"{i}":0' for i in range(10**6)) + "}"),
        "config.json: has 10888891 bytes, more than 262144",
        64,
    ),
    "a key twice": Row(raw_config("model_type", '"qwen2"'), "config.json: .*key 'model_type' appears twice"),
    "not UTF-8": Row(
        write("config.json", b'{"model_type": "\xff"}'), "config.json: not valid JSON: 'utf-8' codec"
    ),
    "half a surrogate pair": Row(
        raw_config("hidden_act", '"\\ud800"'), "hidden_act '.ud800' is not supported"
    ),
    "empty config": Row(write("config.json", b""), "config.json: not valid JSON"),
}
ROWS |= {
    f"{key} {kind}": Row(config(**{key: value}), whole(key))
    for key in LIMITS
    for kind, value in {**WRONG, "0": 0, "2^28 and 2": 2**28 + 2, "10^400": 10**400}.items()
}
ROWS |= {
    f"{key} {kind}": Row(config(**{key: value}), f"config: {key} must be a number .*, but is ")
    for key in ("rope_theta", "rms_norm_eps")
    for kind, value in {**WRONG, "0": 0, "10^30": 10**30, "10^400": 10**400, "1e308": 1e308}.items()
    if kind != "a fraction" or key != "rope_theta"
}
ROWS |= {
    f"{scaling['rope_type']} {key} {kind}": Row(
        config(rope_scaling=scaling | {key: value}), f"config: rope_scaling: {key} must be .*, but is "
    )
    for scaling, keys in (
        ({"rope_type": "linear"}, ["factor"]),
        ({"rope_type": "dynamic"}, ["factor"]),
        (
            YARN,
            ["factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"],
        ),
        (LONGROPE, ["factor", "attention_factor", "short_factor", "original_max_position_embeddings"]),
        (LLAMA3, ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
    )
    for key in keys
    for kind, value in {"10^30": 10**30, "10^400": 10**400, "text": "x", "a list": [], "negative": -1}.items()
}
ROWS |= {
    f"{model_type} sliding_window {kind}": Row(
        config(model_type=model_type, sliding_window=value),
        "config: sliding_window must be a whole number from 1 to",
    )
    for model_type in ("llama", "mistral", "qwen3")
    for kind, value in {**WRONG, **HUGE, "0": 0}.items()
}
ROWS |= {
    f"{key} {kind}": Row(config(**{key: value}), f"config: {key} must be true or false, but is ")
    for key in FLAGS
    for kind, value in {"a text": "false", "1": 1, "a list": []}.items()
}
ROWS |= {
    f"{key} {kind}": Row(config(**{key: value}), f"'?{key}'? must be ")
    for key in ("bos_token_id", "pad_token_id", "eos_token_id")
    for kind, value in {**WRONG, "negative": -2, "2^70": 2**70, "a list of text": ["x"]}.items()
    if (key, kind) not in {("eos_token_id", "a list"), ("eos_token_id", "2^70")}
}
ROWS |= {
    f"unsupported {key}": Row(config(**{key: {"x": 2}}), f"'?{key}'? .*is not supported")
    for key in UNSUPPORTED
}

# The other files of a folder

ROWS |= {
    f"{name} {kind}": Row(write(name, content), f"{name}: {error}")
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
    for kind, content, error in (
        ("a list", "[]", "its JSON is a list, not an object"),
        ("of NaN", '{"x": NaN}', "not valid JSON: key 'x' is nan"),
        ("with a key twice", '{"x": 1, "x": 2}', "not valid JSON: key 'x' appears twice"),
        ("not UTF-8", b'{"x": "\xff"}', "not valid JSON: 'utf-8' codec"),
        ("of brackets", '{"x": ' + "[" * 100_000, "not valid JSON"),
        ("of 5000 digits", '{"x": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
        ("of five million spaces", lambda: "{}" + " " * 5_000_000, "has 5000002 bytes, more than"),
    )
}
ROWS |= {
    f"eos {kind}": Row(
        write("generation_config.json", json.dumps({"eos_token_id": value})),
        "'eos_token_id' must be token ids below",
    )
    for kind, value in {**WRONG, "2^70": 2**70, "nested": [[2]]}.items()
    if kind != "a list"
}
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
)
ROWS |= {f"{name} a link out": Row(link_out(name), f"{name}: is a link out of its folder") for name in FILES}
ROWS |= {f"{name} a link to nothing": Row(link_nowhere(name), f"{name}: is neither a file") for name in FILES}
ROWS |= {f"{name} a folder": Row(folder_as_file(name), f"{name}: is neither a file") for name in FILES}
ROWS |= {
    "index a link out": Row(link_index_out, f"{INDEX}: is a link out of its folder"),
    "gguf a link out": Row(link_gguf_out, "tiny.gguf: is a link out of its folder"),
    "the hub's cache": Row(hub_cache, None),
    "BOS of half a surrogate pair": Row(
        write("tokenizer_config.json", '{"bos_token": "\\ud800"}'), "surrogates not allowed"
    ),
    "template too large": Row(
        write("chat_template.jinja", lambda: " " * 2_000_000), "chat_template.jinja: has 2000000 bytes"
    ),
    "template not UTF-8": Row(write("chat_template.jinja", b"\xff"), "'chat_template': 'utf-8' codec"),
    "tokenizer too large": Row(
        write("tokenizer.json", lambda: "{}" + " " * 70_000_000),
        "tokenizer.json: has 70000002 bytes, more than",
        160,
    ),
    "tokenizer of very many values": Row(
        write("tokenizer.json", lambda: "[" + "[],[]," * 2_000_000 + "]"),
        "tokenizer.json: its JSON has more than",
        64,
    ),
    "tokenizer a tower": Row(
        write("tokenizer.json", "[" * 100_000), "tokenizer.json: recursion limit|tokenizer.json"
    ),
    "tokenizer with more ids than rows": Row(
        write("tokenizer.json", json.dumps(tiny_tokenizer(LETTERS + "E"))),
        "the tokenizer has token ids up to 40, but the model 40 rows",
    ),
    "added token beyond the rows": Row(
        tokenizer(added_tokens=[added_token(40, "<pad>")]),
        "the tokenizer has token ids up to 40, but the model 40 rows",
    ),
    "settings that add a token beyond the rows": Row(
        write("added_tokens.json", '{"<pad>": 40}'),
        "the tokenizer has token ids up to 40, but the model 40 rows",
    ),
    "a frame of ids that are no tokens": Row(
        tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "a", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {"a": {"id": "a", "ids": [999_999], "tokens": ["a"]}},
            }
        ),
        "tokenizer.json: encodes to token id 999999, but its vocabulary ends at 39",
    ),
    "a decoder that makes text longer": Row(
        tokenizer(
            decoder={
                "type": "Sequence",
                "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9999}] * 9,
            }
        ),
        "may make a text .* times longer",
    ),
    "a unigram piece that the library would end the process with": Row(
        tokenizer(model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["x" * 1_000_000, -1.0]]}),
        "tokenizer.json: token 1 is .*, but a token has at most 512 characters",
        64,
    ),
    "a unigram tree of three million": Row(
        tokenizer(
            model={
                "type": "Unigram",
                "unk_id": 0,
                "vocab": [["a", 0.0], *([f"{index:05}" + "y" * 500, -1.0] for index in range(6_000))],
            }
        ),
        "tokenizer.json: its pieces have more than 2097152 beginnings",
    ),
    "a table of characters of eight gigabytes": Row(
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAA"}),
        "tokenizer.json: its table of characters has 6 bytes, 4294967295 of them for keys",
        64,
    ),
    "an added token of two megabytes": Row(
        tokenizer(added_tokens=[added_token(40, "x" * 2_000_000)]),
        "tokenizer.json: tokens that are special or whole have more than 262144 beginnings",
    ),
    "an added token of which nothing is left, for which the library looks without end": Row(
        tokenizer(
            normalizer={"type": "StripAccents"},
            added_tokens=[added_token(39, "\u0301") | {"normalized": True}],
        ),
        "tokenizer.json: added token .* but must be more than the normalizer removes",
        64,
    ),
    "an added token of white space that takes more of it": Row(
        tokenizer(added_tokens=[added_token(39, " ") | {"rstrip": True}]),
        "tokenizer.json: added token .* and than white space that takes more of it",
    ),
    "an ending for every letter, behind a beginning that is allowed": Row(
        tokenizer(
            model=tiny_tokenizer()["model"]
            | {"continuing_subword_prefix": "a", "end_of_word_suffix": "x" * 1_000_000}
        ),
        "tokenizer.json: model: 'x.* is put to every character",
    ),
    "a merge that the library would cut a character of, and end the process": Row(
        tokenizer(
            model={
                "type": "BPE",
                "continuing_subword_prefix": "##",
                "vocab": {"##a": 0, "é": 1, "日": 2},
                "merges": [["##a", "é"], ["##a", "日"]],
            }
        ),
        "tokenizer.json: model: a merge has 'é' on its right, which does not begin with",
        64,
    ),
    "a tokenizer that says a thing twice": Row(
        write("tokenizer.json", lambda: json.dumps(tiny_tokenizer())[:-1] + ', "normalizer": null}'),
        "tokenizer.json: not valid JSON: key 'normalizer' appears twice",
    ),
    "index too large": Row(
        index(lambda: '{"weight_map": {"x": "' + "x" * 20_000_000 + '"}}'),
        f"{INDEX}: has 20000025 bytes, more than 16777216",
        64,
    ),
    "index with a long name": Row(
        index(json.dumps({"weight_map": {NAME: "a.bin"}})), f"tensor '{NAME}' is in 'a.bin', which is not"
    ),
    "index with a name that is nowhere": Row(
        index(json.dumps({"weight_map": {NAME: "a.safetensors"}})), f"tensor '{NAME}' is not in a.safetensors"
    ),
    "index with a long name twice": Row(
        index(f'{{"weight_map": {{"{NAME}": "a.safetensors", "{NAME}": 1}}}}'), f"key '{NAME}' appears twice"
    ),
    "index with a file of half a surrogate pair": Row(
        index('{"weight_map": {"x": "\\ud800.safetensors"}}'), "which is not the plain name"
    ),
    "header of one long text": Row(
        safetensors_header(lambda: b'{"__metadata__":{"a":"\xf0\x9f\x98\x80' + b"x" * 90_000_000 + b'"}}'),
        "its header would have 9000.* bytes, not 2 to 16777216",
        megabytes=120,
    ),
    "header of the longest text": Row(
        safetensors_header(lambda: b'{"__metadata__":{"a":"\xf0\x9f\x98\x80' + b"x" * 16_000_000 + b'"}}'),
        "weights|tensors|layers",
        megabytes=200,
    ),
}

# A sentencepiece model

UNIGRAM = field(3, 1)
ROWS |= {
    "sentencepiece": Row(sentencepiece_model(lambda: model_file(*good_pieces())), None),
    "sentencepiece, unigram": Row(
        sentencepiece_model(lambda: model_file(*good_pieces(), trainer=UNIGRAM)), None
    ),
    "sentencepiece, a link out": Row(
        lambda folder: [sentencepiece_model(lambda: b"")(folder), link_out("tokenizer.model")(folder)][1],
        "tokenizer.model: is a link out of its folder",
    ),
    "sentencepiece, too large": Row(
        sentencepiece_model(lambda: model_file(*good_pieces()) + bytes(20_000_000)),
        "tokenizer.model: has 2000.* bytes, more than 16777216",
        64,
    ),
    "sentencepiece, more tokens than rows": Row(
        sentencepiece_model(lambda: model_file(*good_pieces(), piece("xx"), piece("yy"))),
        "the tokenizer has token ids up to 40, but the model 40 rows",
    ),
    "sentencepiece, more pieces than any": Row(
        sentencepiece_model(lambda: model_file(*(piece(f"{index:x}") for index in range(600_000)))),
        "tokenizer.model: has more than 524288 pieces",
        160,
    ),
    "sentencepiece, eight million fields": Row(
        sentencepiece_model(lambda: b"\x78\x00" * 8_000_000),
        "tokenizer.model: has more than 2097152 fields",
        64,
    ),
    "sentencepiece, eight million fields in pieces": Row(
        sentencepiece_model(lambda: field(1, field(1, b"a") + b"\x78\x00" * 7_900_000)),
        "tokenizer.model: has more than 2097152 fields",
        64,
    ),
    "sentencepiece, one long piece": Row(
        sentencepiece_model(lambda: model_file(*good_pieces(), piece("x" * 16_000_000))),
        "tokenizer.model: token 39 is .*, but a token has at most 512 characters",
        120,
    ),
    "sentencepiece, nine million characters": Row(
        sentencepiece_model(
            lambda: model_file(*good_pieces(), *(piece(f"{index:0500}") for index in range(18_000)))
        ),
        "tokenizer.model: the tokens have 90000.* characters, but at most 8388608",
        120,
    ),
    "sentencepiece, a tree of five million": Row(
        sentencepiece_model(
            lambda: model_file(
                *good_pieces(),
                *(piece(f"{index:05}" + "y" * 500) for index in range(10_000)),
                trainer=UNIGRAM,
            )
        ),
        "tokenizer.model: its pieces have more than 2097152 beginnings",
        120,
    ),
    "sentencepiece, symbols without end": Row(
        sentencepiece_model(
            lambda: model_file(*good_pieces(), *(piece(f"{i:x}z", kind=4) for i in range(400_000)))
        ),
        "tokenizer.model: 400003 tokens are special or whole, but 131072 is the limit",
        250,
    ),
    "sentencepiece, pieces of one letter": Row(
        sentencepiece_model(
            lambda: model_file(*good_pieces(), *(piece("a" * n, -n / 2) for n in range(2, 512)))
        ),
        "the tokenizer has token ids up to 548",
        160,
    ),
}

# GGUF

ROWS |= {
    "gguf": Row(gguf_value("general.name", lambda: text("tiny")), None),
    "gguf, 49 million numbers": Row(
        gguf_value("x", lambda: array(UINT16, 49_000_000, b"\x39\x30" * 49_000_000)),
        "past the end of the header: .*a header at most 67108864",
        megabytes=160,
    ),
    "gguf, 30 million numbers": Row(
        gguf_value("x", lambda: array(UINT16, 30_000_000, b"\x39\x30" * 30_000_000)), None, megabytes=200
    ),
    "gguf, six million strings": Row(
        gguf_value("x", lambda: array(STRING, 6_000_000, string("ab") * 6_000_000)),
        "'x' makes it 60000.. strings, more than 2097152",
        megabytes=160,
    ),
    "gguf, one long text": Row(
        gguf_value("x", lambda: text("x" * 20_000_000)),
        "length of metadata key 'x' is 20000000, not 0 to 16777216",
        64,
    ),
    "gguf, numbers for tokens": Row(
        gguf_value("tokenizer.ggml.tokens", lambda: array(UINT8, 40, bytes(40))),
        "ggml.tokens\\[0\\] is 0, but must be",
    ),
    "gguf, numbers for a name": Row(
        gguf_value("tokenizer.ggml.model", lambda: array(UINT8, 40, bytes(40))),
        "ggml.model is .*, but must be one of",
    ),
    "gguf, types for other tokens": Row(
        gguf_value("tokenizer.ggml.token_type", lambda: array(UINT16, 10_000_000, bytes(20_000_000))),
        "ggml.token_type has 10000000 entries for 40 tokens",
        megabytes=100,
    ),
    "gguf, more tokens than rows": Row(
        gguf_value("tokenizer.ggml.tokens", lambda: strings([*LETTERS, "ab"])),
        "the tokenizer has token ids up to 40, but the model 40 rows",
    ),
    "gguf, not causal": Row(
        gguf_value("llama.attention.causal", lambda: u32(BOOL) + b"\0"),
        "'llama.attention.causal' is not supported",
    ),
    "gguf, causal": Row(gguf_value("llama.attention.causal", lambda: u32(BOOL) + b"\1"), None),
    "gguf, no experts": Row(gguf_value("llama.expert_count", lambda: integer(0)), None),
    "gguf, key of the future": Row(
        gguf_value("llama.attention.twist", lambda: integer(0)), "twist' is not supported"
    ),
    "gguf, windows of some layers": Row(as_qwen, "'qwen2.attention.sliding_window' is not supported"),
    "gguf, theta 1e30": Row(
        gguf_value("llama.rope.freq_base", lambda: real(1e30)), "rope_theta must be a number"
    ),
    "gguf, epsilon 1e30": Row(
        gguf_value("llama.attention.layer_norm_rms_epsilon", lambda: real(1e30)),
        "rms_norm_eps must be a number",
    ),
    "gguf, scores of NaN": Row(
        gguf_value("tokenizer.ggml.scores", lambda: array(FLOAT32, 1, b"\0\0\xc0\x7f")), None
    ),  # which a byte-level vocabulary does not read
}
CHANGES_ANSWER = (
    "expert_count",
    "expert_used_count",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "use_parallel_residual",
    "rope.dimension_sections",
)
ROWS |= {
    f"gguf, {key}": Row(
        gguf_value(f"llama.{key}", lambda: real(0.25)), f"'llama.{key}' is not supported; .* 0.25"
    )
    for key in CHANGES_ANSWER
}
ROWS["gguf, rope.scaling.attn_factor"] = Row(
    gguf_value("llama.rope.scaling.attn_factor", lambda: real(0.25)),
    "'llama.rope.scaling.attn_factor' is 0.25, but tensor 'rope_factors_short.weight' is missing",
)


# The process that loads them, and the test

ROOM = 3 << 29  # for addresses, so that a row that fails does not take the machine's memory


def outcome_of(path: Path) -> str | None:
    try:
        load_model(path)
    except (CheckpointError, TokenizerError) as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"none of our errors, but {error!r}"
    return None


def make(name: str, folder: Path) -> Path:
    (folder / "model").mkdir()
    return ROWS[name].change(good_folder(folder / "model")) or folder / "model"


def judge(name: str, folder: Path) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    resource.setrlimit(resource.RLIMIT_CPU, (ROWS[name].seconds, ROWS[name].seconds))
    (folder / "outcome").write_text(json.dumps(outcome_of(Path((folder / "path").read_text()))))


def in_a_fork(run: Callable[[], object]) -> tuple[int, int]:
    """(how it ended, the most memory it had)"""
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    return status, usage.ru_maxrss


def answer(name: str, before: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    in_a_fork(lambda: (folder / "path").write_text(str(make(name, folder))))
    status, after = in_a_fork(lambda: judge(name, folder))
    ended = f"ended by {signal.Signals(status & 127).name}" if status & 127 else None
    found = ended or json.loads((folder / "outcome").read_text())
    shutil.rmtree(folder)
    return {"outcome": found, "megabytes": (after - before) / 1024}


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], dict[str, Any]]]:
    arguments = [sys.executable, __file__]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(name: str) -> dict[str, Any]:
            print(name, file=process.stdin, flush=True)
            found: dict[str, Any] = json.loads(process.stdout.readline())
            return found

        yield ask
        process.stdin.close()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.megabytes is None])
def test_a_hostile_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path, start = make(name, tmp_path), time.process_time()
    check_outcome(name, outcome_of(path))
    assert time.process_time() - start < ROWS[name].seconds


# In the making; and what is read as long as its like, the fields in pieces
LONG = ("sentencepiece, more pieces than any", "sentencepiece, symbols without end")
LONG += ("sentencepiece, eight million fields",)
LARGE = [name for name, row in ROWS.items() if row.megabytes is not None]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other ways")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in LARGE]
)
def test_a_large_hostile_file_is_refused_for_little(name: str, load: Any) -> None:
    found = load(name)
    check_outcome(name, found["outcome"])
    assert found["megabytes"] < ROWS[name].megabytes


def check_outcome(name: str, outcome: str | None) -> None:
    error = ROWS[name].error
    if error is None:
        assert outcome is None
    else:
        assert re.search(f"^(Checkpoint|Tokenizer)Error: .*({error})", str(outcome))


# A vocabulary larger or smaller than the embeddings


def add_special(folder: Path, framed: bool = False) -> Path:
    """A token that has no row: Gemma 3 has one for images in models that do not see."""
    library = tokenizers.Tokenizer.from_str(json.dumps(tiny_tokenizer()))
    library.add_special_tokens([tokenizers.AddedToken("<image>", special=True, normalized=False)])
    if framed:
        library.post_processor = processors.TemplateProcessing("<image> $A", special_tokens=[("<image>", 40)])
    (folder / "tokenizer.json").write_text(library.to_str())
    return folder


def test_a_special_token_may_have_no_row_and_is_refused_in_a_prompt(tmp_path: Path) -> None:
    llm = LLM(add_special(good_folder(tmp_path / "model")))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(llm.generate("abc", params)[0].outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match="the prompt has token id 40; the model's are 0 to 39"):
        llm.generate("abc<image>", params)


def test_a_token_that_begins_every_text_has_a_row(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="token ids up to 40, but the model 40 rows"):
        LLM(add_special(good_folder(tmp_path / "model"), framed=True))


def test_rows_beyond_the_tokens_may_win_and_have_no_text(tmp_path: Path) -> None:
    """Qwen pads its embeddings. Here one of two such rows always has the largest logit."""
    folder = good_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer(LETTERS[:30])))
    head = torch.zeros(gguf_files.VOCAB_SIZE, gguf_files.HIDDEN_SIZE)
    head[35], head[36] = 1.0, -1.0
    weights = gguf_files.llama_weights() | {"lm_head.weight": head}
    gguf_files.write_folder(folder, weights, tie_word_embeddings=False)
    (answer,) = LLM(folder).generate("abc", SamplingParams(max_tokens=4, temperature=0.0))
    assert set(answer.outputs[0].token_ids) <= {35, 36} and answer.outputs[0].text == ""


# Mutations: whatever the files say, loading them ends in a model that answers, or in an error of ours

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        16,
        64,
        2**28,
        2**31,
        2**63,
        2**64,
        10**30,
        10**400,
        0.5,
        1.0,
        1e-300,
        1e300,
    ),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "a",
        "silu",
        "qwen2",
        "qwen3",
        "mistral",
        "yarn",
        "dynamic",
        "\ud800",
    ),
    *(
        [],
        [0],
        [1.0] * 8,
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        [[]],
        {},
        YARN,
        LONGROPE,
        LLAMA3,
    ),
    *({"content": "a"}, {"rope_type": "dynamic", "factor": 1e6}, {"type": "ByteLevel"}, {"type": "Sequence"}),
]
KEYS = [*LIMITS, *FLAGS, *UNSUPPORTED, "rope_scaling", "rope_theta", "sliding_window", "layer_types", "dtype"]
KEYS += [
    "bos_token",
    "eos_token",
    "eos_token_id",
    "chat_template",
    "added_tokens",
    "decoder",
    "post_processor",
]
BASES: dict[str, Any] = {
    "config.json": CONFIG | {"rope_scaling": YARN, "eos_token_id": [1, 2]},
    "generation_config.json": {"eos_token_id": [2, 3]},
    "tokenizer_config.json": {"bos_token": "a", "chat_template": [{"name": "default", "template": "x"}]},
    "tokenizer.json": tiny_tokenizer(),
}


def mutated(rng: random.Random, content: Any) -> bytes:
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        mutate(rng, content)
    raw = bytearray(json.dumps(content).encode())
    if rng.random() < 0.2:
        position = rng.randrange(len(raw))
        raw[position : position + rng.randrange(3)] = rng.choice(
            [b'"', b"[", b"9" * 5000, b",", b"\xff", b"e999"]
        )
    return bytes(raw)


def mutate(rng: random.Random, node: Any) -> None:
    """Walk to some value and change it, take it away, or put one beside it."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys or KEYS[:1])
        if rng.random() < 0.5 or not keys or not isinstance(node[key], dict | list):
            break
        node = node[key]
    value, kind = copy.deepcopy(rng.choice(VALUES)), rng.random()
    if isinstance(node, list):
        node[:] = [*node[:-1], value]
    elif kind < 0.9 or not keys:
        node[key if kind < 0.6 else rng.choice(KEYS)] = value
    else:
        del node[key]


def test_mutated_folders_are_loaded_or_refused(tmp_path: Path) -> None:
    rng, folder, num_loaded = random.Random(1), good_folder(tmp_path / "model"), 0
    for _ in range(500):
        name = rng.choice(["config.json", "config.json", *BASES])
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(mutated(rng, BASES[name]))
        outcome = outcome_of(folder)
        assert outcome is None or re.match("(Checkpoint|Tokenizer)Error: ", outcome)
        num_loaded += outcome is None
        (folder / name).write_bytes(good)
    assert 0 < num_loaded < 500


if __name__ == "__main__":
    _, before = in_a_fork(lambda: None)
    for line in sys.stdin:
        print(json.dumps(answer(line.rstrip("\n"), before)), flush=True)
