"""Encodings: the last state of a prompt, read as a request like others, with the same bits in any company."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from engines import (
    HIDDEN,
    MAX_LENGTH,
    PLACED,
    VOCAB_SIZE,
    Tiny,
    check_blocks,
    check_idle,
    finish,
    is_same,
    preempt_one,
    prompt,
    random_params,
    random_prompt,
    said,
    write_model,
)
from patience import until, within_patience
from torch import Tensor

from infinilm import LLM, AsyncLLM, EngineConfig, RequestError, SamplingParams, load_model, runner
from infinilm.engine.engine import Engine
from infinilm.engine.request import Aborted, NumericalError, Request
from infinilm.models.llama import LlamaForCausalLM
from infinilm.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


@pytest.fixture
def llm(tiny: Tiny) -> Iterator[AsyncLLM]:
    made = AsyncLLM(tiny.folder, kv_cache_memory="32MB", block_size=16, **PLACED)
    yield made
    made.shutdown()


def alone(tiny: Tiny, token_ids: Sequence[int]) -> Tensor:
    """The state of the last of so many tokens, without an engine"""
    with torch.inference_mode():
        states: Tensor = tiny.model.model(torch.tensor([token_ids], device=tiny.model.device))
    return states[0, -1].cpu()


def test_the_state_is_that_of_transformers(tmp_path: Path) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 120, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    oracle = transformers.LlamaForCausalLM(config).eval()
    oracle.save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(99)}, "w0"))
    engine = Engine(
        LlamaForCausalLM.from_pretrained(tmp_path),
        Tokenizer(words, {}, (), None),
        EngineConfig(kv_cache_memory="1MB", max_num_batched_tokens=16),
    )
    for ids in ([5], list(range(40)), list(range(40, 80))):
        request = engine.make_encoding(ids)
        finish(engine, request)
        with torch.inference_mode():
            wanted = oracle.model(torch.tensor([ids])).last_hidden_state[0, -1]
        torch.testing.assert_close(request.state(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recorded_at", [1, 1 << 60], ids=["recorded", "plain"])
def test_a_state_has_the_same_bits_in_any_company_and_disturbs_nobody(
    recorded_at: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RECORDED_AT", recorded_at)
    rng = random.Random(3)
    engine = tiny.engine(num_blocks=24, max_num_batched_tokens=48)
    given = [(random_prompt(rng, 120), random_params(rng, 12), rng.randint(0, 12)) for _ in range(32)]
    requests: list[Request] = []
    for i, (ids, params, _) in enumerate(given):
        requests.append(engine.make_encoding(ids) if i % 2 else engine.make(ids, params))
    for step in range(100_000):
        for request, (_, _, arrival) in zip(requests, given, strict=True):
            if arrival == step:
                engine.enqueue(request)
        if step > 12 and not engine.has_work:
            break
        if step % 3 == 0:
            preempt_one(engine, rng)
        engine.step()
        check_blocks(engine)
    check_idle(engine)
    assert sum(r.metrics.num_preemptions for r in requests[1::2]) and sum(
        r.num_cached_tokens for r in requests[1::2]
    )
    for i, (request, (ids, params, _)) in enumerate(zip(requests, given, strict=True)):
        if i % 2:
            assert is_same(request.state(), alone(tiny, ids))
        else:
            single = tiny.engine()
            (wanted,) = finish(single, single.make(ids, params))
            assert said(request.output()) == said(wanted)


def test_a_prompt_may_fill_the_whole_length_and_not_more(tiny: Tiny) -> None:
    engine = tiny.engine()
    request = engine.make_encoding(prompt(MAX_LENGTH))
    finish(engine, request)
    assert is_same(request.state(), alone(tiny, prompt(MAX_LENGTH)))
    with pytest.raises(RequestError, match=f"{MAX_LENGTH} are the most"):
        engine.make_encoding(prompt(MAX_LENGTH + 1))


def test_a_state_that_is_no_number_fails_its_request_alone(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=32)
    spoilt, other = engine.make_encoding(prompt(60)), engine.make_encoding(prompt(40, 1))
    engine.enqueue(spoilt)
    engine.step()
    for keys, values in engine.cache.layers:
        keys[spoilt.completions[0].block_ids] = values[spoilt.completions[0].block_ids] = torch.nan
    finish(engine, other)
    assert isinstance(spoilt.error, NumericalError)
    assert is_same(other.state(), alone(tiny, prompt(40, 1)))
    check_idle(engine)


def test_embeddings_have_length_one_and_the_order_of_the_prompts(tiny: Tiny) -> None:
    llm = LLM(tiny.folder, kv_cache_memory="4MB", **PLACED)
    given = [prompt(5 + i, i) for i in range(6)]
    outputs = llm.embed([*given, given[0]], use_tqdm=False)
    for ids, output in zip([*given, given[0]], outputs, strict=True):
        wanted = torch.nn.functional.normalize(alone(tiny, ids), dim=0)
        assert output.prompt_token_ids == ids and output.finished
        assert is_same(torch.tensor(output.outputs.embedding), wanted)
        assert sum(x * x for x in output.outputs.embedding) == pytest.approx(1.0)
    assert [output.prompt_token_ids for output in llm.embed("abc")] == [llm.tokenizer.encode("abc")]


@pytest.mark.parametrize("given", ["", [], [[]], 5, {"text": "a"}], ids=repr)
def test_what_cannot_be_embedded_is_a_request_error(given: Any, tiny: Tiny) -> None:
    llm = LLM(tiny.folder, kv_cache_memory="4MB", **PLACED)
    if given == []:
        assert llm.embed(given) == []
        return
    with pytest.raises(RequestError):
        llm.embed(given)


def test_coroutines_get_states_beside_answers_and_logits_of_them(llm: AsyncLLM, tiny: Tiny) -> None:
    async def mixed() -> tuple[list[Tensor], Tensor, list[int]]:
        async def first_token(i: int) -> int:
            outputs = [
                output async for output in llm.generate(prompt(20, i), SamplingParams(temperature=0.0))
            ]
            return outputs[-1].outputs[0].token_ids[0]

        states = asyncio.gather(*(llm.encode(prompt(20, i), priority=i % 2) for i in range(8)))
        tokens = asyncio.gather(*map(first_token, range(8)))
        return await states, await llm.logits(torch.stack(await states)), list(await tokens)

    states, logits, tokens = within_patience(mixed())
    assert all(is_same(state, alone(tiny, prompt(20, i))) for i, state in enumerate(states))
    assert states[0].shape == (HIDDEN,) and states[0].dtype == torch.float32
    assert logits.shape == (8, VOCAB_SIZE) and logits.argmax(1).tolist() == tokens
    check_idle(llm.engine)


def test_a_coroutine_may_have_its_prompt_cut(llm: AsyncLLM, tiny: Tiny) -> None:
    state = within_patience(llm.encode(prompt(MAX_LENGTH + 5), truncate_prompt_tokens=30))
    assert is_same(state, alone(tiny, prompt(MAX_LENGTH + 5)[:30]))


def test_logits_of_half_precision_are_those_that_tokens_are_drawn_from(tmp_path: Path) -> None:
    llm = AsyncLLM(write_model(tmp_path), kv_cache_memory="4MB", device="cpu", dtype="bfloat16")
    model, _ = load_model(tmp_path, device="cpu", dtype="bfloat16")
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt(20)]))[0, -1].float()

    async def logits() -> Tensor:
        return await llm.logits(await llm.encode(prompt(20)))

    assert torch.equal(within_patience(logits()), wanted)
    llm.shutdown()


@pytest.mark.parametrize("given", [None, torch.zeros(3), torch.tensor(1.0), torch.zeros(2, HIDDEN + 1)])
def test_logits_of_what_is_no_state_are_a_request_error(given: Any, llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match=f"states .*{HIDDEN}"):
        within_patience(llm.logits(given))


def test_an_encoding_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    long_folder = write_model(tmp_path, max_position_embeddings=100_000)
    llm = AsyncLLM(long_folder, kv_cache_memory="32MB", max_num_seqs=1)

    async def given_up() -> None:
        answers = llm.generate(prompt(5), ENDLESS, "long")
        await anext(answers)
        waiting = asyncio.create_task(llm.encode(prompt(30), "a"))
        aborted = asyncio.create_task(llm.encode(prompt(30), "b"))
        await until(lambda: {"a", "b"} <= llm.engine.requests.keys())
        waiting.cancel()
        await llm.abort("b")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(Aborted, match="request b was aborted"):
            await aborted
        await llm.abort("long")
        await until(lambda: not llm.engine.has_work)

    within_patience(given_up())
    check_idle(llm.engine)
    llm.shutdown()
