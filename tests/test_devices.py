"""Which device a model is loaded on, what of its memory is for keys, and what is said when that is short."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from engines import DEVICE, Tiny, said
from loras import adapter

import infinicore
from infinicore import control_groups
from infinilm import LLM, AsyncLLM, DynamicCache, EngineConfig, SamplingParams, StructuredOutputsParams
from infinilm.engine import memory
from infinilm.engine.memory import SHARES, free_bytes, share_of, told_of_memory
from infinilm.models.llama import LlamaForCausalLM
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
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    assert free_bytes(CPU) == (800 if tightest == "elsewhere" else 400)


def test_without_any_limit_all_that_the_machine_has_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "none")
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


# ---- torch's default device, which is for what callers make themselves -------------------------------------

ELSEWHERE = torch.device("meta")  # where nothing can be computed
TEXTS = ["abc" * 12, "de"]
ASKED: dict[str, dict[str, Any]] = {
    "draws": {"n": 2, "top_p": 0.9, "top_k": 40},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "biases": {"logit_bias": {40: 3.0}, "bad_words": ["x", "yz"], "min_tokens": 4},
    "some tokens": {"allowed_token_ids": range(20, 120)},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "a structure": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,8}")},
}


def made(folder: Path, **options: Any) -> LLM:
    return LLM(folder, kv_cache_memory="4MB", max_model_len=256, device=DEVICE, **options)


def answers(llm: LLM, **params: Any) -> list[Any]:
    drawn = SamplingParams(**{"seed": 3, "max_tokens": 8, **params})
    return [said(output) for output in llm.generate(TEXTS, drawn)]


@pytest.mark.parametrize("params", ASKED.values(), ids=ASKED)
def test_requests_do_not_depend_on_the_default_device(params: dict[str, Any], folder: Path, llm: LLM) -> None:
    wanted = answers(llm, **params)
    with ELSEWHERE:
        assert answers(made(folder), **params) == wanted


@pytest.mark.parametrize("guesser", ["ngram", "model"])
def test_guesses_do_not_depend_on_the_default_device(guesser: str, folder: Path, llm: LLM) -> None:
    wanted = answers(llm, temperature=0.0, max_tokens=40)
    how = {"method": "ngram"} if guesser == "ngram" else {"model": str(folder)}
    with ELSEWHERE:
        guessing = made(folder, speculative_config={**how, "num_speculative_tokens": 3})
        assert answers(guessing, temperature=0.0, max_tokens=40) == wanted


def test_adapters_do_not_depend_on_the_default_device(folder: Path, llm: LLM, tmp_path: Path) -> None:
    poet = adapter(tmp_path / "poet", llm.engine.model)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    wanted = [said(output) for output in llm.generate(TEXTS, params, lora_request=[poet, None])]
    with ELSEWHERE:
        found = made(folder).generate(TEXTS, params, lora_request=[poet, None])
    assert [said(output) for output in found] == wanted


def test_prefixes_are_kept_and_found_whatever_the_default_device_is(folder: Path, tmp_path: Path) -> None:
    with ELSEWHERE:
        before, after = made(folder), made(folder)
        answers(before)
        assert 0 < before.save_prefixes(tmp_path / "kept") == after.load_prefixes(tmp_path / "kept")
        (output, _) = after.generate(TEXTS, SamplingParams(max_tokens=1))
    assert output.num_cached_tokens == 32


def test_embeddings_do_not_depend_on_the_default_device(folder: Path, llm: LLM) -> None:
    wanted = [output.outputs.embedding for output in llm.embed(TEXTS)]
    with ELSEWHERE:
        assert [output.outputs.embedding for output in made(folder).embed(TEXTS)] == wanted


def test_coroutines_do_not_depend_on_the_default_device(folder: Path, llm: LLM) -> None:
    async def last_output() -> Any:
        engine = AsyncLLM(folder, kv_cache_memory="4MB", device=DEVICE)
        (*_, output) = [
            each async for each in engine.generate(TEXTS[0], SamplingParams(seed=3, max_tokens=8))
        ]
        engine.shutdown()
        return said(output)

    wanted, _ = answers(llm)
    with ELSEWHERE:
        assert asyncio.run(last_output()) == wanted


def logits_and_tokens(path: Path) -> list[Any]:
    """By a model without an engine: of a prompt, of the token after it, and what it generates"""
    model, cache = LlamaForCausalLM.from_pretrained(path), DynamicCache()
    ids = torch.tensor([[1, 5, 6], [7, 8, 9]], device="cpu")
    logits = [model(ids, past_key_values=cache), model(ids[:, :1], past_key_values=cache)]
    masked = model.generate(ids, max_new_tokens=4, attention_mask=[[0, 1, 1], [1, 1, 1]])
    return [t.tolist() for t in (*logits, masked, model.generate([[5, 6], [7]], max_new_tokens=4))]


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_model_does_not_depend_on_the_default_device(is_gguf: bool, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf" if is_gguf else folder
    if is_gguf:
        path.write_bytes(gguf_files.whole_file().encode())
    wanted = logits_and_tokens(path)
    with ELSEWHERE:
        assert logits_and_tokens(path) == wanted
