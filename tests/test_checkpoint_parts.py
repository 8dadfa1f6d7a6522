"""Split GGUF files: the first part opens all, and parts that do not belong together are refused."""

import copy
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import (
    HEAD_DIM,
    HIDDEN_SIZE,
    GGUFFile,
    TensorEntry,
    array,
    gguf_name,
    integer,
    interleaved,
    llama_file,
    llama_weights,
    llama_writer,
    open_model,
    text,
    u32,
    whole_file,
    write_out,
)

from infinilm.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from infinilm.checkpoint.gguf_parts import MAX_PARTS
from infinilm.llm import LLM
from infinilm.sampling import SamplingParams

UINT16, INT32, UINT32, INT64, STRING = 2, 5, 4, 11, 8
SIZES = (0, 7, 13)  # tensors of each part; llama.cpp can leave the first without any


def name_of(number: int, count: int = len(SIZES), stem: str = "tiny") -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def split(file: GGUFFile, sizes: tuple[int, ...] = SIZES) -> list[GGUFFile]:
    """As llama.cpp's gguf-split writes them: metadata in the first, and in each which part it is"""
    parts, start = [], 0
    for number, size in enumerate(sizes):
        tensors = [copy.copy(tensor) for tensor in file.tensors[start : start + size]]
        part = GGUFFile(list(file.values) if number == 0 else [], tensors)
        part.set("split.no", u32(UINT16) + struct.pack("<H", number))
        part.set("split.count", u32(UINT16) + struct.pack("<H", len(sizes)))
        part.set("split.tensors.count", u32(INT32) + u32(len(file.tensors)))
        parts.append(part)
        start += size
    return parts


def write(folder: Path, parts: list[GGUFFile], stem: str = "tiny") -> Path:
    """Their files, of which the path is the first one's"""
    for number, part in enumerate(parts, 1):
        (folder / name_of(number, len(parts), stem)).write_bytes(part.encode())
    return folder / name_of(1, len(parts), stem)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write(tmp_path, split(llama_file()))


def assert_same(found: Checkpoint, wanted: Checkpoint) -> None:
    assert found.names() == wanted.names() and found.config == wanted.config
    assert found.num_bytes == wanted.num_bytes
    for name in wanted.names():
        one, other = found.tensor(name), wanted.tensor(name)
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def refused(rule: str) -> Any:
    return pytest.raises(CheckpointError, match=rule)


# What is right


def test_the_first_part_opens_all_of_the_model(first, tmp_path):
    (tmp_path / "whole.gguf").write_bytes(llama_file().encode())
    with open_model(first) as found, open_model(tmp_path / "whole.gguf") as whole:
        assert_same(found, whole)
        assert list(found.metadata["tokenizer.ggml.tokens"]) == list(whole.metadata["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("is_first_small", [False, True])
def test_parts_of_the_gguf_package_are_read(is_first_small, tmp_path):
    weights = llama_weights()
    parts = {"split_max_tensors": 6, "small_first_shard": is_first_small}
    writer = llama_writer(tmp_path / "model.gguf", num_layers=2, **parts)
    for name, weight in weights.items():
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(interleaved(name, weight).numpy()))
    write_out(writer)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    with open_model(files[0]) as checkpoint:
        assert set(checkpoint.names()) == set(weights)
        assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in weights.items())


def test_a_part_of_its_own_alignment_is_read(tmp_path):
    parts = split(llama_file())
    parts[1].alignment = 64
    parts[1].set("general.alignment", integer(64))
    with open_model(write(tmp_path, parts)) as checkpoint:
        for name, weight in llama_weights().items():
            assert torch.equal(checkpoint.tensor(name), weight)


