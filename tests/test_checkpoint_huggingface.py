"""Hugging Face folders: what is right is read exactly, what is wrong is refused by name, no code is run."""

import copy
import io
import json
import os
import pickle
import random
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from gguf_files import llama_weights
from safetensors.torch import save_file

from infinilm.checkpoint import CheckpointError, open_checkpoint
from infinilm.checkpoint.huggingface import read_header

CONFIG = {"model_type": "llama", "hidden_size": 64}
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(llama_weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards a and b with an index."""
    save_file({"x": torch.zeros(3), "y": torch.ones(4)}, tmp_path / "a.safetensors")
    save_file({"z": torch.full((5,), 2.0)}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def encoded(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header, which is JSON text or to be made into it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def parsed(raw: bytes) -> dict[str, Any]:
    return read_header(io.BytesIO(raw), len(raw), "tiny.safetensors")


# What is right


def test_tensors_and_config_are_those_of_the_folder(folder):
    weights = llama_weights()
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config == CONFIG and checkpoint.metadata == {}
        assert sorted(checkpoint.names()) == sorted(weights)
        assert checkpoint.num_bytes == sum(weight.nbytes for weight in weights.values())
        for name, weight in weights.items():
            assert checkpoint.shape(name) == weight.shape and checkpoint.dtype(name) == weight.dtype
            assert torch.equal(checkpoint.tensor(name), weight)


def test_shards_are_one_checkpoint(sharded):
    with open_checkpoint(sharded) as checkpoint:
        assert sorted(checkpoint.names()) == ["x", "y", "z"]
        assert checkpoint.tensor("z").tolist() == [2.0] * 5


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.uint32, torch.bool],
)
def test_dtypes_scalars_and_empty_tensors_are_kept(dtype, folder):
    tensors = {"scalar": torch.ones((), dtype=dtype), "empty": torch.ones(0, 3, dtype=dtype)}
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        for name, tensor in tensors.items():
            assert checkpoint.dtype(name) == dtype and torch.equal(checkpoint.tensor(name), tensor)


@pytest.mark.parametrize("padding", range(8))
def test_data_between_two_elements_is_moved_to_a_whole_one(padding, folder):
    raw = encoded(json.dumps({"x": ENTRY}).encode() + b" " * padding, struct.pack("<6f", *range(6)))
    (folder / "model.safetensors").write_bytes(raw)
    tensor = open_checkpoint(folder).tensor("x")
    assert tensor.data_ptr() % 4 == 0 and tensor.flatten().tolist() == list(range(6))


def test_the_links_of_a_hub_cache_are_followed(folder):
    repository = folder / "models--tiny"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert open_checkpoint(snapshot).config == CONFIG


def test_a_folder_that_is_itself_a_link_is_followed(folder):
    (folder / "link").symlink_to(folder)
    assert open_checkpoint(folder / "link").config == CONFIG


def test_tensors_are_mapped_and_not_copied(folder):
    checkpoint = open_checkpoint(folder)
    assert (
        checkpoint.tensor("model.norm.weight").data_ptr() == checkpoint.tensor("model.norm.weight").data_ptr()
    )


def test_a_tensor_outlives_its_checkpoint_and_never_writes_to_the_file(folder):
    before = (folder / "model.safetensors").read_bytes()
    with open_checkpoint(folder) as checkpoint:
        norm = checkpoint.tensor("model.norm.weight")
    norm.zero_()
    assert not norm.any() and (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.tensor("model.norm.weight")


# Files that are wrong

HEADERS: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "has only 0 bytes"),
    "7 bytes": (bytes(7), "has only 7 bytes"),
    "8 bytes": (bytes(8), "its header would have 0 bytes"),
    "header of 0 bytes": (encoded(b"{}", length=0), "its header would have 0 bytes"),
    "header of 2^63 bytes": (
        encoded(b"{}", length=2**63),
        f"its header would have {2**63} bytes, not 2 to 2",
    ),
    "header of 2^64-1 bytes": (encoded(b"{}", length=2**64 - 1), f"would have {2**64 - 1} bytes, not 2 to 2"),
    "pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "it looks like a pointer of Git LFS: `git lfs pull` fetches the file itself",
    ),
    "header past the file": (encoded(b"{}", length=3), "would have 3 bytes, not 2 to 2"),
    "not JSON": (encoded(b"{nope}"), "not valid JSON"),
    "JSON cut short": (encoded(b'{"x": {'), "not valid JSON"),
    "not an object": (encoded(b"[1, 2]"), "its header starts with b'\\[1, 2\\]', not '{'"),
    "space before the object": (encoded(b" {}"), "not '{'"),
    "not UTF-8": (encoded(b'{"\xff": 1}'), "not valid JSON: 'utf-8' codec"),
    "NaN": (encoded(b'{"x": NaN}'), "key 'x' is nan, but JSON has finite numbers alone"),
    "nested without end": (encoded(b'{"x": ' + b"[" * 100_000), "not valid JSON"),
    "number of 5000 digits": (encoded(b'{"x": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "name twice": (encoded(b'{"x": {}, "x": {}}'), "key 'x' appears twice"),
    "dtype twice": (encoded(b'{"x": {"dtype": "F32", "dtype": "F16"}}'), "key 'dtype' appears twice"),
    "metadata not strings": (
        encoded({"__metadata__": {"a": 1}}),
        "'__metadata__' is {'a': 1}, not a map of strings",
    ),
    "metadata a list": (encoded({"__metadata__": []}), "'__metadata__' is \\[\\], not a map of strings"),
    "empty name": (encoded({"": ENTRY}, bytes(24)), "name has 0 characters"),
    "endless name": (encoded({"n" * 1025: ENTRY}, bytes(24)), "name has 1025 characters, not 1 to 1024"),
    "a pickle": (pickle.dumps({"x": 1}, protocol=4), "looks like a pickle, which is never loaded"),
    "a torch zip": (b"PK\x03\x04" + bytes(100), "would have 67324752 bytes.*looks like a pickle"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_broken_header_is_refused_with_its_file_and_the_rule(kind):
    raw, rule = HEADERS[kind]
    with pytest.raises(CheckpointError, match=f"^tiny.safetensors: .*{rule}"):
        parsed(raw)


ENTRIES: dict[str, tuple[Any, str]] = {
    "not a map": ([], "tensor 'x' is \\[\\], not a map"),
    "field missing": ({"dtype": "F32", "shape": [6]}, "not a map of dtype, shape and data_offsets"),
    "field unknown": (ENTRY | {"crc": 1}, "not a map of dtype, shape and data_offsets"),
    "dtype unknown": (ENTRY | {"dtype": "F31"}, "tensor 'x' has dtype 'F31'; supported are F64"),
    "dtype a list": (ENTRY | {"dtype": ["F32"]}, "has dtype \\['F32'\\]"),
    "shape not a list": (ENTRY | {"shape": 6}, "has shape 6, not a list"),
    "shape negative": (ENTRY | {"shape": [-2, -3]}, "has shape \\[-2, -3\\]"),
    "shape of booleans": (ENTRY | {"shape": [True, 6]}, "has shape \\[True, 6\\]"),
    "shape of floats": (ENTRY | {"shape": [2.0, 3.0]}, "has shape \\[2.0, 3.0\\]"),
    "shape of nine sizes": (ENTRY | {"shape": [1] * 7 + [2, 3]}, "not a list of at most 8 sizes"),
    "shape that wraps to 6": (ENTRY | {"shape": [2**64 + 6]}, "more than 2\\*\\*63 elements"),
    "shape of nothing, endless": (ENTRY | {"shape": [0, 2**62, 2**62]}, "more than 2\\*\\*63 elements"),
    "shape smaller than its span": (ENTRY | {"shape": [5]}, "needs 20 bytes, but its offsets span 24"),
    "shape larger than its span": (ENTRY | {"shape": [7]}, "needs 28 bytes, but its offsets span 24"),
    "shape of no elements": (ENTRY | {"shape": [0, 6]}, "needs 0 bytes, but its offsets span 24"),
    "offsets reversed": (ENTRY | {"data_offsets": [24, 0]}, "data_offsets \\[24, 0\\], not \\[begin, end\\]"),
    "offsets negative": (ENTRY | {"data_offsets": [-24, 0]}, "data_offsets \\[-24, 0\\]"),
    "one offset": (ENTRY | {"data_offsets": [24]}, "data_offsets \\[24\\]"),
    "offsets not a list": (ENTRY | {"data_offsets": {}}, "data_offsets {}"),
    "offsets of more digits than are written out": (
        ENTRY | {"shape": [0], "data_offsets": [10**4300 - 1] * 2},
        "data_offsets \\[9{18}\\.\\.\\.9{19}, .*, not \\[begin, end\\]",
    ),
    "offsets of floats": (ENTRY | {"data_offsets": [0.0, 24.0]}, "data_offsets \\[0.0, 24.0\\]"),
    "hole in front": (ENTRY | {"data_offsets": [8, 32]}, "leaves a hole before it"),
    "past the end": (ENTRY | {"shape": [7], "data_offsets": [0, 28]}, "it is cut short"),
    "before the end": (ENTRY | {"shape": [5], "data_offsets": [0, 20]}, "something follows its last tensor"),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_broken_entry_is_refused_with_its_file_and_the_rule(kind):
    entry, rule = ENTRIES[kind]
    with pytest.raises(CheckpointError, match=f"^tiny.safetensors: .*{rule}"):
        parsed(encoded({"x": entry}, bytes(24)))


@pytest.mark.parametrize(
    "begin, fault", [(20, "overlaps the one before it"), (28, "leaves a hole before it")]
)
def test_tensors_that_do_not_follow_each_other_are_refused(begin, fault):
    other = {"dtype": "F32", "shape": [2], "data_offsets": [begin, begin + 8]}
    with pytest.raises(CheckpointError, match=f"tensor 'y' starts at byte .*: it {fault}"):
        parsed(encoded({"x": ENTRY, "y": other}, bytes(begin + 8)))


def test_a_header_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(CheckpointError, match=f"would have {2**24 + 1} bytes, not 2 to {2**24}"):
        read_header(io.BytesIO(struct.pack("<Q", 2**24 + 1)), 2**40, "tiny.safetensors")


@pytest.mark.parametrize("kind", ["tensors", "metadata"])
def test_a_header_of_very_many_entries_is_refused_at_once(kind):
    entry = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' if kind == "tensors" else b'""'
    entries = b",".join(
        b'"%d":%s' % (index, entry) for index in range(1_000_000 if kind == "metadata" else 200_000)
    )
    raw = encoded(b"{" + entries + b"}" if kind == "tensors" else b'{"__metadata__":{' + entries + b"}}")
    start = time.process_time()
    with pytest.raises(CheckpointError, match="^tiny.safetensors: .* more than"):
        parsed(raw)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("path", [None, 3, b"model", ["model"]])
def test_what_is_no_path_is_refused_by_its_value(path):
    with pytest.raises(TypeError, match=f"path must be a string or a Path, but is {re.escape(repr(path))}"):
        open_checkpoint(path)


def test_a_shard_cut_at_any_page_is_refused(folder):
    raw = (folder / "model.safetensors").read_bytes()
    for length in range(0, len(raw), 4096):
        (folder / "model.safetensors").write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match="model.safetensors: "):
            open_checkpoint(folder)


def test_a_file_cut_short_while_open_is_noticed_before_it_is_touched(folder):
    checkpoint = open_checkpoint(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="model.safetensors: changed its size"):
        checkpoint.tensor("model.norm.weight")


def test_a_file_deleted_while_open_can_still_be_read(folder):
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    assert torch.equal(checkpoint.tensor("model.norm.weight"), llama_weights()["model.norm.weight"])


# Folders that are wrong


def test_missing_files_are_named(folder):
    with pytest.raises(CheckpointError, match="nowhere: no such file or folder"):
        open_checkpoint(folder / "nowhere")
    with pytest.raises(CheckpointError, match="config.json: neither a .gguf file nor a folder"):
        open_checkpoint(folder / "config.json")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="holds neither config.json nor a .gguf file"):
        open_checkpoint(folder)


def test_an_adapter_alone_is_no_model(folder):
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder / f"adapter_{name}")
    with pytest.raises(CheckpointError, match="it is an adapter, which is given beside its model"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_with_the_way_out(name, folder):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({}))
    with pytest.raises(
        CheckpointError, match="only pickled weights, .* never loaded; convert them to safetensors"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("notes.txt", "neither model.safetensors nor model.safetensors.index.json"),
        ("adapter.safetensors", "has .safetensors files, but neither"),
        ("model.gguf", "give the path of the .gguf file itself"),
    ],
)
def test_a_folder_without_weights_says_what_it_has_instead(name, reason, folder):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder)


class Sentinel:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_under_the_name_of_safetensors_is_never_loaded(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Sentinel(folder / "sentinel")))
    with pytest.raises(CheckpointError, match="model.safetensors: not a safetensors file"):
        open_checkpoint(folder)
    assert not (folder / "sentinel").exists()


def test_code_named_by_auto_map_is_never_run(folder):
    (folder / "code.py").write_text(f"open({str(folder / 'sentinel')!r}, 'w')")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "code.Model"}}))
    open_checkpoint(folder)
    assert not (folder / "sentinel").exists()


@pytest.mark.parametrize(
    "config, rule",
    [
        ("[]", "its JSON is a list, not an object"),
        ("", "not valid JSON"),
        ('{"a": 1, "a": 2}', "key 'a' appears twice"),
    ],
)
def test_a_config_that_is_no_model_of_ours_is_refused(config, rule, folder):
    (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=f"config.json: .*{rule}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "file",
    [
        "../a.safetensors",
        "/tmp/a.safetensors",
        "sub/a.safetensors",
        "..",
        "",
        "a.bin",
        "x\\a.safetensors",
        "a\nb.safetensors",
        "a\0b.safetensors",
        "a" * 5000 + ".safetensors",
        7,
        None,
    ],
)
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused(file, sharded):
    write_index(sharded, {"x": file})
    with pytest.raises(CheckpointError, match="tensor 'x' is in .*, which is not the plain name"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [{}, [], None, "a.safetensors"])
def test_an_index_without_a_map_is_refused(weight_map, sharded):
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match="index.json: 'weight_map' is"):
        open_checkpoint(sharded)


A, B = "a.safetensors", "b.safetensors"


@pytest.mark.parametrize(
    "weight_map, rule",
    [
        ({"x": A, "y": A, "z": "c.safetensors"}, "c.safetensors: no such file"),
        ({"x": A, "z": B}, "a.safetensors: tensor 'y' is not in model.safetensors.index.json"),
        ({"x": A, "y": A, "z": A}, "tensor 'z' is not in a.safetensors, where the index has it"),
        ({"x": A, "y": A, "z": B, "w": B}, "tensor 'w' is not in b.safetensors, where the index has it"),
    ],
)
def test_an_index_and_its_shards_must_agree(weight_map, rule, sharded):
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(sharded)


def test_a_file_the_index_does_not_name_is_not_opened(sharded):
    (sharded / B).write_bytes(b"no safetensors")
    write_index(sharded, {"x": A, "y": A})
    assert open_checkpoint(sharded).names() == ["x", "y"]


def test_a_tensor_in_two_shards_is_refused(sharded):
    save_file({"x": torch.zeros(1), "z": torch.zeros(1)}, sharded / B)
    with pytest.raises(CheckpointError, match="b.safetensors: tensor 'x' is also in a.safetensors"):
        open_checkpoint(sharded)


def test_no_more_files_are_read_once_two_hold_the_same_tensor(sharded):
    """An index may name one file by a thousand links, each of which would take as much memory again."""
    (sharded / B).unlink()
    (sharded / B).symlink_to(A)
    (sharded / "c.safetensors").write_bytes(b"")
    write_index(sharded, {"x": A, "y": B, "z": "c.safetensors"})
    with pytest.raises(CheckpointError, match="b.safetensors: tensor 'x' is also in a.safetensors"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(name, folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / name
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name}: is a link out of its folder"):
        open_checkpoint(folder)


def test_a_link_out_of_a_hub_cache_is_refused(folder, tmp_path_factory):
    snapshot = tmp_path_factory.mktemp("models--tiny") / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(CheckpointError, match="config.json: is a link out of its folder"):
        open_checkpoint(snapshot)


def test_a_pipe_is_not_waited_for(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: is neither a file nor a link to one"):
        open_checkpoint(folder)


# Mutations: whatever a header says, reading it ends in tensors the library reads too, or in a CheckpointError

VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2.5,
    8,
    24,
    2**31,
    2**63,
    2**64 + 8,
    10**30,
    "",
    "F16",
    "I64",
    "x",
    [],
    [0],
    [0, 24],
    {},
]
BASE = {
    "__metadata__": {"format": "pt"},
    "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "y": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    "z": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}


def mutated_header(rng: random.Random) -> bytes:
    header = copy.deepcopy(BASE)
    for _ in range(rng.randint(1, 3)):
        mutate_json(rng, header)
    return encoded(header, bytes(rng.choice([40, 40, 40, 39, 41, 0, 24, 48])))


def mutate_json(rng: random.Random, node: Any) -> None:
    """Walk to a random place and change, remove, add or rename what is there."""
    while isinstance(node, dict | list) and node:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if rng.random() < 0.4 or not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    value, kind = copy.deepcopy(rng.choice(VALUES)), rng.choice(["set", "set", "remove", "add"])
    if kind == "set":
        node[key] = value
    elif kind == "remove":
        node.pop(key)
    elif isinstance(node, list):
        node.append(value)
    else:
        node[rng.choice(["w", "shape"])] = node[key]


def mutated_bytes(rng: random.Random) -> bytes:
    raw = bytearray(encoded(BASE, bytes(40)))
    for _ in range(rng.randint(1, 4)):
        position = rng.choice([rng.randrange(8), rng.randrange(len(raw))])
        raw[position : position + rng.randint(0, 2)] = rng.choice(
            [b'"', b"{", b"[", b"9", b",", rng.randbytes(1), b""]
        )
    return bytes(raw if rng.random() < 0.9 else raw[: rng.randrange(len(raw))])


def survives(raw: bytes) -> bool:
    try:
        tensors = parsed(raw)
    except CheckpointError as error:
        assert str(error).startswith("tiny.safetensors: ")
        return False
    found = {name: entry for name, entry in safetensors.deserialize(raw)}
    return {name: tuple(entry["shape"]) for name, entry in found.items()} == {
        name: info.shape for name, info in tensors.items()
    }


def survive(num_cases: int, seed: int) -> int:
    rng = random.Random(seed)
    return sum(survives(rng.choice([mutated_header, mutated_bytes])(rng)) for _ in range(num_cases))


def test_twelve_thousand_mutations_are_read_or_refused():
    assert 0 < survive(12_000, seed=1) < 12_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_half_a_million_mutations_are_read_or_refused(seed):
    assert 0 < survive(50_000, seed=100 + seed) < 50_000
