"""Prefixes saved by one process are found by another, bit for bit, and by no model that is not the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Tiny, finish, prompt, said
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

from infinilm import RequestOutput, SamplingParams
from infinilm.engine import prefixes
from infinilm.engine.engine import Engine
from infinilm.whole_file import remove_abandoned

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=2, ignore_eos=True)


def answer(engine: Engine, token_ids: list[int], salt: str | None = None) -> RequestOutput:
    (output,) = finish(engine, engine.make(token_ids, PARAMS, cache_salt=salt))
    return output


def save(engine: Engine, path: Path) -> int:
    return prefixes.save(path, engine.model, engine.cache, engine.blocks)


def load(engine: Engine, path: Path) -> int:
    return prefixes.load(path, engine.model, engine.cache, engine.blocks)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_a_saved_prefix_gives_the_bits_of_a_computed_one(
    kv_cache_dtype: str, tiny: Tiny, tmp_path: Path
) -> None:
    first, second = (tiny.engine(kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    wanted = answer(first, prompt(70))
    assert save(first, tmp_path / "file") == load(second, tmp_path / "file") == 4
    found = answer(second, prompt(70))
    assert (wanted.num_cached_tokens, found.num_cached_tokens) == (0, 64)
    assert said(found) == said(wanted)
    assert load(second, tmp_path / "file") == 0  # all known


def test_a_salt_is_saved_along(tiny: Tiny, tmp_path: Path) -> None:
    first, second = tiny.engine(), tiny.engine()
    answer(first, prompt(40), "mine")
    save(first, tmp_path / "file")
    load(second, tmp_path / "file")
    assert answer(second, prompt(40)).num_cached_tokens == 0
    assert answer(second, prompt(40), "mine").num_cached_tokens == 32


def test_as_much_is_loaded_as_there_is_room_for_and_nothing_is_driven_out(tiny: Tiny, tmp_path: Path) -> None:
    first, second = tiny.engine(), tiny.engine(num_blocks=6)
    answer(first, prompt(120))
    assert save(first, tmp_path / "file") == 7
    other = [token + 1 for token in prompt(40)]
    answer(second, other)
    assert load(second, tmp_path / "file") == 4
    assert answer(second, other).num_cached_tokens == 32


def test_an_empty_cache_is_saved_and_loaded(tiny: Tiny, tmp_path: Path) -> None:
    assert save(tiny.engine(), tmp_path / "file") == load(tiny.engine(), tmp_path / "file") == 0


def test_prefixes_of_weights_that_were_changed_are_forgotten_by_a_reset(tmp_path: Path) -> None:
    tiny = Tiny.at(tmp_path)
    engine = tiny.engine()
    before = answer(engine, prompt(70))
    with torch.no_grad():
        engine.model.model.norm.weight.mul_(0.5)
        engine.model.model.layers[0].input_layernorm.weight.mul_(3)
    request = engine.make(prompt(5), PARAMS)
    engine.enqueue(request)
    assert not engine.reset_prefix_cache()  # which it will use
    engine.abort(request.request_id)
    assert engine.reset_prefix_cache()
    found = answer(engine, prompt(70))
    wanted = answer(tiny.engine(), prompt(70))  # of the same model, with a cache of its own
    assert found.num_cached_tokens == 0
    assert said(found) == said(wanted) != said(before)


def test_what_a_killed_writer_left_is_removed_by_the_next_and_files_of_others_stay(
    tiny: Tiny, tmp_path: Path
) -> None:
    for name in (".file.abc.partial", ".file.swp", ".file2.abc.partial"):
        (tmp_path / name).write_bytes(b"some of it")
    save(tiny.engine(), tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"file", ".file.swp", ".file2.abc.partial"}


def other_weights(tiny: Tiny, folder: Path) -> Engine:
    return Tiny.at(folder, seed=6).engine()


def other_block_size(tiny: Tiny, folder: Path) -> Engine:
    return tiny.engine(block_size=32)


def other_dtype(tiny: Tiny, folder: Path) -> Engine:
    return tiny.engine(kv_cache_dtype="bfloat16")


def other_rope(tiny: Tiny, folder: Path) -> Engine:
    return Tiny.at(folder, rope_theta=5000.0).engine()


@pytest.mark.parametrize(
    "other, named",
    [
        (other_weights, "weights"),
        (other_block_size, "block_size"),
        (other_dtype, "dtype"),
        (other_rope, "config"),
    ],
)
def test_prefixes_of_anything_else_are_refused_by_what_differs(
    other: Callable[[Tiny, Path], Engine], named: str, tiny: Tiny, tmp_path: Path
) -> None:
    first = tiny.engine()
    answer(first, prompt(40))
    save(first, tmp_path / "file")
    with pytest.raises(ValueError, match=f": {named} is"):
        load(other(tiny, tmp_path), tmp_path / "file")


def set_parents(parents: list[int]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["parents"] = torch.tensor(parents)

    return change


def drop_a_layer(tensors: dict[str, Tensor]) -> None:
    del tensors["values.1"]


def shorten(tensors: dict[str, Tensor]) -> None:
    tensors["keys.0"] = tensors["keys.0"][:1].clone()


def flip_a_bit(tensors: dict[str, Tensor]) -> None:
    tensors["values.1"].view(torch.uint8).flatten()[100] ^= 1


def change_a_token(tensors: dict[str, Tensor]) -> None:
    tensors["token_ids"][0, 3] += 1


def spoil_salts(tensors: dict[str, Tensor]) -> None:
    tensors["salts"] = torch.tensor(list(b'["zz"]'), dtype=torch.uint8)


@pytest.mark.parametrize(
    "change",
    [
        set_parents([1, 0]),
        set_parents([-9, 0]),
        set_parents([0]),
        drop_a_layer,
        shorten,
        spoil_salts,
        flip_a_bit,
        change_a_token,
    ],
)
def test_a_damaged_file_is_refused_and_leaves_the_engine_as_it_was(
    change: Any, tiny: Tiny, tmp_path: Path
) -> None:
    first, second = tiny.engine(), tiny.engine()
    wanted = answer(first, prompt(40))
    save(first, tmp_path / "file")
    tensors = load_file(tmp_path / "file")
    with safe_open(tmp_path / "file", "pt") as file:
        metadata = file.metadata()
    change(tensors)
    if change not in (flip_a_bit, change_a_token):  # by someone who means it ill
        del tensors["digest"]
        digest = prefixes.digest_of(sorted(tensors.items()))
        tensors["digest"] = torch.tensor(list(digest), dtype=torch.uint8)
    save_file(tensors, tmp_path / "file", metadata)
    with pytest.raises(ValueError):
        load(second, tmp_path / "file")
    assert not second.blocks.contents
    assert said(answer(second, prompt(40))) == said(wanted)


def test_of_a_file_whose_copy_fails_midway_nothing_is_found(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tiny.engine(), tiny.engine()
    answer(second, prompt(30, 5))
    known, wanted = dict(second.blocks.contents), answer(first, prompt(40))
    save(first, tmp_path / "file")
    adopt = prefixes.adopt
    with monkeypatch.context() as patch, pytest.raises(IndexError):
        patch.setattr(prefixes, "adopt", lambda *given: {**adopt(*given), 1 << 20: 0})  # of no such block
        load(second, tmp_path / "file")
    assert second.blocks.contents == known
    found = answer(second, prompt(40))
    assert found.num_cached_tokens == 0 and said(found) == said(wanted)


def test_prefixes_of_other_kernels_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.engine()
    answer(engine, prompt(40))
    save(engine, tmp_path / "file")
    monkeypatch.setattr(prefixes, "build", lambda: "another")
    with pytest.raises(ValueError, match=": build is"):
        load(tiny.engine(), tmp_path / "file")


def test_prefixes_for_a_folder_that_is_not_there_are_an_error_that_names_it(
    tiny: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "none" / "prefixes"
    with pytest.raises(FileNotFoundError, match=f"^{path}: there is no folder {path.parent}$"):
        save(tiny.engine(), path)


def test_prefixes_that_cannot_be_written_are_an_error_of_the_system(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"^{tmp_path / 'file'}: cannot be written: No space left"):
        save(tiny.engine(), tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_is_not_replaced_by_one(tiny: Tiny, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=f"^{tmp_path / 'pipe'}: cannot be written: it is no file"):
        save(tiny.engine(), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_pipe_is_refused_and_not_waited_for(tiny: Tiny, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"^{tmp_path / 'pipe'}: it is no file"):
        tiny.engine().load_prefixes(tmp_path / "pipe")


def test_what_is_written_is_on_the_disk_and_kept_from_others_until_it_has_its_name(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def look(number: int) -> None:
        remove_abandoned(tmp_path / "file")  # as another writer would
        found.append(([path.suffix for path in tmp_path.iterdir()], os.fstat(number).st_size))

    monkeypatch.setattr(os, "fsync", look)
    save(tiny.engine(), tmp_path / "file")
    assert found == [([".partial"], (tmp_path / "file").stat().st_size)]


def test_a_file_that_is_none_of_ours_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "tensors")
    for name in ("text", "tensors", "missing"):
        with pytest.raises((ValueError, OSError)):
            load(tiny.engine(), tmp_path / name)
