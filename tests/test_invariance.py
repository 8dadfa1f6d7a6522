"""A stream's logits are the same bits alone, in any batch, its prompt cut anyhow, on any threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import infinicore
from infinilm import DynamicCache, cache
from infinilm.generation import DecodeStep
from infinilm.models.llama import LlamaForCausalLM

LENGTH = 40


@pytest.fixture(scope="module", params=["float32", "int16", "int8"])
def model(default_model_path: Path, request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(default_model_path, activations=request.param)


def prompt(stream: int = 0) -> Tensor:
    return torch.randint(0, 49152, (1, LENGTH), generator=torch.Generator().manual_seed(stream))


def all_logits(model: LlamaForCausalLM, token_ids: Tensor, *chunks: int) -> Tensor:
    """Logits of every position, the prompt fed in chunks of these sizes and then whole"""
    held, parts, start = DynamicCache(), [], 0
    for size in (*chunks, token_ids.shape[1] - sum(chunks)):
        part = token_ids[:, start : start + size]
        parts.append(model(part, past_key_values=held, logits_to_keep=0))
        start += size
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def test_logits_do_not_depend_on_the_batch(model: LlamaForCausalLM) -> None:
    alone = all_logits(model, prompt())
    for batch_size in (2, 5, 17):
        batch = torch.cat([prompt(i) for i in range(1, batch_size)] + [prompt(0)])
        assert torch.equal(all_logits(model, batch)[-1:], alone)


@torch.inference_mode()
def test_logits_do_not_depend_on_how_the_prompt_is_cut(model: LlamaForCausalLM) -> None:
    whole = all_logits(model, prompt())
    for chunks in ((1,), (7, 16, 3), (39,), (1,) * 39):
        assert torch.equal(all_logits(model, prompt(), *chunks), whole)


@torch.inference_mode()
def test_logits_do_not_depend_on_how_attention_is_cut(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.cat([prompt(0), prompt(1)])
    whole = all_logits(model, batch)
    monkeypatch.setattr(cache, "CALL_WORK", 1)  # 16 tokens a call, the least there is
    assert torch.equal(all_logits(model, batch), whole)


@torch.inference_mode()
def test_logits_do_not_depend_on_the_threads(model: LlamaForCausalLM) -> None:
    before = infinicore.get_num_threads()
    results = []
    for count in (1, 2, 3):
        infinicore.set_num_threads(count)
        results.append(all_logits(model, prompt()))
    infinicore.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@torch.inference_mode()
def test_replayed_decoding_gives_the_bits_of_a_prefill(model: LlamaForCausalLM) -> None:
    whole = all_logits(model, prompt())
    for batch_size in (1, 3):
        batch = prompt().expand(batch_size, LENGTH).contiguous()
        step = after_prompt(model, batch[:, :20])
        for i in range(20, LENGTH):
            logits = step(batch[:, i].tolist())
            assert torch.equal(logits[-1], whole[0, i])
        assert step.graph is not None


@torch.inference_mode()
def test_recordings_made_anew_as_cache_and_rope_tables_grow_give_the_bits_of_plain_steps(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "GROWTH", 16)
    batch = torch.cat([prompt(0), prompt(1)])
    plain, recorded = (after_prompt(model, batch) for _ in range(2))
    plain.can_record = False
    monkeypatch.setattr(model.model.rope_instance, "max_seq_len", 70)  # as if tables ended there
    graphs = []
    for i in range(48):
        tokens = [i, 1000 + i]
        assert all(map(torch.equal, recorded(tokens), plain(tokens)))
        if recorded.graph not in graphs:
            graphs.append(recorded.graph)
    assert len(graphs) == 4  # the first, two as the cache grew, one for the tables


def after_prompt(model: LlamaForCausalLM, token_ids: Tensor) -> DecodeStep:
    held = DynamicCache()
    model(token_ids, past_key_values=held)
    return DecodeStep(model, held)
