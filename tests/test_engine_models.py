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
    check_against,
    check_idle,
    finish,
    generated,
    prompt,
    random_jobs,
    run,
    write_model,
)
from test_models import MODELS

from infinilm import EngineConfig, RequestOutput, load_model
from infinilm.engine.engine import Engine
from infinilm.models.llama import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("record_at_once")

KINDS = [
    "deepseek2",
    "deepseek3",
    "erniemoe",
    "glm4moe, norms",
    "dots",
    "ministral3",
    "phi3, window",
    "phi4-mini",
    "olmo2",
    "olmo3",
    "glm4",
    "exaone4, windows",
    "smollm3",
    "gemma2",
    "gemma3",
    "granite",
    "granitemoe",
    "hunyuan",
    "qwen3moe",
    "gptoss",
]
MAX_LENGTH = 60


def tiny_of(make: Any, folder: Path, kind: str, **options: Any) -> Tiny:
    """A model of this kind that has the vocabulary of the tiny model's tokenizer"""
    _, saved = make(kind, **{**options, "vocab_size": VOCAB_SIZE})
    _, tokenizer = load_model(write_model(folder / "words"))
    return Tiny(saved, LlamaForCausalLM.from_pretrained(saved), tokenizer)


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
    tiny = tiny_of(make, tmp_path, kind, **options)
    jobs = random_jobs(random.Random(7), 12, 40, 16, arrive_within=15)
    wanted = [alone(tiny, job) for job in jobs]
    for is_ahead in (False, True):
        engine = engine_of(tiny, 16, is_ahead)
        requests = run(engine, jobs, 3, random.Random(8))
        check_idle(engine)
        assert any(request.metrics.num_preemptions for request in requests)
        check_against(wanted, jobs, requests)


def alone(tiny: Tiny, job: Job) -> RequestOutput:
    engine = engine_of(tiny, 40)
    (output,) = finish(engine, engine.make(job.prompt, job.params))
    return output


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_says_what_generate_says_and_records_it(name: str, make: Any, tmp_path: Path) -> None:
    kind, options = MODELS[name]
    tiny = tiny_of(make, tmp_path, kind, **options)
    engine = engine_of(tiny, 16)
    output = generated(engine, prompt(24), max_tokens=30)
    assert output.outputs[0].token_ids == tiny.model.generate([prompt(24)], 30)[0, 24:].tolist()
    assert engine.runner.obstacle == ""


def test_what_keeps_a_step_from_being_recorded_is_known_and_changes_no_token(
    make: Any, tmp_path: Path
) -> None:
    tiny = tiny_of(make, tmp_path, "Llama")
    plain, logits = engine_of(tiny, 16), tiny.model.logits
    wanted = generated(plain, prompt(9), max_tokens=12).outputs[0].token_ids
    assert plain.runner.obstacle == ""
    tiny.model.logits = lambda states: logits(states) * 1.0  # by torch, which no recording has
    engine = engine_of(tiny, 16)
    assert generated(engine, prompt(9), max_tokens=12).outputs[0].token_ids == wanted
    assert "mul" in engine.runner.obstacle and "replay would leave it out" in engine.runner.obstacle
    assert not engine.runner.recordings


def test_a_step_too_large_to_be_recorded_leaves_smaller_ones_their_recordings(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_of(make, tmp_path, "Llama")
    engine, step = engine_of(tiny, 16), tiny.model.step
    wanted = generated(engine, prompt(9), max_tokens=12).outputs[0].token_ids

    def few(batch: Any, *rest: Any) -> Any:
        """As on a GPU where many tokens are dealt to experts"""
        states, logits = step(batch, *rest)
        return states, logits if len(batch.token_ids) < 9 else logits * 1.0

    monkeypatch.setattr(tiny.model, "step", few)
    engine = engine_of(tiny, 16)
    assert generated(engine, prompt(9), max_tokens=12).outputs[0].token_ids == wanted
    assert engine.runner.obstacle and engine.runner.refused_from == 9
    assert list(engine.runner.recordings) == [(1, 1)]
