"""Hugging Face folders: config.json and safetensors. Headers are checked here, then the library maps files.

No pickle is loaded and no code of the folder is run: `.bin` and `.pt` are refused, `auto_map` is ignored.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infinilm.checkpoint import Checkpoint, CheckpointError, TensorInfo
from infinilm.folder import MAX_NAME_LENGTH, Folder, expanded, parse_object, quoted
from infinilm.whole_file import whole_file

MAX_HEADER_BYTES = 1 << 24  # of a file or an index: twice what as many tensors as these take
MAX_TENSORS = 65_536
MAX_DIMS = 8
MAX_FILE_NAME_LENGTH = 255  # as file systems have it

SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    # Of quantised files, which are opened for their config to say what they are
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
}


def open_folder(folder: Folder) -> "HuggingFaceCheckpoint":
    config = folder.read_object("config.json") or {}
    return HuggingFaceCheckpoint(folder, config, _shards_of(folder))


def open_adapter(path: str | Path) -> "HuggingFaceCheckpoint":
    """What PEFT saves: adapter_config.json and adapter_model.safetensors"""
    folder = Folder(expanded(path, CheckpointError), CheckpointError)
    try:
        if not folder.path.is_dir():
            raise CheckpointError(f"{path}: no such folder; an adapter is a folder that PEFT has saved")
        config = folder.read_object(ADAPTER_CONFIG)
        if config is None:
            raise CheckpointError(f"{path}: holds no {ADAPTER_CONFIG}; an adapter is a folder of PEFT's")
        if (file := folder.find(ADAPTER_FILE)) is None:
            raise CheckpointError(f"{path}: {_why_no_adapter(folder.path)}")
        return HuggingFaceCheckpoint(folder, config, _by_tensor([_Shard(file)]))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _why_no_adapter(folder: Path) -> str:
    pickled = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in PICKLES)
    if not pickled:
        return f"holds no {ADAPTER_FILE}"
    return (
        f"{pickled[0]} is pickled, which can run code and is never loaded; save the adapter as {ADAPTER_FILE}"
    )


class HuggingFaceCheckpoint(Checkpoint):
    """The tensors of a folder's safetensors files."""

    def __init__(self, folder: Folder, config: dict[str, Any], shards: "dict[str, _Shard]") -> None:
        self._shards = shards
        super().__init__(
            folder.path, config, {}, {name: shard.tensors[name] for name, shard in shards.items()}
        )

    def _read(self, name: str, info: TensorInfo) -> Tensor:
        return self._shards[name].tensor(name)

    def _release(self) -> None:
        del self._shards


def write_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file of our own; it takes its place when it is whole."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # so that each is aligned
    try:
        with whole_file(target) as file:  # by ourselves: the library would put a file of its own in its place
            file.write(_header_of(ordered, metadata))
            for _, tensor in ordered:
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        raise OSError(f"{target}: cannot be written: {error.strerror or error}") from error


