"""packed_cache: a copy of packed matrices, mapped where it is of this very model, else made anew."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import at_level
from gguf_files import GGUFFile, whole_file
from torch import Tensor
from warm import RunPython

from infinicore import _native
from infinicore.quantization import BlockType, PackedTensor, quantize
from infinilm import LLM, SamplingParams
from infinilm.cli import main
from infinilm.config import EngineConfig
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.packed_copy import FORMAT, PAGE
from infinilm.startup import load, tell_nobody

IDS = torch.tensor([[1, 2, 3, 0, 7]])


def quantized_file(scale: float = 1.0) -> GGUFFile:
    file = whole_file()
    for entry in file.tensors:
        if len(entry.dims) == 2:
            values = torch.frombuffer(bytearray(entry.data), dtype=torch.float32).view(entry.dims[::-1])
            entry.data = quantize(scale * values, BlockType.Q8_0).blocks.numpy().tobytes()
            entry.type_id = BlockType.Q8_0.ggml_id
    return file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(quantized_file().encode())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def loaded(source: Path, folder: Path | None, **options: str) -> LlamaForCausalLM:
    config = EngineConfig(model=source, device="cpu", packed_cache=folder, **options)  # type: ignore[arg-type]
    return load(config, tell_nobody)[0]


def logits(model: LlamaForCausalLM) -> Tensor:
    with torch.inference_mode():
        return model(IDS, logits_to_keep=0)


def copy_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def is_mapped(model: LlamaForCausalLM, path: Path) -> bool:
    """Whether the first matrix is memory of this very file"""
    weight = model.model.embed_tokens.weight
    assert isinstance(weight, PackedTensor)
    address = weight.blocks.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.endswith(str(path)) and f" {path.stat().st_ino} " in line
    return False


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")


@linux
@pytest.mark.parametrize("activations", [None, "int8"])
def test_a_model_in_mapped_memory_gives_the_bits_of_one_that_was_packed(
    activations: str | None, source: Path, folder: Path, level: str
) -> None:
    options = {} if activations is None else {"activations": activations}
    first = loaded(source, folder, **options)
    second = loaded(source, folder, **options)
    assert not is_mapped(first, copy_in(folder)) and is_mapped(second, copy_in(folder))
    assert torch.equal(logits(second), logits(first))
    assert torch.equal(logits(first), logits(loaded(source, None, **options)))


@linux
def test_one_copy_serves_every_kind_of_activations(source: Path, folder: Path) -> None:
    loaded(source, folder)
    assert is_mapped(loaded(source, folder, activations="int8"), copy_in(folder))


def test_models_that_are_not_packed_leave_no_copy(source: Path, folder: Path) -> None:
    loaded(source, folder, activations="float32")
    source.write_bytes(whole_file().encode())  # of floats
    loaded(source, folder)
    assert not folder.exists()


def test_models_of_one_name_have_a_copy_each(source: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / source.name
    other.write_bytes(quantized_file(2.0).encode())
    wanted = [logits(loaded(path, None)) for path in (source, other)]
    for _ in range(2):
        for path, result in zip((source, other), wanted, strict=True):
            assert torch.equal(logits(loaded(path, folder)), result)
    assert len(list(folder.iterdir())) == 2


# ---- a copy of something else ----


@linux
def test_a_model_that_was_written_again_is_packed_again(source: Path, folder: Path) -> None:
    loaded(source, folder)
    source.write_bytes(quantized_file(2.0).encode())  # as long as before
    os.utime(source, ns=(0, 1))
    model = loaded(source, folder)
    assert torch.equal(logits(model), logits(loaded(source, None)))
    assert is_mapped(loaded(source, folder), copy_in(folder))


@linux
@pytest.mark.skipif(len(_native.isa_levels()) < 2, reason="the build has one level")
def test_another_level_makes_a_copy_of_its_own(source: Path, folder: Path) -> None:
    levels = _native.isa_levels()
    with at_level(levels[0]):
        loaded(source, folder)
    with at_level(levels[-1]):
        assert not is_mapped(loaded(source, folder), copy_in(folder))
        assert is_mapped(loaded(source, folder), copy_in(folder))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def relabel(path: Path) -> None:
    overwrite(path, len(FORMAT), b"\1" * 32)


def leave_the_label_out(path: Path) -> None:
    overwrite(path, 0, bytes(PAGE))


def spoil_a_scale(path: Path) -> None:
    overwrite(path, PAGE, b"\xff\x7f")  # a packed matrix begins with scales


def fill_with_noise(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


DAMAGES = (cut_short, lengthen, empty, relabel, leave_the_label_out, spoil_a_scale, fill_with_noise)


@linux
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_copy_is_made_anew(damage: Callable[[Path], None], source: Path, folder: Path) -> None:
    wanted = logits(loaded(source, folder))
    whole = copy_in(folder).read_bytes()
    damage(copy_in(folder))
    assert torch.equal(logits(loaded(source, folder)), wanted)
    assert copy_in(folder).read_bytes() == whole
    assert is_mapped(loaded(source, folder), copy_in(folder))


def test_bytes_that_were_changed_are_weights_and_nothing_else(source: Path, folder: Path) -> None:
    """No label tells of them: a copy is trusted as far as the model's own file is."""
    wanted = logits(loaded(source, folder))
    path = copy_in(folder)
    overwrite(path, PAGE, b"\x33" * (path.stat().st_size - PAGE))
    found = logits(loaded(source, folder))
    assert found.isfinite().all() and not torch.equal(found, wanted)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes in folders")