def test_the_frequency_divisors_of_llama_3_may_be_in_any_part(tmp_path):
    file = llama_file()
    file.tensors.append(TensorEntry("rope_freqs.weight", [HEAD_DIM // 2], struct.pack("<8f", *range(1, 9))))
    with open_model(write(tmp_path, split(file, (10, 10, 1)))) as checkpoint:
        assert checkpoint.config["rope_scaling"]["short_factor"] == list(range(1, 9))
        assert checkpoint.names() == list(llama_weights())


def test_a_split_model_answers_as_the_whole_one(tmp_path):
    file = whole_file()
    (tmp_path / "whole.gguf").write_bytes(file.encode())
    params = SamplingParams(max_tokens=8, temperature=0.0)
    answers = [
        LLM(path).generate("abc", params)[0].outputs[0].token_ids
        for path in (tmp_path / "whole.gguf", write(tmp_path, split(file)))
    ]
    assert answers[0] == answers[1]


def test_the_stamps_of_a_split_model_are_those_of_all_parts_with_tensors(first):
    parts = [first.with_name(name_of(number)) for number in (2, 3)]
    with open_checkpoint(first) as checkpoint:
        found = checkpoint.stamps()
    assert found == [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in parts]


def test_a_folder_of_one_split_model_is_that_model(first):
    assert open_checkpoint(first.parent).path == first


def test_a_folder_of_two_split_models_asks_for_one(first):
    write(first.parent, split(llama_file()), stem="other")
    with pytest.raises(
        CheckpointError, match=r"holds 2 .gguf files \(other-00001-of-00003.gguf, tiny-00001-"
    ):
        open_checkpoint(first.parent)


def test_a_folder_without_the_first_part_says_which_to_give(first):
    first.unlink()
    with pytest.raises(
        CheckpointError, match="is part 2 of 3 of a split model; give the first, tiny-00001-of"
    ):
        open_checkpoint(first.parent)


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_in_one_part_is_whole_whatever_its_name(count, tmp_path):
    file = llama_file()
    file.set("split.count", integer(count))
    (tmp_path / "any.gguf").write_bytes(file.encode())
    assert open_model(tmp_path / "any.gguf").names() == list(llama_weights())


def test_parts_in_the_hubs_cache_are_links_to_its_blobs(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc" / "Q8_0", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    first = write(snapshot, split(llama_file()))
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    assert open_model(first).names() == list(llama_weights())


def test_a_later_part_cut_short_while_open_is_noticed_before_it_is_touched(first):
    checkpoint = open_checkpoint(first)
    with (first.parent / name_of(3)).open("r+b") as file:
        file.truncate(1000)
    assert checkpoint.tensor("blk.0.attn_norm.weight").shape == (HIDDEN_SIZE,)
    with refused("tiny-00003-of-00003.gguf: changed its size"):
        checkpoint.tensor("output_norm.weight")


# What is wrong: a change to the parts, and what is said

Change = Callable[[list[GGUFFile]], None]


def value(part: int, key: str, raw: bytes) -> Change:
    return lambda parts: parts[part - 1].set(key, raw)


def everywhere(key: str, raw: bytes) -> Change:
    return lambda parts: [part.set(key, raw) for part in parts][0]


def without(part: int, key: str) -> Change:
    return lambda parts: vars(parts[part - 1]).update(values=parts[part - 1].without(key))


def long(value: int) -> bytes:
    return u32(INT64) + struct.pack("<q", value)


BAD_PARTS: dict[str, tuple[Change, str]] = {
    "count of 2^31": (
        everywhere("split.count", integer(2**31)),
        "'split.count' is 2147483648, not 0 to 1024",
    ),
    "count one too large": (everywhere("split.count", integer(MAX_PARTS + 1)), "is 1025, not 0 to 1024"),
    "count of 2^62": (
        everywhere("split.count", long(2**62)),
        "'split.count' is 4611686018427387904, not 0 to",
    ),
    "count -1": (everywhere("split.count", u32(INT32) + u32(-1)), "'split.count' is -1, not 0 to 1024"),
    "count a text": (everywhere("split.count", text("3")), "'split.count' is of type str, not int"),
    "count an array": (everywhere("split.count", array(UINT32, 1, u32(3))), "is of type array, not int"),
    "count not the name's": (
        everywhere("split.count", integer(2)),
        "is part 1 of 2 .*; call it tiny-00001-of-00002",
    ),
    "count 0 in a later part": (
        value(2, "split.count", integer(0)),
        "says it is no part .*, but by tiny-00001",
    ),
    "count of another model": (
        value(3, "split.count", integer(4)),
        "00003-of-00003.gguf: says it is part 3 of 4 with 20 tensors in all, but by tiny-00001.* part 3 of 3",
    ),
    "count missing in a later part": (without(2, "split.count"), "says it is no part of a split model"),
    "number missing": (without(1, "split.no"), "'split.no' is missing"),
    "number -1": (value(1, "split.no", u32(INT32) + u32(-1)), "'split.no' is -1, not 0 to 2"),
    "number past the count": (value(1, "split.no", integer(3)), "'split.no' is 3, not 0 to 2"),
    "number not the name's": (
        value(1, "split.no", integer(1)),
        "is part 2 of 3 .*; call it tiny-00002-of-00003",
    ),
    "number twice": (value(3, "split.no", integer(1)), "says it is part 2 of 3 .*it is part 3 of 3"),
    "tensors missing": (without(1, "split.tensors.count"), "'split.tensors.count' is missing"),
    "tensors of another model": (
        value(2, "split.tensors.count", integer(21)),
        "part 2 of 3 with 21 tensors in all, .* with 20 tensors in all; take all parts of one model",
    ),
    "more tensors than said": (
        everywhere("split.tensors.count", integer(9)),
        "is 9, but the 3 parts hold more",
    ),
    "fewer tensors than said": (everywhere("split.tensors.count", integer(21)), "is 21, but .* hold only 20"),
    "tensors by the billion": (
        everywhere("split.tensors.count", integer(2**31)),
        "is 2147483648, not 1 to 65536",
    ),
    "a tensor in two parts": (
        lambda parts: parts[2].tensors.__setitem__(0, copy.copy(parts[1].tensors[0])),
        "00003-of-00003.gguf: tensor 'token_embd.weight' is also in tiny-00002-of-00003.gguf",
    ),
    "a later part of no GGUF": (
        lambda parts: vars(parts[1]).update(magic=b"PK\3\4"),
        "00002-.*: not a GGUF file",
    ),
    "a later part cut short": (
        lambda parts: vars(parts[2].tensors[-1]).update(data=b""),
        "00003-of-00003.gguf: .*: it is cut short",
    ),
    "an empty first part of no model": (
        lambda parts: vars(parts[0]).update(values=parts[0].values[-3:]),
        "'general.architecture' is missing",
    ),
}


@pytest.mark.parametrize("kind", BAD_PARTS)
def test_parts_that_do_not_fit_are_refused_with_the_rule(kind, tmp_path):
    change, rule = BAD_PARTS[kind]
    parts = split(llama_file())
    change(parts)
    with refused(rule):
        open_model(write(tmp_path, parts))


def test_a_part_that_is_not_the_first_says_which_to_give(first):
    with pytest.raises(
        CheckpointError, match="is part 2 of 3 of a split model; give the first, tiny-00001-of"
    ):
        open_checkpoint(first.parent / name_of(2))


def test_a_part_that_is_missing_is_named(first):
    (first.parent / name_of(3)).unlink()
    with pytest.raises(
        CheckpointError, match="first of 3 parts, but tiny-00003-of-00003.gguf is not beside it"
    ):
        open_checkpoint(first)


def test_a_part_that_was_renamed_is_told_its_name(first):
    first.rename(first.with_name("model.gguf"))
    with refused("call it NAME-00001-of-00003.gguf, and the others likewise"):
        open_checkpoint(first.with_name("model.gguf"))


def test_an_empty_later_part_is_refused(first):
    (first.parent / name_of(2)).write_bytes(b"")
    with refused("tiny-00002-of-00003.gguf: is empty"):
        open_checkpoint(first)


@pytest.mark.parametrize("kind", ["link out", "link nowhere", "folder", "pipe"])
def test_a_later_part_that_is_no_file_of_the_folder_is_refused(kind, first, tmp_path_factory):
    part = first.parent / name_of(2)
    outside = tmp_path_factory.mktemp("outside") / part.name
    part.rename(outside)
    {
        "link out": lambda: part.symlink_to(outside),
        "link nowhere": lambda: part.symlink_to(first.parent / "nowhere"),
        "folder": part.mkdir,
        "pipe": lambda: os.mkfifo(part),
    }[kind]()
    with pytest.raises(
        CheckpointError, match="00002-of-00003.gguf: is (a link out|neither a file nor a link)"
    ):
        open_checkpoint(first)


# Mutations: whatever parts say, opening them ends in a model or a CheckpointError

NUMBERS = [-1, 0, 1, 2, 3, 4, 20, 21, 1024, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, -(2**63)]
KEYS = ["split.no", "split.count", "split.tensors.count"]


def mutate(rng: random.Random, parts: list[GGUFFile]) -> None:
    some = rng.sample(parts, rng.randint(1, len(parts)))
    number = rng.choice(NUMBERS)
    raw = rng.choice([long(number), integer(number), text("2"), u32(rng.randrange(14)) + rng.randbytes(9)])
    kind = rng.randrange(4)
    for part in some:
        if kind == 0:
            part.values = part.without(rng.choice(KEYS))
        elif kind == 1:
            rng.shuffle(part.values)
            part.tensors[:1] = []
        else:
            part.set(rng.choice(KEYS), raw)


def is_read(path: Path) -> bool:
    try:
        checkpoint = open_model(path)
    except CheckpointError as error:
        assert str(error).startswith(str(path.parent))
        return False
    return all(checkpoint.tensor(name).shape == checkpoint.shape(name) for name in checkpoint.names())


def test_mutated_parts_are_read_or_refused(tmp_path):
    rng, num_read = random.Random(1), 0
    for _ in range(400):
        parts = split(llama_file(), rng.choice([SIZES, (20,), (10, 10), (1, 19, 0)]))
        for _ in range(rng.randint(0, 2)):
            mutate(rng, parts)
        num_read += is_read(write(tmp_path, parts))
    assert 0 < num_read < 400
