"""Which device a model is loaded on, what of its memory is for keys, and what is said when that is short."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from engines import Tiny

import infinicore
from infinilm import EngineConfig
from infinilm.engine import memory
from infinilm.engine.memory import SHARES, free_bytes, share_of, told_of_memory
from infinilm.startup import chosen_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpu_is_taken_if_there_is_one_and_nothing_else_is_said(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for device in (None, "auto"):
        assert chosen_device(EngineConfig(device=device)) == ("cuda" if has_gpu else "cpu")
    for device in ("cpu", "cuda:1", GPU):
        assert chosen_device(EngineConfig(device=device)) == device
    assert chosen_device(EngineConfig(activations="int8")) == "cpu"


def test_a_share_of_what_is_free_is_for_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < share_of(CPU) < free_bytes(CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7000, 10000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1500)
    assert free_bytes(GPU) == 8000
    assert share_of(GPU) == SHARES["cuda"] * 8000


def test_a_gpu_that_is_too_small_is_told_of_in_one_line_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**8, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 23 * 10**9)
    numbers = "of its 24,000 MB this process has taken 23,000, and 300 are free"
    wanted = f"the weights do not fit on cuda:0: {numbers}; take .*"
    with pytest.raises(MemoryError, match=wanted) as found, told_of_memory("the weights", GPU):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tightest", ["", "outer", "outer/inner", "elsewhere"])
def test_what_is_free_is_the_least_of_the_own_group_and_those_around_it(
    version: int, tightest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path if version == 2 else tmp_path / "memory"
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for group in ("", "outer", "outer/inner", "elsewhere"):
        (root / group).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (500 if group == tightest else 900, 100), strict=True):
            (root / group / name).write_text(f"{value}\n")
    (root / "outer" / "inner" / "unlimited").mkdir()
    (root / "outer" / "inner" / "unlimited" / names[0]).write_text("max\n")
    line = "0::" if version == 2 else "4:cpu,memory:"
    (tmp_path / "own").write_text(f"7:pids:/\n{line}/outer/inner/unlimited\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    assert free_bytes(CPU) == (800 if tightest == "elsewhere" else 400)


def test_without_any_limit_all_that_the_machine_has_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "none")
    monkeypatch.setattr(memory, "free_of_machine", lambda: 700)
    assert free_bytes(CPU) == 700


def test_what_is_free_is_no_more_than_may_still_be_mapped() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + 10**8, limits[1]))
        assert 0 < free_bytes(CPU) <= 10**8
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_a_cpu_without_the_memory_is_told_of_in_one_line_and_other_errors_stay() -> None:
    wanted = r"the weights do not fit in memory, of which [\d,]+ MB are free; take .*"
    with pytest.raises(MemoryError, match=wanted) as found, told_of_memory("the weights", CPU):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "\n" not in str(found.value)
    with pytest.raises(RuntimeError, match="shapes"), told_of_memory("the weights", CPU):
        torch.empty(2, 3) @ torch.empty(2, 3)


def test_an_engine_that_is_to_be_deterministic_says_so_to_all_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infinicore, "deterministic", False)
    tiny = Tiny.at(tmp_path)
    tiny.engine()
    assert not infinicore.deterministic
    tiny.engine(deterministic=True)
    assert infinicore.deterministic
    with pytest.raises(ValueError, match="deterministic"):
        tiny.engine(deterministic="yes")