def _header_of(tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    names, end = {dtype: name for name, dtype in DTYPES.items()}, 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    padded = raw.ljust(-(-len(raw) // 8) * 8)
    return struct.pack("<Q", len(padded)) + padded


def read_tensors(path: str | Path, metadata: dict[str, str]) -> dict[str, Tensor]:
    """What write_tensors wrote, if it was with this metadata."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path}: it is no file")
    shard = _Shard(path)
    found = shard.map.metadata() or {}
    for name, wanted in metadata.items():
        if found.get(name) != wanted:
            raise ValueError(f"{path}: {name} is {short(found.get(name))}, but here it is {short(wanted)}")
    return {name: shard.tensor(name) for name in shard.tensors}


class _Shard:
    """One safetensors file: its header checked, then mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            self.tensors = read_header(file, self.num_bytes, path)
        self.path = path
        try:
            self.map: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def tensor(self, name: str) -> Tensor:
        # A deleted file stays mapped; one that was cut short would end the process when touched.
        if self.path.exists() and self.path.stat().st_size != self.num_bytes:
            raise CheckpointError(f"{self.path}: changed its size while it was open; open it again")
        tensor: Tensor = self.map.get_tensor(name)
        # Not every writer aligns its data, but kernels need whole elements.
        return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor


def _by_tensor(shards: Iterable[_Shard]) -> dict[str, _Shard]:
    found: dict[str, _Shard] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in found:
                raise CheckpointError(f"{shard.path}: tensor {name!r} is also in {found[name].path.name}")
            found[name] = shard
    return found


# The files of a folder


def _shards_of(folder: Folder) -> dict[str, _Shard]:
    index = _read_index(folder)
    files = [SINGLE_FILE] if index is None else sorted(set(index.values()))
    shards = _by_tensor(_Shard(folder.file(file)) for file in files)
    if index is not None:
        _check_index(folder.path / INDEX_FILE, index, shards)
    return shards


def _read_index(folder: Folder) -> dict[str, str] | None:
    """The file of each tensor; None if there is one file for all."""
    if folder.find(SINGLE_FILE) is not None:
        return None
    path, index = folder.path / INDEX_FILE, folder.read_object(INDEX_FILE, MAX_HEADER_BYTES)
    if index is None:
        raise CheckpointError(f"{folder.path}: {_why_no_weights(folder.path)}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: 'weight_map' is {short(weight_map)}, not a map of names to files")
    for name, file in weight_map.items():
        if not _is_plain_name(file):
            raise CheckpointError(
                f"{path}: tensor {quoted(name)} is in {short(file)}, "
                "which is not the plain name of a .safetensors file"
            )
    return weight_map


def _is_plain_name(file: object) -> bool:
    return (
        isinstance(file, str)
        and len(file) <= MAX_FILE_NAME_LENGTH
        and file.isprintable()  # errors name it as it is
        and Path(file).name == file
        and "\\" not in file
        and file.endswith(".safetensors")
    )


def _why_no_weights(folder: Path) -> str:
    suffixes = {entry.suffix.lower() for entry in folder.iterdir()}
    if ".safetensors" in suffixes:
        return f"has .safetensors files, but neither {SINGLE_FILE} nor {INDEX_FILE}"
    if ".gguf" in suffixes:
        return f"has config.json but no {SINGLE_FILE}; give the path of the .gguf file itself"
    if suffixes & PICKLES:
        return (
            "has only pickled weights, which can run code and are never loaded; convert them to safetensors"
        )
    return f"has config.json, but neither {SINGLE_FILE} nor {INDEX_FILE}"


def _check_index(path: Path, index: Mapping[str, str], shards: Mapping[str, _Shard]) -> None:
    for name, file in index.items():
        if name not in shards or shards[name].path.name != file:
            raise CheckpointError(f"{path}: tensor {quoted(name)} is not in {file}, where the index has it")
    for name, shard in shards.items():
        if name not in index:
            raise CheckpointError(f"{shard.path}: tensor {name!r} is not in {path.name}")


# The safetensors header: length | JSON {name: {dtype, shape, data_offsets}} | data, in one gapless run


def read_header(file: BinaryIO, num_bytes: int, source: object) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file of num_bytes; `source` is what errors call it."""
    header = _read_header_object(file, num_bytes, source)
    _check_annotations(header.pop("__metadata__", None), source)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{source}: has {len(header)} tensors, more than {MAX_TENSORS}")
    data_start = file.tell()
    tensors = {name: _tensor_info(name, entry, data_start, source) for name, entry in header.items()}
    _check_spans(tensors, data_start, num_bytes, source)
    return tensors


def _read_header_object(file: BinaryIO, num_bytes: int, source: object) -> dict[str, Any]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{source}: not a safetensors file: has only {len(prefix)} bytes")
    length = struct.unpack("<Q", prefix)[0]
    if not 2 <= length <= min(num_bytes - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{source}: not a safetensors file: its header would have {length} bytes, "
            f"not 2 to {min(num_bytes - 8, MAX_HEADER_BYTES)}{_likeness(prefix)}"
        )
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise CheckpointError(
            f"{source}: not a safetensors file: its header starts with {raw[:8]!r}, not '{{'"
        )
    return parse_object(raw, source, CheckpointError)


def _likeness(prefix: bytes) -> str:
    """What a file is that begins so, where people take it for weights"""
    if prefix.startswith((b"\x80", b"PK")):
        return "; it looks like a pickle, which is never loaded"
    if prefix == b"version ":  # what a clone without it has in the file's place
        return "; it looks like a pointer of Git LFS: `git lfs pull` fetches the file itself"
    return ""


def _check_annotations(annotations: object, source: object) -> None:
    if annotations is None:
        return
    if not isinstance(annotations, dict) or not all(isinstance(value, str) for value in annotations.values()):
        raise CheckpointError(
            f"{source}: '__metadata__' is {short(annotations)}, not a map of strings to strings"
        )


def _tensor_info(name: str, entry: object, data_start: int, source: object) -> TensorInfo:
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise CheckpointError(
            f"{source}: a tensor's name has {len(name)} characters, not 1 to {MAX_NAME_LENGTH}"
        )
    where = f"{source}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is {short(entry)}, not a map of dtype, shape and data_offsets")
    dtype, shape = _dtype(entry["dtype"], where), _shape(entry["shape"], where)
    begin, end = _span(entry["data_offsets"], where)
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes != end - begin:
        raise CheckpointError(
            f"{where} {shape} {dtype} needs {num_bytes} bytes, but its offsets span {end - begin}"
        )
    return TensorInfo(shape, dtype, data_start + begin, num_bytes)


def _dtype(name: object, where: str) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"{where} has dtype {short(name)}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def _shape(sizes: object, where: str) -> tuple[int, ...]:
    if not _are_counts(sizes) or len(sizes) > MAX_DIMS:
        raise CheckpointError(f"{where} has shape {short(sizes)}, not a list of at most {MAX_DIMS} sizes")
    # Also where a size is 0: torch computes strides from the others.
    if prod(max(size, 1) for size in sizes) >= 2**63:
        raise CheckpointError(f"{where} has shape {short(sizes)}, more than 2**63 elements")
    return tuple(sizes)


def _span(offsets: object, where: str) -> tuple[int, int]:
    # Beyond 2**63 no file has a byte, and with data_start added Python might not write the number out.
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] < 2**63:
        raise CheckpointError(f"{where} has data_offsets {short(offsets)}, not [begin, end]")
    return offsets[0], offsets[1]


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_spans(tensors: Mapping[str, TensorInfo], data_start: int, num_bytes: int, source: object) -> None:
    """Each tensor starts where the last one ended, and the last one ends with the file."""
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if info.offset != position:
            fault = "overlaps the one before it" if info.offset < position else "leaves a hole before it"
            raise CheckpointError(
                f"{source}: tensor {name!r} starts at byte {info.offset}, not {position}: it {fault}"
            )
        position += info.num_bytes
    if position != num_bytes:
        fault = "it is cut short" if num_bytes < position else "something follows its last tensor"
        raise CheckpointError(
            f"{source}: the header describes {position} bytes, but the file has {num_bytes}: {fault}"
        )
