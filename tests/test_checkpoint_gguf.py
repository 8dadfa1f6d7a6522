"""GGUF files: what is right is read exactly, what is wrong is refused by name."""

import copy
import random
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from gguf_files import (
    ARRAY,
    BOOL,
    FLOAT64,
    HEAD_DIM,
    HIDDEN_SIZE,
    INT32,
    NUM_HEADS,
    NUM_KV_HEADS,
    STRING,
    UINT8,
    UINT32,
    AsModel,
    GGUFFile,
    TensorEntry,
    array,
    integer,
    llama_file,
    llama_weights,
    llama_writer,
    open_model,
    real,
    string,
    text,
    u32,
    u64,
    write_out,
)
from safetensors.torch import save_file

from infinicore.quantization import BlockType, QuantizedTensor
from infinilm.checkpoint import CheckpointError, open_checkpoint
from infinilm.checkpoint.gguf import GGUFCheckpoint
from infinilm.checkpoint.gguf_format import read_header
from infinilm.checkpoint.gguf_parts import Part
from infinilm.models.qwen import Qwen3ForCausalLM
from infinilm.models.registry import entry_of

PATH = Path("tiny.gguf")


def opened(file: GGUFFile) -> AsModel:
    return AsModel(GGUFCheckpoint([Part(file.encode(), PATH)]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(llama_file().encode())
    return path


# What is right


def test_tensors_have_hugging_face_names_and_the_weights_that_were_written(path):
    weights = llama_weights()
    with open_model(path) as checkpoint:
        assert checkpoint.names() == list(weights)
        for name, weight in weights.items():
            assert checkpoint.shape(name) == weight.shape and checkpoint.dtype(name) == torch.float32
            assert torch.equal(checkpoint.tensor(name), weight)


def test_a_gguf_and_a_safetensors_copy_of_one_model_are_equal(path, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(llama_weights(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with open_model(path) as one, open_checkpoint(folder) as other:
        assert sorted(one.names()) == sorted(other.names()) and one.num_bytes == other.num_bytes
        assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.names())


def test_the_config_is_the_one_hugging_face_would_write(path):
    assert open_model(path).config == {
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "layer_types": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def test_metadata_are_plain_values_and_numbers_in_arrays(path):
    metadata = open_checkpoint(path).metadata
    assert metadata["tokenizer.ggml.tokens"][:2] == ["token0", "token1"]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0, 2.0]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["llama.block_count"] == 2


def test_texts_of_an_array_are_any_characters_and_may_be_empty():
    wanted = ["", "é", "日本", "\0", "😀", "", "a" * 300]
    file = llama_file()
    file.set("x", gguf_files.strings(wanted))
    found = read_header(file.encode(), PATH).metadata["x"]
    assert list(found) == wanted and [found[i] for i in range(-1, 6)] == [wanted[-1], *wanted[:-1]]
    assert found[2:4] == wanted[2:4] and len(found) == 7


def test_a_folder_with_one_gguf_file_is_that_file(path):
    assert open_checkpoint(path.parent).path == path


def test_version_2_is_read():
    assert opened(llama_file(version=2)).config["num_hidden_layers"] == 2


@pytest.mark.parametrize("alignment", [1, 2, 8, 64, 4096])
def test_any_power_of_two_is_an_alignment(alignment):
    file = llama_file(alignment=alignment)
    file.values.append(("general.alignment", integer(alignment)))
    checkpoint, weights = opened(file), llama_weights()
    assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in weights.items())
    assert all(checkpoint.tensor(name).data_ptr() % 4 == 0 for name in weights)


def test_the_padding_after_the_last_tensor_may_be_missing_but_no_more():
    raw = GGUFFile([], [TensorEntry("last", [1], bytes(4))]).encode()
    assert read_header(raw[:-28], PATH).tensors == read_header(raw, PATH).tensors
    with pytest.raises(CheckpointError, match="it is cut short"):
        read_header(raw[:-29], PATH)


def test_an_unpermuted_architecture_keeps_its_rows():
    file = as_qwen(llama_file(), "qwen3")
    shape = (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE)
    stored = torch.frombuffer(bytearray(file.tensor("blk.0.attn_q.weight").data), dtype=torch.float32)
    assert torch.equal(opened(file).tensor("model.layers.0.self_attn.q_proj.weight"), stored.view(shape))


def test_head_norms_of_qwen3_have_their_names():
    file = as_qwen(llama_file(), "qwen3")
    for name in ("attn_q_norm", "attn_k_norm"):
        file.tensors.append(TensorEntry(f"blk.1.{name}.weight", [HEAD_DIM], bytes(4 * HEAD_DIM)))
    names = opened(file).names()
    assert {"model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"} <= set(names)
    assert entry_of(opened(file).checkpoint).model_class is Qwen3ForCausalLM


def as_qwen(file: GGUFFile, architecture: str) -> GGUFFile:
    file.values = [(key.replace("llama.", f"{architecture}."), value) for key, value in file.values]
    file.set("general.architecture", text(architecture))
    return file


def test_biases_are_permuted_with_their_rows_and_show_in_the_config():
    weights = llama_weights()
    for layer in range(2):
        weights[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(NUM_HEADS * HEAD_DIM)
        weights[f"model.layers.{layer}.self_attn.k_proj.bias"] = torch.randn(NUM_KV_HEADS * HEAD_DIM)
    checkpoint = opened(llama_file(weights))
    assert checkpoint.config["attention_bias"] is True
    assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in weights.items())


def test_an_output_matrix_is_the_lm_head_and_unties_it():
    weights = llama_weights()
    weights["lm_head.weight"] = torch.randn(40, HIDDEN_SIZE)
    checkpoint = opened(llama_file(weights))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.tensor("lm_head.weight"), weights["lm_head.weight"])


@pytest.mark.parametrize(
    "values, wanted",
    [
        ({"factor": real(4.0)}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": text("linear"), "factor": real(4.0)}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": text("none")}, None),
        (
            {
                "type": text("yarn"),
                "factor": real(4.0),
                "original_context_length": integer(32),
                "yarn_beta_fast": real(16.0),
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
        (
            # as Olmo 3 has it
            {
                "type": text("yarn"),
                "factor": real(8.0),
                "original_context_length": integer(32),
                "yarn_attn_factor": real(1.2079441541679836),
            },
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_translated(values, wanted):
    file = llama_file()
    file.values += [(f"llama.rope.scaling.{name}", value) for name, value in values.items()]
    assert opened(file).config["rope_scaling"] == wanted


@pytest.mark.parametrize(
    "kind, factor, usual", [("yarn", 1.0, "1.20794"), ("yarn", 1.5, "1.20794"), ("linear", 1.5, "1")]
)
def test_an_attention_factor_of_yarn_that_is_not_the_usual_one_is_refused(kind, factor, usual):
    file = llama_file()
    values = {"type": text(kind), "factor": real(8.0), "yarn_attn_factor": real(factor)}
    file.values += [(f"llama.rope.scaling.{name}", value) for name, value in values.items()]
    with pytest.raises(CheckpointError, match=f"yarn_attn_factor' is {factor}; only {usual} is supported"):
        opened(file)


def test_the_frequency_divisors_of_llama_3_become_longrope_factors():
    divisors = [1.0, 1.0, 1.5, 2.5, 4.0, 8.0, 8.0, 8.0]
    file = llama_file()
    file.tensors.append(TensorEntry("rope_freqs.weight", [8], struct.pack("<8f", *divisors)))
    checkpoint = opened(file)
    scaling = checkpoint.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    assert scaling["short_factor"] == scaling["long_factor"] == divisors
    assert checkpoint.names() == list(llama_weights())


def with_divisors(kind: str, factor: float) -> GGUFFile:
    file = llama_file()
    file.tensors.append(TensorEntry("rope_freqs.weight", [8], struct.pack("<8f", *[2.0] * 8)))
    file.set("llama.rope.scaling.type", text(kind))
    file.set("llama.rope.scaling.factor", real(factor))
    return file


@pytest.mark.parametrize("kind", ["linear", "longrope", "yarn"])
def test_divisors_and_a_factor_of_the_frequencies_are_not_both_taken(kind):
    both = "has both tensor 'rope_freqs.weight' and metadata key 'llama.rope.scaling.factor'"
    with pytest.raises(CheckpointError, match=both):
        opened(with_divisors(kind, 4.0))


@pytest.mark.parametrize("kind, factor", [("linear", 1.0), ("longrope", 1.0), ("none", 4.0)])
def test_a_factor_that_changes_nothing_may_stand_beside_divisors(kind, factor):
    assert opened(with_divisors(kind, factor)).config["rope_scaling"]["long_factor"] == [2.0] * 8


def test_the_factor_of_a_linear_rope_is_read_under_its_first_name():
    file = llama_file()
    file.set("llama.rope.scale_linear", real(4.0))
    assert opened(file).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_number_that_is_the_same_for_every_layer_may_be_an_array():
    file = llama_file()
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        number = {name: value for name, value in file.values}[f"llama.{key}"][4:]
        file.set(f"llama.{key}", array(UINT32, 2, number * 2))
    assert opened(file).config == opened(llama_file()).config


ELEMENT_TYPES = ["F32", "F16", "BF16", *(block_type.name for block_type in BlockType)]


@pytest.mark.parametrize("type_name", ELEMENT_TYPES)
def test_every_type_reads_as_the_gguf_package_wrote_it(type_name, tmp_path):
    kind = gguf.GGMLQuantizationType[type_name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = {"ffn_up": 7, "attn_k": NUM_KV_HEADS * HEAD_DIM}
    raw = {
        name: np.random.default_rng(0).integers(0, 256, (count, 512 // elements * num_bytes), dtype=np.uint8)
        for name, count in rows.items()
    }
    write_with_gguf_package(tmp_path / "types.gguf", raw, kind)
    with open_model(tmp_path / "types.gguf") as checkpoint, np.errstate(all="ignore"):
        found = as_float(checkpoint.tensor("model.layers.0.mlp.up_proj.weight"))
        assert_same(found, oracle(raw["ffn_up"], kind))
        found = as_float(checkpoint.tensor("model.layers.0.self_attn.k_proj.weight"))
        assert_same(gguf_files.interleaved("k_proj.weight", found), oracle(raw["attn_k"], kind))


def oracle(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, kind))


def as_float(tensor: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.float()


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def write_with_gguf_package(path: Path, raw: dict[str, np.ndarray], kind: gguf.GGMLQuantizationType) -> None:
    writer = llama_writer(path, num_layers=1)
    writer.add_tensor("token_embd.weight", np.ones((5, HIDDEN_SIZE), dtype=np.float32))
    for name, data in raw.items():
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    write_out(writer)


def test_quantised_rows_are_permuted_without_leaving_their_blocks():
    weight = torch.randn(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE)
    raw = gguf.quants.quantize(
        gguf_files.interleaved("k_proj.weight", weight).numpy(), gguf.GGMLQuantizationType.Q8_0
    )
    file = llama_file()
    entry = file.tensor("blk.0.attn_k.weight")
    entry.data, entry.type_id = raw.tobytes(), BlockType.Q8_0.ggml_id
    found = opened(file).tensor("model.layers.0.self_attn.k_proj.weight")
    wanted = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert found.type is BlockType.Q8_0 and np.array_equal(found.blocks.numpy(), wanted)


# The life of a mapping


def test_a_tensor_outlives_its_checkpoint_and_never_writes_to_the_file(path):
    before = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        norm = checkpoint.tensor("output_norm.weight")
    norm.zero_()
    assert not norm.any() and path.read_bytes() == before


def test_a_closed_checkpoint_gives_no_tensors(path):
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="'output_norm.weight' was asked for after .* closed"):
        checkpoint.tensor("output_norm.weight")


def test_a_name_that_is_not_there_is_refused(path):
    with pytest.raises(CheckpointError, match="tiny.gguf: no tensor 'output.weight'"):
        open_checkpoint(path).tensor("output.weight")


def test_a_file_cut_short_while_open_is_noticed_before_it_is_touched(path):
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="changed its size"):
        checkpoint.tensor("output_norm.weight")


@pytest.mark.skipif(sys.platform != "linux", reason="tells its mappings nowhere else")
def test_what_was_read_and_forgotten_takes_no_memory(tmp_path):
    """Also of neighbours, which Linux maps along with what is touched."""
    file, rows = llama_file(), 1 << 16
    file.set("llama.vocab_size", integer(rows))
    file.tensors[0] = TensorEntry("token_embd.weight", [HIDDEN_SIZE, rows], bytes(4 * HIDDEN_SIZE * rows))
    (tmp_path / "mapped.gguf").write_bytes(file.encode())
    with open_checkpoint(tmp_path / "mapped.gguf") as checkpoint:
        for name in random.Random(1).sample(checkpoint.names(), len(checkpoint.names())):
            assert checkpoint.tensor(name).sum() is not None
            checkpoint.forget(name)
        assert resident_bytes("mapped.gguf") == 0


def resident_bytes(name: str) -> int:
    """Of a file that is mapped, those in memory"""
    mappings = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    )
    found = [mapping for mapping in mappings if mapping.partition("\n")[0].endswith(name)]
    assert found
    return sum(1024 * int(re.search(r"^Rss: +([0-9]+)", mapping, re.MULTILINE)[1]) for mapping in found)


def test_a_file_larger_than_memory_is_mapped_and_not_read(tmp_path):
    path = tmp_path / "large.gguf"
    file = llama_file()
    rows = 1 << 29  # 128 GiB, of which the disk holds only the header
    file.set("llama.vocab_size", integer(rows))
    file.tensors.append(file.tensors.pop(0))
    file.tensors[-1] = TensorEntry("token_embd.weight", [HIDDEN_SIZE, rows], b"")
    head = file.encode()
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(len(head) + 4 * HIDDEN_SIZE * rows)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor("token_embd.weight")[rows - 1].tolist() == [0.0] * HIDDEN_SIZE


def test_a_hundred_thousand_strings_are_read_in_under_two_seconds():
    file = llama_file()
    file.set("tokenizer.ggml.tokens", gguf_files.strings([f"token {index}" for index in range(100_000)]))
    raw = file.encode()
    start = time.process_time()
    assert len(read_header(raw, PATH).metadata["tokenizer.ggml.tokens"]) == 100_000
    assert time.process_time() - start < 2


# What is wrong: llama.cpp's handcrafted files and those of its advisories, as a change and the rule it breaks

Change = Callable[[GGUFFile], None]


def whole(**fields: object) -> Change:
    return lambda file: vars(file).update(fields)


def tensor(index: int, **fields: object) -> Change:
    return lambda file: vars(file.tensors[index]).update(fields)


def extra(name: str, dims: list[int], data: bytes, type_id: int = 0) -> Change:
    return lambda file: file.tensors.append(TensorEntry(name, dims, data, type_id))


def value(key: str | bytes, raw: bytes) -> Change:
    """Set a metadata value, or add it."""
    return lambda file: vars(file).update(values=[*file.without(key), (key, raw)])


def without(key: str) -> Change:
    return lambda file: vars(file).update(values=file.without(key))


def llama(key: str, raw: bytes) -> Change:
    return value(f"llama.{key}", raw)


def alignment(raw: bytes) -> Change:
    return value("general.alignment", raw)


BAD_FILES: dict[str, tuple[Change, str]] = {
    # the header
    "bad magic": (whole(magic=b"FUGG"), "not a GGUF file: starts with b'FUGG'"),
    "pickle": (whole(magic=b"\x80\x04\x95."), "not a GGUF file"),
    "git lfs pointer": (whole(magic=b"vers"), "starts with b'vers', .* `git lfs pull` fetches the file"),
    "version 0": (whole(version=0), "GGUF version 0 is not supported"),
    "version 1": (whole(version=1), "GGUF version 1 is not supported"),
    "version of the future": (whole(version=4), "GGUF version 4 is not supported"),
    "big-endian": (whole(version=3 << 24), "GGUF in big-endian order is not supported"),
    "tensor count -1": (whole(num_tensors=-1), f"number of tensors is {2**64 - 1}"),
    "tensor count one too many": (whole(num_tensors=21), "name of tensor 20"),
    "tensor count one too few": (whole(num_tensors=19), "something follows the last tensor"),
    "value count -1": (whole(num_values=-1), f"number of metadata values is {2**64 - 1}"),
    "value count of a million": (
        whole(num_values=1_000_000),
        "number of metadata values is 1000000, not 0 to",
    ),
    "no values": (whole(values=[]), "'general.architecture' is missing"),
    "no tensors": (whole(tensors=[]), "'token_embd.weight' is missing"),
    # metadata
    "empty key": (value("", integer(1)), "length of metadata key 16 is 0, not 1 to 65535"),
    "endless key": (value("k" * 65536, integer(1)), "length of metadata key 16 is 65536, not 1 to 65535"),
    "key not UTF-8": (value(b"\xff\xfe", integer(1)), "metadata key 16 is not UTF-8"),
    "key twice": (
        lambda f: f.values.append(("llama.block_count", integer(2))),
        "'llama.block_count' appears twice",
    ),
    "value type unknown": (value("x", u32(13) + u64(0)), "'x' has unknown value type 13"),
    "value type huge": (value("x", u32(2**32 - 1) + u64(0)), f"'x' has unknown value type {2**32 - 1}"),
    "boolean 2": (value("x", u32(BOOL) + b"\x02"), "'x' is a boolean with value 2"),
    "string length 2^60": (value("x", u32(STRING) + string("a", 2**60)), "length of metadata key 'x' is"),
    "string length -1": (value("x", u32(STRING) + string("a", -1)), "length of metadata key 'x' is"),
    "string not UTF-8": (value("x", text(b"a\xffb")), "'x' is not UTF-8: invalid start byte"),
    "array count 2^40": (value("x", array(UINT8, 2**40)), "'x'.* 1099511627776.* past the end"),
    "array count 2^61 of eight bytes": (value("x", array(10, 2**61)), "'x'.* past the end"),
    "array count -1": (value("x", array(UINT32, -1)), "'x'.* past the end"),
    "string array count 2^40": (value("x", array(STRING, 2**40)), "'x' claims 1099511627776 strings"),
    "string array count 2^61": (value("x", array(STRING, 2**61)), "'x' claims 2305843009213693952 strings"),
    "string of an array too long": (
        value("x", array(STRING, 1, string("a", 2**62))),
        "'x': string 0 of 1 runs past",
    ),
    "string of an array not UTF-8": (value("x", array(STRING, 1, string(b"\xc0"))), "'x' is not UTF-8"),
    "string of an array that ends within a character": (
        value("x", array(STRING, 3, string("a") + string(b"\xc3") + string(b"\xa9"))),
        "'x' is not UTF-8: .* of string 1",
    ),
    "boolean 3 in an array": (value("x", array(BOOL, 2, b"\x01\x03")), "'x' is a boolean with value 3"),
    "array of arrays": (value("x", array(ARRAY, 1, array(UINT8, 0))), "'x' is an array of arrays"),
    "array of an unknown type": (value("x", array(99, 0)), "'x' has unknown value type 99"),
    "alignment 0": (alignment(integer(0)), "'general.alignment' is 0, not a power of two"),
    "alignment 3": (alignment(integer(3)), "'general.alignment' is 3, not a power of two"),
    "alignment 13": (alignment(integer(13)), "'general.alignment' is 13, not a power of two"),
    "alignment 2^31": (alignment(integer(2**31)), "'general.alignment' is 2147483648, not a power"),
    "alignment of another type": (alignment(u32(INT32) + u32(32)), "'general.alignment' has value type"),
    "alignment a string": (alignment(text("32")), "'general.alignment' has value type 8"),
    "alignment an array": (alignment(array(UINT32, 1, u32(32))), "'general.alignment' has value type 9"),
    "alignment not the one used": (alignment(integer(4096)), "offset 10240, .* ends at 12288"),
    # the tensor table
    "name of 64 bytes": (tensor(0, name="n" * 64), "name of tensor 0 is 64, not 1 to 63"),
    "empty name": (tensor(0, name=""), "name of tensor 0 is 0, not 1 to 63"),
    "name not UTF-8": (tensor(0, name=b"\xff"), "name of tensor 0 is not UTF-8"),
    "name twice": (
        lambda f: f.tensors.append(copy.copy(f.tensors[0])),
        "tensor 'token_embd.weight' appears twice",
    ),
    "0 dimensions": (tensor(0, num_dims=0), "'token_embd.weight' has 0 dimensions, not 1 to 4"),
    "5 dimensions": (tensor(0, num_dims=5), "'token_embd.weight' has 5 dimensions, not 1 to 4"),
    "a million dimensions": (tensor(0, num_dims=1_000_000), "'token_embd.weight' has 1000000 dimensions"),
    "dimension 0": (
        tensor(0, dims=[64, 0]),
        r"'token_embd.weight' has shape \(0, 64\), but no dimension may be 0",
    ),
    "dimension -1": (tensor(0, dims=[-1, -1]), "'token_embd.weight' .* needs .* bytes, but the file has"),
    "dimension of INT64_MAX": (
        tensor(0, dims=[2**63 - 1, 2]),
        "'token_embd.weight' .* needs 73786976294838206456 bytes",
    ),
    "product 2^64 + 4": (
        tensor(0, dims=[2**62 + 1, 4]),
        "'token_embd.weight' .* needs 73786976294838206480 ",
    ),
    "product wraps to 0": (
        tensor(0, dims=[2**32, 2**32]),
        "'token_embd.weight' .* needs 73786976294838206464 bytes",
    ),
    "elements too many": (
        tensor(0, dims=[4 * (2**31 - 1)] * 2),
        "'token_embd.weight' .* bytes, but the file has",
    ),
    "bytes too many": (
        tensor(0, dims=[2**62, 1], type_id=30),
        "'token_embd.weight' .* bytes, but the file has",
    ),
    "sum overflows": (extra("t", [0x7FFFFFFFFFFFFFC0], b""), "tensor 't' .* bytes, but the file has"),
    "type unknown": (tensor(0, type_id=99), "'token_embd.weight' has type 99; known are"),
    "type removed": (tensor(0, type_id=4), "'token_embd.weight' has type 4; known are"),
    "type negative": (tensor(0, type_id=-1), "'token_embd.weight' has type 4294967295"),
    "row not whole blocks": (
        tensor(0, dims=[48, 40], type_id=2),
        "'token_embd.weight' has rows of 48, not whole",
    ),
    "row below a super-block": (
        tensor(0, type_id=14),
        "'token_embd.weight' has rows of 64, not whole BlockType.Q6_K of 256",
    ),
    "offset -1": (tensor(0, offset=-1), f"'token_embd.weight' has offset {2**64 - 1}"),
    "offset unaligned": (tensor(0, offset=1), "'token_embd.weight' has offset 1"),
    "offset with a hole": (
        tensor(0, offset=32),
        "'token_embd.weight' has offset 32, but the one before it ends at 0",
    ),
    "offset past the file": (tensor(0, offset=2**40), "'token_embd.weight' has offset 1099511627776"),
    "offset that pads past SIZE_MAX": (tensor(0, offset=2**64 - 4), "'token_embd.weight' has offset"),
    "offset of the one before": (
        tensor(1, offset=0),
        "'blk.0.attn_norm.weight' has offset 0, but the one before it ends at 10240",
    ),
    "data missing": (tensor(-1, data=b""), "describes .* bytes, .*: it is cut short"),
    "data after the end": (whole(tail=bytes(32)), "something follows the last tensor"),
    # what the model is
    "architecture unknown": (
        value("general.architecture", text("gpt2")),
        "'gpt2' is not supported; known are .*llama, .*qwen2",
    ),
    "architecture a number": (
        value("general.architecture", integer(1)),
        "'general.architecture' is of type int, not str",
    ),
    "tensor unknown": (extra("v.patch.weight", [1], bytes(4)), "'v.patch.weight' has no place in a llama"),
    "experts": (extra("blk.0.ffn_gate_exps.weight", [1], bytes(4)), "'blk.0.ffn_gate_exps.weight' has no"),
    "layer 00": (extra("blk.00.ffn_up.weight", [1], bytes(4)), "'blk.00.ffn_up.weight' has no place"),
    "layers missing": (
        llama("block_count", integer(3)),
        "'llama.block_count' is 3, but the tensors are of 2",
    ),
    "layers by the billion": (
        llama("block_count", integer(10**9)),
        "is 1000000000, but the tensors are of 2",
    ),
    "layers too many": (
        llama("block_count", integer(1)),
        "'llama.block_count' is 1, but the tensors are of 2",
    ),
    "layer skipped": (extra("blk.7.ffn_up.weight", [1], bytes(4)), "layers up to number 7"),
    "hidden size missing": (without("llama.embedding_length"), "'llama.embedding_length' is missing"),
    "hidden size 0": (llama("embedding_length", integer(0)), "'llama.embedding_length' is 0, not 1 to"),
    "hidden size -1": (
        llama("embedding_length", u32(INT32) + u32(-1)),
        "'llama.embedding_length' is -1, not 1",
    ),
    "hidden size 2^32-1": (
        llama("embedding_length", integer(-1)),
        "'llama.embedding_length' is 4294967295, not 1",
    ),
    "hidden size a string": (
        llama("embedding_length", text("64")),
        "'llama.embedding_length' is of type str, not int",
    ),
    "hidden size a boolean": (llama("embedding_length", u32(BOOL) + b"\1"), "is of type bool, not int"),
    "heads an array": (
        llama("attention.head_count", array(UINT32, 1, u32(4))),
        "head_count' is of type array, not int",
    ),
    "heads of each layer": (
        llama("attention.head_count_kv", array(UINT32, 2, u32(2) + u32(1))),
        "head_count_kv' is of type array, not int",
    ),
    "heads more than width": (llama("attention.head_count", integer(65)), "key_length' is 0, not 2 to"),
    "heads that do not fit": (
        llama("attention.head_count_kv", integer(1)),
        "k_proj.weight' has shape .*, but its heads need 16 rows",
    ),
    "odd part of a head rotated": (llama("rope.dimension_count", integer(15)), "partial_rotary_factor = 0.9"),
    "half of a head rotated": (
        llama("rope.dimension_count", integer(8)),
        "partial_rotary_factor = 0.5 is not",
    ),
    "epsilon missing": (without("llama.attention.layer_norm_rms_epsilon"), "rms_epsilon' is missing"),
    "epsilon NaN": (llama("attention.layer_norm_rms_epsilon", real(float("nan"))), "is nan, not a finite"),
    "epsilon negative": (llama("attention.layer_norm_rms_epsilon", real(-1.0)), "is -1.0, not a finite"),
    "theta 0": (llama("rope.freq_base", real(0.0)), "'llama.rope.freq_base' is 0.0, not a finite"),
    "theta infinite": (llama("rope.freq_base", real(float("inf"))), "'llama.rope.freq_base' is inf"),
    "theta 1e300": (
        llama("rope.freq_base", u32(FLOAT64) + struct.pack("<d", 1e300)),
        "freq_base' is 1e\\+300",
    ),
    "theta an integer": (
        llama("rope.freq_base", integer(10000)),
        "'llama.rope.freq_base' is of type int, not float",
    ),
    "vocabulary of another size": (llama("vocab_size", integer(41)), "vocab_size' is not the 40 rows"),
    "bos outside the vocabulary": (
        value("tokenizer.ggml.bos_token_id", integer(40)),
        "bos_token_id' is 40, not 0 to 39",
    ),
    "eos -1": (
        value("tokenizer.ggml.eos_token_id", u32(INT32) + u32(-1)),
        "eos_token_id' is -1, not 0 to 39",
    ),
    "rope key unknown": (
        llama("rope.scaling.attn_factor", real(1.5)),
        "'llama.rope.scaling.attn_factor' is 1.5, but tensor 'rope_factors_short.weight' is missing",
    ),
    "rope scaling unknown": (llama("rope.scaling.type", text("su")), "scaling.type' is 'su'; known"),
    "rope scaling without its factors": (
        llama("rope.scaling.type", text("longrope")),
        "'llama.rope.scaling.type' is 'longrope', but tensor 'rope_factors_short.weight' is missing",
    ),
    "rope factor missing": (
        llama("rope.scaling.type", text("yarn")),
        "'llama.rope.scaling.factor' is missing",
    ),
    "rope divisors of another size": (extra("rope_freqs.weight", [7], bytes(28)), "'rope_freqs.weight' has"),
    "rope divisor 0": (extra("rope_freqs.weight", [8], bytes(32)), "'rope_freqs.weight' has values"),
    "bias in blocks": (
        extra("blk.0.attn_q.bias", [64], bytes(68), type_id=8),
        "'blk.0.attn_q.bias' is Q8_0, but the rows of a bias are no blocks",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_broken_file_is_refused_with_its_name_and_the_rule(kind):
    change, rule = BAD_FILES[kind]
    file = llama_file()
    change(file)
    with pytest.raises(CheckpointError, match=f"^tiny.gguf: .*{rule}"):
        opened(file)


def test_a_key_of_length_minus_one_is_refused():
    raw = llama_file().encode()
    raw[24:32] = u64(-1)
    with pytest.raises(CheckpointError, match=f"^tiny.gguf: the length of metadata key 0 is {2**64 - 1}"):
        GGUFCheckpoint([Part(raw, PATH)])


def test_a_file_cut_at_any_byte_of_its_header_is_refused():
    raw = llama_file(llama_weights(num_layers=1)).encode()
    for length in range(min(read_header(raw, PATH).tensors.values(), key=lambda info: info.offset).offset):
        with pytest.raises(CheckpointError, match="^tiny.gguf: "):
            read_header(raw[:length], PATH)


def test_a_file_cut_at_any_page_of_its_data_is_refused(tmp_path):
    raw = llama_file().encode()
    for length in range(0, len(raw), 4096):
        (tmp_path / "cut.gguf").write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match="cut.gguf: "):
            open_checkpoint(tmp_path / "cut.gguf")


def test_a_header_longer_than_its_limit_is_refused(monkeypatch):
    monkeypatch.setattr("infinilm.checkpoint.gguf_format.MAX_HEADER_BYTES", 1000)
    with pytest.raises(
        CheckpointError, match="tiny.gguf: .*a header at most 1000|tiny.gguf: .*end of the header"
    ):
        opened(llama_file())


def test_a_missing_path_a_folder_without_models_and_two_models_are_refused(path):
    with pytest.raises(CheckpointError, match="nowhere.gguf: no such file or folder"):
        open_checkpoint(path.parent / "nowhere.gguf")
    (path.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 .gguf files \(other.gguf, tiny.gguf\)"):
        open_checkpoint(path.parent)
    with pytest.raises(CheckpointError, match="other.gguf: .* empty"):
        open_checkpoint(path.parent / "other.gguf")


# Mutations: whatever a file says, reading it ends in a model or a CheckpointError

NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    63,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**60,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
NAMES = [
    "",
    "a",
    "blk.0.attn_q.weight",
    "blk.1.ffn_up.bias",
    "output.weight",
    "rope_freqs.weight",
    "x" * 64,
    b"\xff",
]
KEYS = [
    "general.alignment",
    "llama.block_count",
    "llama.rope.scaling.type",
    "llama.attention.key_length",
    "x",
    b"\xff",
    "",
]


def mutated_structure(rng: random.Random, base: GGUFFile) -> bytearray:
    file = copy.copy(base)
    file.values, file.tensors = list(base.values), [copy.copy(tensor) for tensor in base.tensors]
    for _ in range(rng.randint(1, 3)):
        rng.choice([mutate_counts, mutate_value, mutate_value, mutate_tensor, mutate_tensor, mutate_order])(
            rng, file
        )
    return file.encode()


def mutate_counts(rng: random.Random, file: GGUFFile) -> None:
    setattr(
        file,
        rng.choice(["version", "num_tensors", "num_values"]),
        rng.choice([*NUMBERS, len(file.tensors) - 1]),
    )


def mutate_value(rng: random.Random, file: GGUFFile) -> None:
    index = rng.randrange(len(file.values))
    key = rng.choice([file.values[index][0], rng.choice(KEYS)])
    number = rng.choice(NUMBERS)
    raw = rng.choice([
        integer(number),
        real(rng.choice([0.0, -1.0, 1e-5, float("nan"), float("inf")])),
        text(rng.choice(["llama", "qwen3", "yarn", "linear", ""])),
        array(rng.randrange(14), number, rng.randbytes(rng.randrange(64))),
        u32(rng.randrange(14)) + rng.randbytes(rng.randrange(24)),
    ])  # fmt: skip
    file.values[index] = (key, raw)


def mutate_tensor(rng: random.Random, file: GGUFFile) -> None:
    tensor = rng.choice(file.tensors)
    change = {
        "name": lambda: rng.choice(NAMES),
        "dims": lambda: [rng.choice([*NUMBERS, 64, 96, 256]) for _ in range(rng.randint(0, 5))],
        "type_id": lambda: rng.choice([*range(32), *NUMBERS]),
        "offset": lambda: rng.choice([None, *NUMBERS]),
        "num_dims": lambda: rng.choice([None, *NUMBERS]),
        "data": lambda: rng.randbytes(rng.choice([0, 1, 32, 64, 4096])),
    }
    name = rng.choice(list(change))
    setattr(tensor, name, change[name]())


def mutate_order(rng: random.Random, file: GGUFFile) -> None:
    part = rng.choice([file.values, file.tensors])
    rng.choice([part.reverse, part.pop, lambda: part.append(rng.choice(part)), lambda: rng.shuffle(part)])()


def mutated_bytes(rng: random.Random, raw: bytearray, header_length: int) -> bytearray:
    raw = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        position = rng.randrange(header_length)
        patch = rng.choice([u64(rng.choice(NUMBERS)), u32(rng.choice(NUMBERS)), rng.randbytes(1)])
        length = rng.choice([len(patch), len(patch), 0, rng.randrange(16)])
        raw[position : position + length] = patch
    return raw if rng.random() < 0.9 else raw[: rng.randrange(len(raw))]


def read_all(raw: bytearray) -> bool:
    """Open and touch everything; False if it was refused in the way promised."""
    try:
        checkpoint = AsModel(GGUFCheckpoint([Part(raw, PATH)]))
    except CheckpointError as error:
        assert str(error).startswith("tiny.gguf: ")
        return False
    return all(
        as_float(checkpoint.tensor(name)).shape == checkpoint.shape(name) for name in checkpoint.names()
    )


def survive(num_cases: int, seed: int) -> int:
    rng = random.Random(seed)
    base = llama_file(llama_weights(num_layers=1))
    base.set("llama.block_count", integer(1))
    raw = base.encode()
    header_length = len(raw) - sum(len(base.padded(tensor.data)) for tensor in base.tensors)
    structures = sum(read_all(mutated_structure(rng, base)) for _ in range(num_cases // 2))
    return structures + sum(read_all(mutated_bytes(rng, raw, header_length)) for _ in range(num_cases // 2))


def test_twelve_thousand_mutations_are_read_or_refused():
    assert 0 < survive(12_000, seed=1) < 12_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_half_a_million_mutations_are_read_or_refused(seed):
    assert 0 < survive(50_000, seed=100 + seed) < 50_000