@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", None)], ids=["folder", "pipe"])
def test_what_is_no_file_is_not_waited_for(
    make: Callable[[Path], None], source: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = logits(loaded(source, folder))
    path = copy_in(folder)
    path.unlink()
    make(path)
    assert torch.equal(logits(loaded(source, folder)), wanted)
    assert path.is_file() or "no packed copy is kept" in caplog.text


@linux
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root may give files away")
def test_a_copy_of_another_user_is_not_mapped(source: Path, folder: Path) -> None:
    loaded(source, folder)
    os.chown(copy_in(folder), 12345, 12345)
    assert not is_mapped(loaded(source, folder), copy_in(folder))
    assert copy_in(folder).stat().st_uid == os.getuid()


# ---- a disk that does not take it ----


def test_a_full_disk_is_a_warning_and_leaves_nothing(
    source: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, limits[1]))
    try:
        model = loaded(source, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "no packed copy is kept" in caplog.text and "packed_cache" in caplog.text
    assert not list(folder.iterdir())
    assert torch.equal(logits(model), logits(loaded(source, None)))


def test_what_a_killed_writer_left_is_removed_by_the_next_and_what_is_being_written_stays(
    source: Path, folder: Path, run_python: RunPython
) -> None:
    program = f"""
import os, signal
from test_packed_copy import Path, loaded
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
loaded(Path({str(source)!r}), Path({str(folder)!r}))
"""
    assert run_python(program, cwd=Path(__file__).parent).returncode == -signal.SIGKILL
    left = copy_in(folder)
    current = left.with_suffix(".current.partial")
    with current.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        loaded(source, folder)
        assert not left.exists() and current.exists() and len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_a_warning(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    loaded(source, tmp_path / "file" / "packed")
    assert "no packed copy is kept: Not a directory" in caplog.text


# ---- what users type ----


@pytest.mark.parametrize("value", ["", 3, True])
def test_a_packed_cache_is_the_path_of_a_folder(value: object) -> None:
    with pytest.raises(ValueError, match="packed_cache must be the path of a folder"):
        EngineConfig(packed_cache=value)  # type: ignore[arg-type]


def test_the_command_answers_from_a_copy_as_it_did_without(
    source: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(source, device="cpu", kv_cache_memory="1MB")
    wanted = llm.generate("ab", SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].text
    command = ["generate", "ab", "--raw", "--model", str(source), "--max-tokens", "4", "--device", "cpu"]
    for _ in range(2):
        main([*command, "--packed-cache", str(folder), "--kv-cache-memory", "1MB"])
        assert wanted.strip() in capsys.readouterr().out
    assert copy_in(folder).suffix == ".packed"
