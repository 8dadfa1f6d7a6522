"""Nothing depends on company in any model: those with windows, with other rotations, with experts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import (
    VOCAB_SIZE,
    Job,
    Tiny,
    check_idle,
    finish,
    generated,
    is_beginning,
    prompt,
    random_jobs,
    run,
    said,
    write_model,
)
from parity import make
from test_models import MODELS

from infinilm import EngineConfig, RequestOutput, load_model, runner
from infinilm.engine.engine import Engine
from infinilm.models.llama import LlamaForCausalLM

__all__ = ["make"]

KINDS = ["phi3, window", "phi4-mini", "olmo2", "smollm3", "gemma2", "gemma3", "granite", "qwen3moe", "gptoss"]
MAX_LENGTH = 60


@pytest.fixture(autouse=True)
def record_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RECORDED_AT", 1)


def engine_of(tiny: Tiny, num_blocks: int, is_ahead: bool = False) -> Engine:
    config = EngineConfig(kv_cache_memory=1 << 30, max_num_seqs=8, max_model_len=MAX_LENGTH)
    block_bytes = Engine(tiny.model, tiny.tokenizer, config).cache.shape.num_bytes
    memory = num_blocks * block_bytes * tiny.model.config.num_hidden_layers
    small = replace(config, kv_cache_memory=memory, max_num_batched_tokens=24)
    engine = Engine(tiny.model, tiny.tokenizer, small)
    engine.runner.is_ahead = is_ahead
    engine.scheduler.reads_beside &= not is_ahead
    return engine


@pytest.mark.parametrize("name", KINDS)
def test_every_request_of_a_mix_says_what_it_says_alone(
    name: str, make: Any, tmp_path: Path, one_thread: None
) -> None:
    """Whether steps are read at once or run ahead"""
    kind, options = MODELS[name]
    _, folder = make(kind, **{**options, "vocab_size": VOCAB_SIZE})
    _, tokenizer = load_model(write_model(tmp_path / "words"))
    tiny = Tiny(folder, LlamaForCausalLM.from_pretrained(folder), tokenizer)
    jobs = random_jobs(random.Random(7), 12, 40, 16, arrive_within=15)
    wanted = [alone(tiny, job) for job in jobs]
    for is_ahead in (False, True):
        engine = engine_of(tiny, 16, is_ahead)
        requests = run(engine, jobs, 3, random.Random(8))
        check_idle(engine)
        assert any(request.metrics.num_preemptions for request in requests)
        for job, request, whole in zip(jobs, requests, wanted, strict=True):
            check(job, request.output(), whole)


def alone(tiny: Tiny, job: Job) -> RequestOutput:
    engine = engine_of(tiny, 40)
    (output,) = finish(engine, engine.make(job.prompt, job.params))
    return output


def check(job: Job, output: RequestOutput, wanted: RequestOutput) -> None:
    if any(completion.finish_reason == "abort" for completion in output.outputs):
        assert job.end is not None and is_beginning(output, wanted)
    else:
        assert said(output) == said(wanted)


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_says_what_generate_says_and_records_it(name: str, make: Any, tmp_path: Path) -> None:
    kind, options = MODELS[name]
    _, folder = make(kind, **{**options, "vocab_size": VOCAB_SIZE})
    _, tokenizer = load_model(write_model(tmp_path / "words"))
    model = LlamaForCausalLM.from_pretrained(folder)
    engine = engine_of(Tiny(folder, model, tokenizer), 16)
    output = generated(engine, prompt(24), max_tokens=30)
    assert output.outputs[0].token_ids == model.generate([prompt(24)], 30)[0, 24:].tolist()
    assert engine.runner.obstacle == ""


def test_what_keeps_a_step_from_being_recorded_is_known_and_changes_no_token(
    make: Any, tmp_path: Path
) -> None:
    _, folder = make("Llama", vocab_size=VOCAB_SIZE)
    _, tokenizer = load_model(write_model(tmp_path / "words"))
    model = LlamaForCausalLM.from_pretrained(folder)
    plain, logits = engine_of(Tiny(folder, model, tokenizer), 16), model.logits
    wanted = generated(plain, prompt(9), max_tokens=12).outputs[0].token_ids
    assert plain.runner.obstacle == ""
    model.logits = lambda states: logits(states) * 1.0  # by torch, which no recording has
    engine = engine_of(Tiny(folder, model, tokenizer), 16)
    assert generated(engine, prompt(9), max_tokens=12).outputs[0].token_ids == wanted
    assert "mul" in engine.runner.obstacle and "replay would leave it out" in engine.runner.obstacle
    assert not engine.runner._recordings


def test_a_step_too_large_to_be_recorded_leaves_smaller_ones_their_recordings(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = make("Llama", vocab_size=VOCAB_SIZE)
    _, tokenizer = load_model(write_model(tmp_path / "words"))
    model = LlamaForCausalLM.from_pretrained(folder)
    engine, step = engine_of(Tiny(folder, model, tokenizer), 16), model.step
    wanted = generated(engine, prompt(9), max_tokens=12).outputs[0].token_ids

    def few(batch: Any, *rest: Any) -> Any:
        """As on a GPU where many tokens are dealt to experts"""
        states, logits = step(batch, *rest)
        return states, logits if len(batch.token_ids) < 9 else logits * 1.0

    monkeypatch.setattr(model, "step", few)
    engine = engine_of(Tiny(folder, model, tokenizer), 16)
    assert generated(engine, prompt(9), max_tokens=12).outputs[0].token_ids == wanted
    assert engine.runner.obstacle and engine.runner.refused_from == 9
    assert list(engine.runner._recordings) == [(1, 1)]
