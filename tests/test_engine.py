"""A request's output is the same bits alone and in any company, and the engine keeps its blocks in order."""

from __future__ import annotations

import gc
import math
import random
import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
import torch
from engines import (
    DEVICE,
    MAX_LENGTH,
    VOCAB_SIZE,
    Job,
    Tiny,
    alone,
    check_against,
    check_blocks,
    check_idle,
    check_outputs,
    check_requests,
    finish,
    generated,
    interrupted,
    prompt,
    random_jobs,
    random_params,
    random_prompt,
    run,
    said,
)
from gguf_files import llama_weights, write_folder

import infinicore
from infinilm import (
    EngineConfig,
    QueueFull,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    load_model,
)
from infinilm.batch import Stream
from infinilm.draw import Row, Settings, adjusted, uniform
from infinilm.engine.engine import Engine
from infinilm.engine.pace import Pace
from infinilm.engine.request import Request
from infinilm.engine.stats import Progress
from infinilm.models.llama import LlamaForCausalLM
from infinilm.parcels import Parcel
from infinilm.tables import Tables
from infinilm.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "record_at_once")

ROUNDED = pytest.mark.skipif(
    DEVICE != "cpu", reason="on a GPU numbers are rounded by the company they are in"
)
SHARED = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU prompts and answers share a step")
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=12, seed=7, logprobs=2)


# ---- the same bits in any company --------------------------------------------------------------------------


@pytest.mark.parametrize("seed, max_num_batched_tokens", list(enumerate([1, 5, 16, 33, 128, 512])))
def test_every_request_of_a_mix_says_what_it_says_alone(
    seed: int, max_num_batched_tokens: int, tiny: Tiny
) -> None:
    """Whether or not beginnings are found in the cache"""
    jobs = random_jobs(random.Random(seed), 14, min(8 * max_num_batched_tokens, 300), 8, arrive_within=15)
    wanted = [alone(tiny, job) for job in jobs]
    for enable_prefix_caching in (True, False):
        engine = tiny.engine(
            num_blocks=24,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        requests = run(engine, jobs, 3, random.Random(seed))
        check_idle(engine)
        assert any(request.metrics.num_preemptions for request in requests)
        check_against(wanted, jobs, requests)


def test_every_request_of_a_mix_says_the_same_where_prompts_are_read_a_layer_a_step(tiny: Tiny) -> None:
    rng = random.Random(17)
    jobs = random_jobs(rng, 14, 300, 8, arrive_within=15)
    engine = hurried(tiny.engine(num_blocks=24))
    requests = run(engine, jobs, 3, rng)
    check_idle(engine)
    check_outputs(tiny, jobs, requests)


def test_prompts_of_up_to_two_thousand_tokens_say_the_same_in_a_mix_as_alone(
    tmp_path: Path, one_thread: None
) -> None:
    tiny, rng = Tiny.at(tmp_path, max_position_embeddings=2048), random.Random(21)
    options = {"num_blocks": 160, "max_model_len": 2048, "max_num_batched_tokens": 512}
    jobs = random_jobs(rng, 12, 2000, 8, arrive_within=15)
    assert max(len(job.prompt) for job in jobs) > 1500
    requests = run(tiny.engine(**options), jobs, 3, rng)
    assert any(request.metrics.num_preemptions for request in requests)
    check_outputs(tiny, jobs, requests, **options)


def test_replayed_steps_draw_by_the_settings_of_each_stream(tiny: Tiny) -> None:
    """Nothing here needs logits to be changed first, so that tokens are drawn within the recordings."""
    rng = random.Random(11)
    jobs = [
        Job(
            random_prompt(rng, 60),
            SamplingParams(
                temperature=rng.choice([0.0, 0.5, 2.0]),
                top_p=rng.choice([0.5, 1.0]),
                top_k=rng.choice([0, 5]),
                min_p=rng.choice([0.0, 0.1]),
                seed=i,
                n=rng.randint(1, 2),
                max_tokens=rng.randint(2, 20),
            ),
            arrival=rng.randint(0, 20),
        )
        for i in range(24)
    ]
    engine = tiny.engine(num_blocks=40)
    requests = run(engine, jobs, 3, rng)
    assert len(engine.runner.recordings) >= 3
    check_outputs(tiny, jobs, requests)


def test_an_engine_made_in_inference_mode_runs_in_and_out_of_it(tiny: Tiny) -> None:
    rng = random.Random(12)
    jobs = random_jobs(rng, 8, 60, 12, arrive_within=4)
    with torch.inference_mode():
        engine = tiny.engine(is_ahead=DEVICE != "cpu")
        inside = run(engine, jobs, 3, rng)
    check_outputs(tiny, jobs, inside)
    check_outputs(tiny, jobs, run(engine, jobs, 3, rng))


def test_hooks_see_and_change_steps_that_were_recorded_before_and_are_gone_with_their_end(tiny: Tiny) -> None:
    engine, steps = tiny.engine(enable_prefix_caching=False), []
    plain = generated(engine, prompt(9), max_tokens=12)

    def doubled(_: Any, inputs: Any, states: torch.Tensor) -> torch.Tensor:
        steps.append(len(states))
        return 2 * states

    hook = tiny.model.model.layers[0].register_forward_hook(doubled)
    try:
        changed = generated(engine, prompt(9), max_tokens=12)
        assert steps == [9, *[1] * 11]
        assert said(changed) == said(generated(tiny.engine(), prompt(9), max_tokens=12)) != said(plain)
    finally:
        hook.remove()
    steps.clear()
    assert said(generated(engine, prompt(9), max_tokens=12)) == said(plain) and not steps
    assert engine.runner.obstacle == ""


@pytest.mark.parametrize("part", ["model.layers.0", "model.layers.1.mlp.down_proj", "lm_head"])
def test_a_layer_put_in_the_place_of_one_that_was_recorded_counts_after_a_reset(
    part: str, tmp_path: Path
) -> None:
    tiny, other = Tiny.at(tmp_path / "one"), Tiny.at(tmp_path / "other", seed=6)
    engine = tiny.engine()
    plain = generated(engine, prompt(9), max_tokens=12)
    tiny.model.set_submodule(part, other.model.get_submodule(part))
    assert engine.reset_prefix_cache()
    changed = generated(engine, prompt(9), max_tokens=12)
    assert said(changed) == said(generated(tiny.engine(), prompt(9), max_tokens=12)) != said(plain)


def test_hooks_and_layers_of_a_model_that_guesses_count_as_those_of_one_that_answers(
    tiny: Tiny, tmp_path: Path
) -> None:
    draft, steps = Tiny.at(tmp_path), []
    config = {"num_speculative_tokens": 2, "model": "its like"}
    engine = tiny.engine(draft=draft, speculative_config=config, enable_prefix_caching=False)

    def num_accepted() -> int:
        before = engine.counts.accepted_tokens
        generated(engine, prompt(9), max_tokens=12)
        return engine.counts.accepted_tokens - before

    assert num_accepted() == num_accepted() > 6
    hook = draft.model.model.layers[0].register_forward_hook(lambda *call: steps.append(call))
    assert num_accepted() > 6 and steps
    hook.remove()
    num_accepted()
    draft.model.lm_head = torch.nn.Sequential(draft.model.lm_head, torch.nn.Threshold(1e9, 0.0))
    assert engine.reset_prefix_cache()
    assert num_accepted() == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU steps of any prompt are recorded")
def test_full_steps_of_long_prompts_are_recorded_and_give_the_same_bits(tiny: Tiny) -> None:
    rng, params = random.Random(6), SamplingParams(temperature=0.0, max_tokens=2, logprobs=2)
    engine = tiny.engine(num_blocks=60, max_num_batched_tokens=96)
    jobs = [
        Job([rng.randrange(3, 30) for _ in range(96 * (1 + i) + 7)], params, arrival=9 * i) for i in range(3)
    ]
    requests = run(engine, jobs)
    assert {(96, 0), (1, 1)} <= set(engine.runner.recordings) and (96, 1) not in engine.runner.recordings
    check_outputs(tiny, jobs, requests)
    assert said(generated(engine, jobs[0].prompt[:96])) == said(generated(tiny.engine(), jobs[0].prompt[:96]))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU torch has an arena of its own")
def test_prompts_that_are_too_long_to_be_recorded_take_no_more_memory_each_time(tiny: Tiny) -> None:
    engine, rng, sizes = tiny.engine(num_blocks=40), random.Random(5), []
    for _ in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=2)
        jobs = [Job([rng.randrange(3, 30) for _ in range(100)], params)]
        check_outputs(tiny, jobs, run(engine, jobs))
        sizes.append(engine.runner._arena.num_bytes)
    assert sizes[0] > 0 and len(set(sizes)) == 1


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "q8_0"])
def test_keys_in_few_bits_are_the_same_in_a_mix_as_alone(
    kv_cache_dtype: str, tmp_path: Path, one_thread: None
) -> None:
    tiny, rng = Tiny.at(tmp_path, head_dim=32), random.Random(7)
    jobs = random_jobs(rng, 10, 100, 8, arrive_within=10)
    requests = run(tiny.engine(num_blocks=10, kv_cache_dtype=kv_cache_dtype), jobs, 3, rng)
    check_outputs(tiny, jobs, requests, kv_cache_dtype=kv_cache_dtype)


def test_a_mix_on_several_threads_says_what_each_says_alone_on_one(tiny: Tiny, keep_threads: None) -> None:
    rng = random.Random(12)
    jobs = random_jobs(rng, 6, 200, 5, arrive_within=4)
    infinicore.set_num_threads(3)
    requests = run(tiny.engine(num_blocks=24), jobs, 3, rng)
    infinicore.set_num_threads(1)
    check_outputs(tiny, jobs, requests)


@pytest.mark.parametrize("guesser", ["ngram", "the model itself", "another model"])
def test_guesses_change_nothing_of_what_is_said(
    guesser: str, tiny: Tiny, tmp_path: Path, one_thread: None
) -> None:
    another = {"ngram": None, "the model itself": tiny}
    draft = another[guesser] if guesser in another else Tiny.at(tmp_path, seed=6)
    config = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "model": draft and str(draft.folder)}
    rng = random.Random(8)
    jobs = random_jobs(rng, 16, 120, 30, arrive_within=10)
    engine = tiny.engine(24, draft, speculative_config=config)
    requests = run(engine, jobs, 3, rng)
    check_idle(engine)
    check_outputs(tiny, jobs, requests)


def test_texts_bound_by_a_structure_are_the_same_in_a_mix_as_alone(tiny: Tiny) -> None:
    wanted = [
        StructuredOutputsParams(regex="[a-z]{3,20}!"),
        StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
    ]
    rng = random.Random(9)
    jobs = [
        Job(prompt(5 + 9 * i, i), replace(params, structured_outputs=wanted[i % 3], stop=()), arrival=i)
        for i, params in enumerate(random_params(rng, 20, is_free=True) for _ in range(9))
    ] + random_jobs(rng, 4, 60, 12, arrive_within=8)
    engine = tiny.engine(num_blocks=20)
    requests = run(engine, jobs, 3, rng)
    check_idle(engine)
    check_outputs(tiny, jobs, requests)
    assert {output.text for output in requests[1].output().outputs} <= {"yes", "no", "perhaps"}


def test_a_model_that_cannot_guess_is_refused_with_the_reason(tiny: Tiny) -> None:
    config = {"num_speculative_tokens": 4, "model": "another"}
    headless, other = LlamaForCausalLM(tiny.model.config), replace(tiny.model.config, vocab_size=9)
    headless.lm_head = None
    with pytest.raises(ValueError, match="speculative_config: the model has no head"):
        tiny.engine(draft=replace(tiny, model=headless), speculative_config=config)
    with pytest.raises(ValueError, match=f"the draft model has 9 tokens, but the model {VOCAB_SIZE}"):
        tiny.engine(draft=replace(tiny, model=LlamaForCausalLM(other)), speculative_config=config)


def test_guesses_that_are_right_save_steps(tiny: Tiny) -> None:
    engine = tiny.engine(draft=tiny, speculative_config={"num_speculative_tokens": 4, "model": "itself"})
    request = engine.make(prompt(9), SamplingParams(seed=1, ignore_eos=True, max_tokens=30))
    engine.enqueue(request)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_steps < 12
    assert said(request.output()) == said(alone(tiny, Job(prompt(9), request.params)))


@pytest.mark.parametrize("end", ["finished", "aborted", "failed", "refused"])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_request_that_has_ended_is_freed_with_the_last_who_holds_it(
    end: str, is_ahead: bool, tiny: Tiny
) -> None:
    """Also where the step after its last one is under way"""
    engine = tiny.engine(is_ahead=is_ahead)
    other = engine.make(prompt(5, 1), replace(GREEDY, max_tokens=40))
    request = engine.make(prompt(9), replace(GREEDY, n=2))
    freed = weakref.ref(request)
    gc.disable()
    try:
        engine.enqueue(other)
        if end != "refused":
            engine.enqueue(request)
        for _ in range(5):
            engine.step()
        if end == "aborted":
            engine.abort(request.request_id)
        if end == "failed":
            engine._fail(request.completions[0])
            engine._settle(request)
        while end == "finished" and not request.is_finished:
            engine.step()
        del request
        assert freed() is None
        while engine.has_work:
            engine.step()
        check_idle(engine)
        assert said(other.output()) == said(alone(tiny, Job(prompt(5, 1), other.params)))
    finally:
        gc.enable()


def test_a_preempted_prompt_is_not_told_to_have_less_done_than_was_cached(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=16)
    generated(engine, prompt(64), max_tokens=1)
    request = engine.make(prompt(64) + prompt(64, 1), GREEDY)
    engine.enqueue(request)
    engine.step()
    assert engine.progress(request.request_id) == Progress(128, 64, 80)
    engine.scheduler.preempt(request.completions[0])
    assert engine.progress(request.request_id) == Progress(128, 64, 64)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_say_what_they_say_alone_and_leave_nothing_behind(tiny: Tiny) -> None:
    rng = random.Random(10)
    engine = tiny.engine(num_blocks=40, max_num_seqs=16)
    sizes = []
    for _ in range(100):
        engine.scheduler.max_num_batched_tokens = rng.choice([1, 16, 64, 512])
        longest = min(8 * engine.scheduler.max_num_batched_tokens, 300)
        jobs = random_jobs(rng, 100, longest, 8, arrive_within=60)
        requests = run(engine, jobs, 3, rng)
        check_idle(engine)
        check_outputs(tiny, jobs[::10], requests[::10])
        del requests
        gc.collect()
        sizes.append((len(gc.get_objects()), psutil.Process().memory_info().rss))
    num_objects, num_bytes = (last - early for early, last in zip(sizes[30], sizes[-1], strict=True))
    assert num_objects < 3000 and num_bytes < 32 << 20  # of the 7,000 requests in between


def test_requests_to_the_default_model_say_in_company_what_they_say_alone(default_model_path: Path) -> None:
    model, tokenizer = load_model(default_model_path)
    config = EngineConfig(kv_cache_memory="64MB", max_num_batched_tokens=48, max_model_len=256)
    texts = ["The sea", "Once upon a time there was", "def add(a, b):\n", "1, 2, 3,", "The sea is"]
    settings = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=2),
        SamplingParams(seed=3, max_tokens=5, top_p=0.9, presence_penalty=0.5),
        SamplingParams(seed=4, max_tokens=6, n=2, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
    ]
    given = [(text, settings[i % 4]) for i, text in enumerate([*texts, "word " * 40, "The sea", "sea"])]
    company = Engine(model, tokenizer, config)
    requests = [company.make(*each) for each in given]
    for request in requests[:4]:
        company.enqueue(request)
    for _ in range(3):
        company.step()
    company.scheduler.preempt(company.scheduler.running[0])
    finish(company, *requests[4:])
    for each, request in zip(given, requests, strict=True):
        single = Engine(model, tokenizer, config)
        (wanted,) = finish(single, single.make(*each))
        assert said(request.output()) == said(wanted)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 64},
    "longrope": {"rope_scaling": LONGROPE},
    "window": {"model_type": "mistral", "sliding_window": 21},
}


@pytest.mark.parametrize("kind", KINDS)
def test_ropes_and_windows_that_depend_on_the_length_do_not_depend_on_the_company(
    kind: str, tmp_path: Path, one_thread: None
) -> None:
    """Frequencies change at 64: by the prompt's length, and where an answer goes beyond it."""
    tiny = Tiny.at(tmp_path, **{"max_position_embeddings": 160, **KINDS[kind]})
    rng = random.Random(1)
    lengths = [20, 50, 62, 63, 64, 65, 66, 80, 100, 64, 63, 100]  # beginnings of one text
    jobs = [
        Job(prompt(length), (SAMPLED, GREEDY)[i % 2], arrival=rng.randint(0, 12))
        for i, length in enumerate(lengths)
    ]
    # the same text, of which another part is the prompt
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=50)
    (whole,) = alone(tiny, Job(prompt(50), params), max_model_len=160).outputs
    jobs += [
        Job(prompt(50) + whole.token_ids[:count], params, arrival=5 + count) for count in (0, 5, 14, 15, 25)
    ]
    engine = tiny.engine(num_blocks=30, max_model_len=160, max_num_batched_tokens=40)
    requests = run(engine, jobs, 3, rng)
    assert any(request.num_cached_tokens for request in requests)
    check_outputs(tiny, jobs, requests, max_model_len=160)


# ---- interrupts --------------------------------------------------------------------------------------------

# Of a step, without what it imports
STEP_FILES = tuple(
    f"infinilm/{name}.py"
    for name in ("batch", "draw", "recording", "runner", "tables", "work", "engine/blocks", "engine/draft")
) + tuple(f"infinilm/engine/{name}.py" for name in ("engine", "request", "scheduler", "text"))


@pytest.mark.parametrize("guesser", [None, "ngram", "the model itself"])
def test_whoever_an_interrupt_does_not_meet_in_the_midst_of_a_token_says_what_it_says_alone(
    guesser: str | None, tiny: Tiny
) -> None:
    rng = random.Random(5)
    jobs = [replace(job, end=None) for job in random_jobs(rng, 40, 120, 16, arrive_within=0)]
    draft = tiny if guesser == "the model itself" else None
    config = {"num_speculative_tokens": 4, "model": draft and str(draft.folder)} if guesser else None
    engine = hurried(tiny.engine(16, draft, max_num_seqs=3, speculative_config=config))
    requests = [engine.make(job.prompt, job.params, priority=job.priority) for job in jobs]
    for request in requests:
        engine.enqueue(request)
    num_interrupts = 0
    while engine.has_work:
        if rng.random() < 0.5:
            engine.step()
        else:
            num_interrupts += interrupted(rng.randrange(1, 1500), engine.step, *STEP_FILES)
        check_blocks(engine)
    check_idle(engine)
    whole = [(job, request) for job, request in zip(jobs, requests, strict=True) if request.error is None]
    assert num_interrupts > 50 and len(whole) > 20
    check_outputs(tiny, *map(list, zip(*whole, strict=True)))


@dataclass
class Placed:
    block_ids: list[int]


def test_no_two_lists_of_blocks_share_a_row_of_the_tables_wherever_an_interrupt_came() -> None:
    num_lines, has_come = 0, True
    while has_come:
        num_lines += 1
        tables, work = Tables(2, 2, torch.device("cpu")), [Placed([0, 1]), Placed([2, 3])]
        tables.show(work)
        has_come = interrupted(num_lines, partial(tables.show, [Placed([4, 5])]), "infinilm/tables.py")
        for i in range(6, 18, 2):
            work[i // 2 % 2] = Placed([i, i + 1])
            tables.show(work)
            assert tables.of(work, 2).tolist() == [item.block_ids for item in work]
    assert num_lines > 10


@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_token_is_drawn_by_its_own_settings_wherever_an_interrupt_came(is_repeated: bool) -> None:
    """Those that come next may be those of the row before the interrupt, or those it came to."""
    before, after = (
        Row(Stream([1], SamplingParams(temperature=0.5 * i, top_p=0.1 * i, top_k=i)), 1) for i in (1, 2)
    )
    num_lines, has_come = 0, True
    while has_come:
        num_lines += 1
        settings = Settings(arrays := Parcel(Settings.kinds(1), is_sent=False).arrays)
        settings.fill([before])
        has_come = interrupted(num_lines, partial(settings.fill, [after]), "infinilm/draw.py")
        params = (wanted := after if is_repeated else before).stream.params
        settings.fill([wanted])
        assert arrays[1].tolist() == [params.top_k]
        assert arrays[2].tolist() == pytest.approx([params.temperature, params.top_p, params.min_p])
    assert num_lines > 5


# ---- few blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_many_long_generations_finish_in_a_pool_for_one(num_blocks: int, tiny: Tiny) -> None:
    room = num_blocks * BLOCK
    jobs = [Job(prompt(1 + i, i), SamplingParams(temperature=0.0, max_tokens=room - 17)) for i in range(16)]
    engine = tiny.engine(num_blocks=num_blocks, max_num_seqs=16)
    requests = run(engine, jobs)
    check_idle(engine)
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    check_outputs(tiny, jobs, requests)


def test_many_continuations_of_one_prompt_finish_in_a_pool_for_one(tiny: Tiny) -> None:
    job = Job(prompt(20), SamplingParams(n=12, seed=1, max_tokens=25, ignore_eos=True))
    engine = tiny.engine(num_blocks=3, max_num_seqs=4)
    check_outputs(tiny, [job], run(engine, [job]))
    check_idle(engine)


def test_a_prompt_that_can_never_fit_is_refused_at_once_with_the_numbers(tiny: Tiny) -> None:
    engine = tiny.engine(num_blocks=3)
    with pytest.raises(RequestError, match=r"48 tokens.* max_model_len 512 .* 3 blocks of 16 .* 47 are the"):
        engine.make(prompt(48), GREEDY)
    assert generated(engine, prompt(47), max_tokens=9).outputs[0].finish_reason == "length"


def test_a_pool_smaller_than_the_longest_text_still_starts(tiny: Tiny) -> None:
    engine = tiny.engine(num_blocks=2, max_model_len=MAX_LENGTH)
    assert engine.max_length == 2 * BLOCK
    assert len(generated(engine, prompt(30), max_tokens=None).outputs[0].token_ids) == 2


def test_memory_for_less_than_a_block_is_refused_with_both_numbers(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="kv_cache_memory: 100 bytes do not hold one block of 4,096"):
        Engine(tiny.model, tiny.tokenizer, EngineConfig(kv_cache_memory=100, block_size=16))


# ---- lengths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_model_len", [40, 48])
def test_texts_end_at_max_model_len(max_model_len: int, tiny: Tiny) -> None:
    engine = tiny.engine(max_model_len=max_model_len)
    for length, max_tokens, num_drawn in ((-1, 5, 1), (-3, 5, 3), (-9, 5, 5), (-9, None, 9)):
        (output,) = generated(engine, prompt(max_model_len + length), max_tokens=max_tokens).outputs
        assert (len(output.token_ids), output.finish_reason) == (num_drawn, "length")


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_both_numbers(
    excess: int, tiny: Tiny
) -> None:
    length = 40 + excess
    with pytest.raises(RequestError, match=f"the prompt has {length} tokens; with max_model_len 40.* 39 are"):
        tiny.engine(max_model_len=40).make([5] * length, GREEDY)


# ---- prefixes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 100])
def test_a_prompt_given_again_is_found_up_to_its_last_token(length: int, tiny: Tiny) -> None:
    engine = tiny.engine()
    first, again = (generated(engine, prompt(length), logprobs=2) for _ in range(2))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert said(first) == said(again)


@pytest.mark.parametrize("num_shared", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_of_a_shared_beginning_whole_blocks_are_found(num_shared: int, tiny: Tiny) -> None:
    engine = tiny.engine()
    generated(engine, prompt(num_shared) + prompt(30, seed=1))
    other = prompt(num_shared) + prompt(30, seed=2)
    assert generated(engine, other).num_cached_tokens == num_shared // BLOCK * BLOCK
    assert said(generated(engine, other)) == said(generated(tiny.engine(), other))


def test_what_was_generated_is_found_in_the_next_turn(tiny: Tiny) -> None:
    engine = tiny.engine()
    first = generated(engine, prompt(20), max_tokens=50)
    turn = first.prompt_token_ids + first.outputs[0].token_ids + prompt(10, seed=1)
    second = generated(engine, turn)
    assert second.num_cached_tokens == 64  # the last of the 70 tokens was never computed
    assert said(second) == said(generated(tiny.engine(), turn))


def test_another_salt_shares_nothing(tiny: Tiny) -> None:
    engine = tiny.engine()
    outputs = [generated(engine, prompt(50), cache_salt=salt) for salt in (None, "a", "b", "a", None, "b")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 48, 48, 48]
    assert all(said(output) == said(outputs[0]) for output in outputs)


def test_without_prefix_caching_nothing_is_found(tiny: Tiny) -> None:
    engine = tiny.engine(enable_prefix_caching=False)
    first, again = (generated(engine, prompt(50)) for _ in range(2))
    assert again.num_cached_tokens == 0 and said(first) == said(again)


def test_prompts_whose_digests_are_equal_never_share_a_block(tiny: Tiny) -> None:
    rng = random.Random(2)
    jobs = random_jobs(rng, 20, 120, 6, arrive_within=10)
    engine = tiny.engine(num_blocks=30)
    engine.blocks.digest = lambda data: b"x"
    requests = run(engine, jobs, 3, rng)
    check_outputs(tiny, jobs, requests)


@ROUNDED
def test_prompt_logprobs_are_those_of_a_prompt_that_was_not_cached(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=24)
    generated(engine, prompt(70))
    again = generated(engine, prompt(70), prompt_logprobs=2)
    assert again.prompt_logprobs == generated(tiny.engine(), prompt(70), prompt_logprobs=2).prompt_logprobs


def test_of_several_continuations_the_first_alone_computes_the_prompt(tiny: Tiny) -> None:
    for prompt_logprobs in (None, 1):
        engine = tiny.engine()
        params = SamplingParams(n=3, seed=1, prompt_logprobs=prompt_logprobs)
        request = engine.make(prompt(100), params)
        finish(engine, request)
        assert [completion.num_found for completion in request.completions] == [0, 96, 96]


def test_a_prompt_interrupted_on_its_way_goes_on_where_the_cache_ends(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=20)
    request = engine.make(prompt(90), SAMPLED)
    engine.enqueue(request)
    for _ in range(3):
        engine.step()
    (stream,) = engine.scheduler.running
    engine.scheduler.preempt(stream)
    assert (stream.num_computed, stream.block_ids) == (0, [])
    engine.step()
    assert stream.num_computed == 48 + 20
    while engine.has_work:
        engine.step()
    assert said(request.output()) == said(alone(tiny, Job(prompt(90), SAMPLED)))


# ---- given up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7], ids=["at once", "in its prompt", "then", "answered"])
def test_a_request_that_is_given_up_leaves_nothing_and_changes_nobody(num_steps: int, tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=40)
    staying = engine.make(prompt(30, 1), SAMPLED)
    leaving = engine.make(prompt(70), SamplingParams(n=2, max_tokens=40))
    engine.enqueue(staying)
    engine.enqueue(leaving)
    for _ in range(num_steps):
        engine.step()
    engine.abort(leaving.request_id)
    output = leaving.output()
    assert output.finished and {each.finish_reason for each in output.outputs} == {"abort"}
    check_requests(engine)
    while engine.has_work:
        engine.step()
    check_idle(engine)
    assert said(staying.output()) == said(alone(tiny, Job(prompt(30, 1), SAMPLED)))


def test_giving_up_one_that_waits_or_is_unknown_is_nothing(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_seqs=1)
    requests = [engine.make(prompt(5, i), GREEDY, request_id=str(i)) for i in range(3)]
    for request in requests:
        engine.enqueue(request)
    engine.step()
    for request_id in ("1", "1", "nobody"):
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    assert [request.output().outputs[0].finish_reason for request in requests] == [
        "length",
        "abort",
        "length",
    ]
    check_idle(engine)


def test_times_are_noted_when_things_happen_and_not_when_they_do_not(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=16)
    answered, given_up = (engine.make(prompt(40), GREEDY) for _ in range(2))
    engine.enqueue(given_up)
    engine.step()
    engine.abort(given_up.request_id)
    finish(engine, answered)
    times = answered.metrics
    noted = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time]
    assert noted == sorted(noted) and noted[2] < noted[3] <= times.finished_time
    assert given_up.metrics.first_scheduled_time and given_up.metrics.finished_time
    assert given_up.metrics.first_token_time is given_up.metrics.last_token_time is None


# ---- order -------------------------------------------------------------------------------------------------


def test_a_lower_priority_number_goes_first_then_who_came_first(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_seqs=1)
    ranks = [0, 1, -1, 0, -1]
    requests = [engine.make(prompt(5, i), GREEDY, priority=rank) for i, rank in enumerate(ranks)]
    for request in requests:
        engine.enqueue(request)
    ended: list[Request] = []
    while engine.has_work:
        ended += [request for request in engine.step() if request.is_finished]
    assert [requests.index(request) for request in ended] == [2, 4, 0, 3, 1]


def test_streams_that_are_answered_go_on_beside_a_long_prompt(tiny: Tiny) -> None:
    """And it beside them: nobody waits for ever."""
    engine = tiny.engine(max_num_batched_tokens=64, max_num_seqs=33)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    first = [engine.make(prompt(1, i), params) for i in range(32)]
    for request in first:
        engine.enqueue(request)
    engine.step()
    engine.enqueue(long := engine.make(prompt(300, 1), GREEDY))
    num_drawn = 1
    while not long.completions[0].num_drawn:
        engine.step()
        num_drawn += 1
        assert {request.completions[0].num_drawn for request in first} == {num_drawn}


def test_no_step_has_more_tokens_than_it_may(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=7)
    for i in range(10):
        engine.enqueue(engine.make(prompt(20, i), GREEDY))
    while engine.has_work:
        work = engine.scheduler.schedule()
        beside = engine.scheduler.beside
        assert 0 < sum(item.num_tokens for item in [*work, *beside]) <= 7
        engine.scheduler.beside = []
        drawn = engine.runner.run([*work, *beside])
        engine.scheduler.advance([*work, *beside])
        engine._update([*work, *beside], drawn)


def test_more_than_max_queue_or_max_queue_tokens_are_turned_away(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_seqs=1, max_queue=3, max_queue_tokens=100)
    for i in range(3):
        engine.enqueue(engine.make(prompt(10, i), GREEDY))
    with pytest.raises(
        QueueFull, match="3 requests of 30 tokens wait .* max_queue is 3, max_queue_tokens 100"
    ):
        engine.enqueue(engine.make(prompt(1), GREEDY))
    assert not issubclass(QueueFull, RequestError)
    engine.step()
    with pytest.raises(QueueFull):
        engine.enqueue(engine.make(prompt(90), GREEDY))
    engine.enqueue(engine.make(prompt(9), GREEDY))
    while engine.has_work:
        engine.step()
    check_idle(engine)


def test_a_request_longer_than_the_queue_may_be_is_let_in_when_nobody_waits(tiny: Tiny) -> None:
    engine = tiny.engine(max_queue_tokens=10)
    assert generated(engine, prompt(50)).finished


@pytest.mark.parametrize("length", [1, 60], ids=["short", "longer than the queue may be"])
def test_continuations_of_a_request_that_runs_are_no_requests_that_wait(length: int, tiny: Tiny) -> None:
    engine = tiny.engine(max_num_seqs=2, max_queue_tokens=40)
    engine.enqueue(engine.make(prompt(30), replace(GREEDY, n=5)))
    engine.step()
    assert len(engine.scheduler.waiting) == 4
    assert (engine.stats().num_waiting, engine.stats().num_waiting_tokens) == (0, 0)
    finish(engine, engine.make(prompt(length), GREEDY))
    check_idle(engine)


def test_an_id_that_is_in_use_is_refused_and_its_first_owner_goes_on(tiny: Tiny) -> None:
    engine = tiny.engine()
    first = engine.make(prompt(5), GREEDY, request_id="a")
    engine.enqueue(first)
    with pytest.raises(RequestError, match="request_id 'a' is in use"):
        engine.enqueue(engine.make(prompt(6), GREEDY, request_id="a"))
    while engine.has_work:
        engine.step()
    assert first.output().outputs[0].finish_reason == "length"
    assert generated(engine, prompt(5)).finished


def test_an_id_that_somebody_chose_is_never_one_that_the_engine_chooses(tiny: Tiny) -> None:
    engine = tiny.engine()
    chosen = [engine.make(prompt(5), GREEDY, request_id=str(i)) for i in range(10, 20)]
    given = [engine.make(prompt(5), GREEDY) for _ in range(10)]
    assert all(output.finished for output in finish(engine, *chosen, *given))


# ---- NaN ---------------------------------------------------------------------------------------------------


def poison(engine: Engine, blocks: list[int]) -> None:
    for keys, values in engine.cache.layers:
        keys[blocks] = values[blocks] = torch.nan


@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_nan_fails_its_own_request_alone_and_is_not_found_again(
    prompt_logprobs: int | None, tiny: Tiny
) -> None:
    engine = tiny.engine(num_blocks=12, max_num_batched_tokens=64)
    neighbours = [engine.make(prompt(40, i), SAMPLED) for i in (1, 2)]
    params = SamplingParams(n=2, max_tokens=20, prompt_logprobs=prompt_logprobs)
    spoilt = engine.make(prompt(80), params)
    for request in (neighbours[0], spoilt, neighbours[1]):
        engine.enqueue(request)
    while not spoilt.completions[0].num_computed:
        engine.step()
    blocks = spoilt.completions[0].block_ids
    assert spoilt.completions[0].num_computed < 80
    poison(engine, blocks)
    while engine.has_work:
        engine.step()
    assert isinstance(spoilt.error, ArithmeticError) and not isinstance(spoilt.error, RequestError)
    for i, request in zip((1, 2), neighbours, strict=True):
        assert said(request.output()) == said(alone(tiny, Job(prompt(40, i), SAMPLED)))
    check_idle(engine)
    again = generated(engine, prompt(80))
    assert again.num_cached_tokens == 0
    assert said(again) == said(generated(tiny.engine(), prompt(80)))


def test_blocks_that_held_nan_are_as_good_as_new(tiny: Tiny) -> None:
    engine = tiny.engine(num_blocks=8)
    poison(engine, list(range(8)))
    for length in (1, 15, 17, 40):
        assert said(generated(engine, prompt(length))) == said(generated(tiny.engine(), prompt(length)))


def test_nan_among_logits_that_are_wanted_fails_the_request_and_not_the_engine(tiny: Tiny) -> None:
    engine = tiny.engine()
    spoilt = engine.make(prompt(20), SamplingParams(logprobs=3, max_tokens=9))
    engine.enqueue(spoilt)
    engine.step()
    poison(engine, spoilt.completions[0].block_ids)
    engine.step()
    assert isinstance(spoilt.error, ArithmeticError) and spoilt.is_finished
    check_idle(engine)


# ---- chance ------------------------------------------------------------------------------------------------


def test_random_numbers_are_uniform_and_do_not_follow_seed_index_or_position() -> None:
    rng = random.Random(0)
    for axis in range(3):
        for _ in range(4):
            place = [rng.randrange(1 << 62), rng.randrange(8), rng.randrange(4096)]
            drawn = []
            for i in range(4096):
                drawn.append(uniform(*place[:axis], place[axis] + i, *place[axis + 1 :]))
            x = torch.tensor(drawn, dtype=torch.float64)
            assert bool(((x >= 0) & (x < 1)).all())
            counts = torch.histc(x, bins=16, min=0, max=1)
            assert float(((counts - 256) ** 2 / 256).sum()) < 45  # chi squared of 15: once in 10,000
            for lag in (1, 2, 7):
                pair = torch.stack([x[:-lag], x[lag:]])
                assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.07  # 4.5 deviations


def test_numbers_of_neighbouring_seeds_indices_and_positions_all_differ() -> None:
    drawn = {uniform(seed, i, at) for seed in (-3, -1, 0, 1, 2) for i in range(20) for at in range(100)}
    assert len(drawn) == 5 * 20 * 100


def test_the_first_of_n_is_what_one_alone_would_be_and_the_others_differ(tiny: Tiny) -> None:
    options = {"temperature": 1.0, "seed": 11, "logprobs": 1, "max_tokens": 10}
    one, many = (generated(tiny.engine(), prompt(20), n=n, **options) for n in (1, 5))
    assert said(replace(many, outputs=many.outputs[:1])) == said(one)
    assert [output.index for output in many.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(output.token_ids) for output in many.outputs}) == 5


def test_without_seeds_requests_draw_differently_and_the_engines_seed_repeats_them(tiny: Tiny) -> None:
    def drawn(seed: int | None) -> list[Any]:
        engine = tiny.engine(seed=seed)
        return [generated(engine, prompt(9), temperature=1.0).outputs[0].token_ids for _ in range(3)]

    first = drawn(5)
    assert len(set(map(tuple, first))) == 3
    assert drawn(5) == first and drawn(6) != first and drawn(None) != first


# ---- the ends of a text ------------------------------------------------------------------------------------


def test_a_stop_token_stays_among_the_tokens_and_is_no_text(tiny: Tiny) -> None:
    whole = generated(tiny.engine(), prompt(9), max_tokens=12).outputs[0]
    last = whole.token_ids[7]
    end = whole.token_ids.index(last) + 1
    (output,) = generated(tiny.engine(), prompt(9), max_tokens=12, stop_token_ids=[last]).outputs
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        whole.token_ids[:end],
        "stop",
        last,
    )
    assert output.text == tiny.tokenizer.decode(whole.token_ids[: end - 1])


def test_the_end_of_a_text_has_no_stop_reason(tiny: Tiny) -> None:
    bias = {0: 100.0}
    (output,) = generated(tiny.engine(), prompt(9), ignore_eos=False, logit_bias=bias).outputs
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == (
        [0],
        "",
        "stop",
        None,
    )
    (ignored,) = generated(tiny.engine(), prompt(9), max_tokens=3, logit_bias=bias).outputs
    assert (ignored.token_ids, ignored.finish_reason) == ([0, 0, 0], "length")


def test_min_tokens_puts_off_every_end(tiny: Tiny) -> None:
    options = {"ignore_eos": False, "logit_bias": {0: 100.0, 9: 90.0}, "stop_token_ids": [9]}
    (output,) = generated(tiny.engine(), prompt(9), min_tokens=4, **options).outputs
    assert len(output.token_ids) == 5 and output.token_ids[-1] == 0
    assert not {0, 9} & set(output.token_ids[:4])


def letters(tiny: Tiny, text: str) -> list[int]:
    return tiny.tokenizer.encode(text)


def test_a_stop_string_ends_tokens_with_the_one_that_completes_it_and_text_before_it(tiny: Tiny) -> None:
    a, b = letters(tiny, "ab")
    options = {"logit_bias": {a: 100.0, b: 50.0}, "bad_words": ["aaaa"], "max_tokens": 9}
    assert generated(tiny.engine(), prompt(5), **options).outputs[0].text.startswith("aaab")
    (output,) = generated(tiny.engine(), prompt(5), stop=["zz", "ab"], **options).outputs
    assert (output.token_ids, output.text) == ([a, a, a, b], "aa")
    assert (output.finish_reason, output.stop_reason) == ("stop", "ab")
    (shown,) = generated(
        tiny.engine(), prompt(5), stop="ab", include_stop_str_in_output=True, **options
    ).outputs
    assert shown.text == "aaab"


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_stop_token_is_in_the_text_where_that_is_asked_for(is_shown: bool, tiny: Tiny) -> None:
    (a,) = letters(tiny, "a")
    options = {"logit_bias": {a: 100.0}, "stop_token_ids": [a], "include_stop_str_in_output": is_shown}
    (output,) = generated(tiny.engine(), prompt(5), **options).outputs
    assert (output.token_ids, output.text, output.stop_reason) == ([a], "a" if is_shown else "", a)


def test_only_allowed_tokens_come_and_no_bad_words(tiny: Tiny) -> None:
    a, b, c = letters(tiny, "abc")
    options = {"temperature": 1.5, "seed": 1, "max_tokens": 60, "allowed_token_ids": [a, b, c]}
    (free,) = generated(tiny.engine(), prompt(5), **options).outputs
    assert set(free.text) == set("abc") and "ab" in free.text
    (bound,) = generated(tiny.engine(), prompt(5), bad_words=["ab"], **options).outputs
    assert set(bound.text) == set("abc") and "ab" not in bound.text


@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_penalties_and_biases_do_not_depend_on_the_dtype_that_torch_makes_by_default(
    default: torch.dtype,
) -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, logit_bias={40: 3.3})
    stream, logits = Stream(prompt(9), params), torch.linspace(-4, 4, VOCAB_SIZE)[None]
    wanted, usual = adjusted(logits, [stream]), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(adjusted(logits, [stream]), wanted)
    finally:
        torch.set_default_dtype(usual)


def test_a_request_that_leaves_itself_no_token_is_the_users_mistake(tiny: Tiny) -> None:
    engine = tiny.engine()
    (a,) = letters(tiny, "a")
    other = engine.make(prompt(5), GREEDY)
    stuck = engine.make(prompt(5), SamplingParams(allowed_token_ids=[a], bad_words=["aa"], max_tokens=9))
    finish(engine, other, stuck)
    assert isinstance(stuck.error, RequestError)
    assert str(stuck.error) == "no token is left to be drawn after allowed_token_ids and bad_words"
    assert stuck.error.field == "allowed_token_ids"
    assert stuck.output().outputs[0].token_ids == [a]
    assert said(other.output()) == said(alone(tiny, Job(prompt(5), GREEDY)))


# ---- logprobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_the_largest_and_the_chosen_one(temperature: float, tiny: Tiny) -> None:
    options = {"temperature": temperature, "seed": 2, "max_tokens": 8, "prompt_logprobs": 0}
    for count in (0, 1, 3):
        output = generated(tiny.engine(), prompt(6), logprobs=count, **options)
        (completion,) = output.outputs
        assert completion.logprobs is not None and len(completion.logprobs) == 8
        for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
            chosen = found[token_id]
            assert len(found) == count + (chosen.rank > count)
            assert sorted(each.rank for each in found.values())[:count] == list(range(1, count + 1))
            assert chosen.decoded_token == tiny.tokenizer.decode([token_id], skip_special_tokens=False)
        total = sum(
            found[i].logprob for i, found in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == total


def test_of_a_small_vocabulary_more_logprobs_than_tokens_are_all_there_are(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(write_folder(tmp_path, llama_weights()))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0")
    tokenizer = Tokenizer(tokenizers.Tokenizer(words), {}, (), None)
    engine = Engine(model, tokenizer, EngineConfig(kv_cache_memory="1MB"))
    output = generated(engine, [1, 2, 3], logprobs=128, prompt_logprobs=128, max_tokens=2)
    assert [len(each) for each in output.outputs[0].logprobs or ()] == [40, 40]
    assert [each and len(each) for each in output.prompt_logprobs or ()] == [None, 40, 40]


def test_prompt_logprobs_are_those_of_each_token_after_the_first(tiny: Tiny) -> None:
    ids = prompt(100)
    output = generated(tiny.engine(), ids, prompt_logprobs=2, max_tokens=1)
    found = output.prompt_logprobs
    assert found is not None and found[0] is None and len(found) == 100
    for token_id, each in zip(ids[1:], found[1:], strict=True):
        assert each is not None and token_id in each and 2 <= len(each) <= 3
    with torch.inference_mode():
        ids_there = torch.tensor([ids], device=tiny.model.device)
        logits = tiny.model(ids_there, logits_to_keep=0)[0].double().log_softmax(-1).cpu()
    wanted = logits[range(99), ids[1:]]
    ours = torch.tensor([each[i].logprob for i, each in zip(ids[1:], found[1:], strict=True)])  # type: ignore[index]
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=1e-4)


def test_logprobs_are_not_given_unasked(tiny: Tiny) -> None:
    output = generated(tiny.engine(), prompt(6))
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


# ---- the settings of an engine -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, values",
    {
        "max_model_len": (0, 1, -5, 2.5, "8", True, 1 << 40),
        "max_num_seqs": (0, -1, None, "many", 1 << 20),
        "max_num_batched_tokens": (0, -1, 1.0, 1 << 40),
        "block_size": (0, 1, 8, 15, 17, 48, 512, 16.5, 16.0, "16", True, None),
        "kv_cache_dtype": ("int8", "", None, 16, "bf16"),
        "kv_cache_memory": (0, -1, "much", "1PB", "9999TiB", 1.5, "-1GB", True),
        "enable_prefix_caching": (1, "yes", None),
        "seed": (-1, 1 << 63, 0.5, "1"),
        "max_queue": (0, -1, None),
        "max_queue_tokens": (0, None, 1.5),
        "chat_template": (5, b"x"),
    }.items(),
)
def test_a_wrong_setting_is_a_value_error_that_names_it(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}"):
            EngineConfig(**{name: value})


def test_a_setting_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_sequences"):
        EngineConfig(max_sequences=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_blocks_have_any_of_five_sizes_and_outputs_are_the_same(block_size: int, tiny: Tiny) -> None:
    wanted = generated(tiny.engine(), prompt(70), logprobs=2)
    engine = tiny.engine(block_size=block_size)
    assert engine.blocks.size == block_size
    assert said(generated(engine, prompt(70), logprobs=2)) == said(wanted)


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("2GiB", 2 << 30),
        ("512MB", 512 * 10**6),
        ("64 kb", 64000),
        ("100TiB", 100 << 40),
        ("1.5t", 15 * 10**11),
        ("4294967296", 1 << 32),
        (7, 7),
    ],
)
def test_memory_is_said_in_bytes_or_with_a_unit(text: Any, num_bytes: int) -> None:
    assert EngineConfig(kv_cache_memory=text).kv_cache_memory == num_bytes


@pytest.mark.parametrize("text", ["much", "2 gigabytes", "1PB", "", "-2GiB"])
def test_memory_in_no_known_unit_is_told_which_there_are(text: str) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_memory .* kB, .*, TiB, but is '{text}'"):
        EngineConfig(kv_cache_memory=text)


def test_ends_of_text_that_the_model_has_no_rows_for_do_no_harm(tmp_path: Path, one_thread: None) -> None:
    tiny = Tiny.at(tmp_path, eos_token_id=[0, 100_000])
    assert len(generated(tiny.engine(), prompt(5), ignore_eos=False, min_tokens=3).outputs[0].token_ids) >= 3


def test_a_length_beyond_the_models_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=f"max_model_len is {MAX_LENGTH + 1}, but .* reaches {MAX_LENGTH}"):
        tiny.engine(max_model_len=MAX_LENGTH + 1)


@pytest.mark.parametrize(
    "scaling, reach",
    [
        ({"rope_type": "linear", "factor": 2.0}, 2 * MAX_LENGTH),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, MAX_LENGTH),
    ],
)
def test_texts_may_be_as_long_as_scaled_rope_reaches(
    scaling: dict[str, Any], reach: int, tmp_path: Path, one_thread: None
) -> None:
    tiny = Tiny.at(tmp_path, rope_scaling=scaling)
    engine = tiny.engine(max_model_len=reach)
    assert len(generated(engine, prompt(reach - 5), max_tokens=5).outputs[0].token_ids) == 5
    with pytest.raises(ValueError, match=f"rope reaches {reach} positions"):
        tiny.engine(max_model_len=reach + 1)


@pytest.mark.parametrize("max_num_batched_tokens", range(3, 24, 2))
def test_a_stream_that_is_computed_again_does_not_guess_before_it_has_caught_up(
    max_num_batched_tokens: int, tiny: Tiny
) -> None:
    config = {"num_speculative_tokens": 4, "prompt_lookup_min": 1}
    options = {"max_num_batched_tokens": max_num_batched_tokens, "enable_prefix_caching": False}
    engine = tiny.engine(speculative_config=config, **options)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40, logprobs=1)
    request = engine.make([7, 8, 9] * 4, params)
    engine.enqueue(request)
    while engine.has_work:
        engine.step()
        (stream,) = request.completions
        assert stream.num_computed <= len(stream)
        if stream.num_drawn % 5 == 4 and stream in engine.scheduler.running and stream.num_computed:
            engine.scheduler.preempt(stream)
            while engine.has_work and stream.num_computed < len(stream) - 1:
                engine.step()
                assert stream.num_computed <= len(stream)
    check_idle(engine)
    assert said(request.output()) == said(alone(tiny, Job([7, 8, 9] * 4, params)))


# ---- prompts that are read beside answers ------------------------------------------------------------------


@pytest.mark.parametrize("num_answers", [1, 4, 16, 21])
def test_a_layer_of_a_passage_takes_no_longer_than_there_is_time_however_long_the_prompt_has_become(
    num_answers: int,
) -> None:
    """Of a machine whose layers cost some seconds, more with each token, and with all that it looks at"""
    pace, slowdowns, num_read = Pace(), [], 0
    usual = 4.0 + num_answers * 0.5
    pace.note_answers(num_answers, usual)
    while num_read < 4000:
        count, allowed = pace.num_tokens, pace.seconds_beside(num_answers, num_answers, 1)
        layer = 0.1 + count * 0.02 + (num_read + count * num_read / 4) * 0.0001
        pace.note_layer(count, layer, allowed)
        slowdowns.append((usual + layer) / usual)
        num_read += count
    assert max(slowdowns[3:]) < 3.0
    assert len(slowdowns) < 4000 / 32  # it reads much at a time


def test_a_passage_has_no_fewer_tokens_than_a_tile_and_no_more_than_its_limit() -> None:
    pace = Pace()
    pace.note_layer(128, 50.0, 0.1)
    assert pace.num_tokens == Pace.FEWEST
    pace.note_layer(16, 1e-6, math.inf)
    assert pace.num_tokens == Pace.MOST


def test_where_more_wait_for_a_first_token_than_for_a_next_one_prompts_have_more_time() -> None:
    pace = Pace()
    assert pace.seconds_beside(4, 4, 1) == 0.0  # nothing is known yet: a layer a step
    pace.note_answers(4, 1.0)
    assert pace.seconds_beside(4, 4, 1) == pace.seconds_beside(4, 4, 4) == 1.0
    assert pace.seconds_beside(4, 4, 40) == 19.0


def hurried(engine: Engine) -> Engine:
    """One that reads a layer of a passage in each step"""
    engine.scheduler.pace.seconds_beside = lambda *_: 0.0  # type: ignore[method-assign]
    return engine


def answering(engine: Engine, num_tokens: int = 60) -> Request:
    request = engine.make([5, 6, 7], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens))
    engine.enqueue(request)
    engine.step()
    return request


@SHARED
def test_a_stream_has_a_token_of_every_step_while_a_prompt_is_read_beside_it(tiny: Tiny) -> None:
    engine = hurried(tiny.engine())
    answered, job = answering(engine), Job(prompt(200), GREEDY)
    request = engine.make(job.prompt, job.params)
    engine.enqueue(request)
    (stream,), (other,) = answered.completions, request.completions
    steps = 0
    while not other.num_drawn:
        before, steps = stream.num_drawn, steps + 1
        engine.step()
        assert stream.num_drawn == before + 1
    assert steps > tiny.model.config.num_hidden_layers  # a layer each, and what follows them
    while engine.has_work:
        engine.step()
    assert said(request.output()) == said(alone(tiny, job))


@SHARED
@pytest.mark.parametrize("what", ["abort", "preempt"])
def test_a_stream_that_leaves_in_the_middle_of_a_passage_takes_nothing_from_the_others(
    what: str, tiny: Tiny
) -> None:
    engine = hurried(tiny.engine())
    answering(engine)
    jobs = [Job(prompt(30 + i, i), GREEDY) for i in range(3)]
    requests = [engine.make(job.prompt, job.params) for job in jobs]
    for request in requests:
        engine.enqueue(request)
    engine.step()
    assert len(engine.scheduler.beside) > 1
    if what == "abort":
        engine.abort(requests[0].request_id)
    else:
        engine.scheduler.preempt(requests[0].completions[0])
    assert not engine.scheduler.beside
    late = Job(prompt(60, 3), GREEDY)  # which may be given the blocks that were left
    requests.append(engine.make(late.prompt, late.params))
    engine.enqueue(requests[-1])
    while engine.has_work:
        engine.step()
    check_idle(engine)
    for job, request in list(zip([*jobs, late], requests, strict=True))[what == "abort" :]:
        assert said(request.output()) == said(alone(tiny, job))


@SHARED
def test_prompts_are_read_to_the_end_when_nobody_is_answered_any_more(tiny: Tiny) -> None:
    engine = hurried(tiny.engine())
    answered = answering(engine, 3)
    request = engine.make(prompt(100), GREEDY)
    engine.enqueue(request)
    engine.step()
    engine.abort(answered.request_id)
    engine.step()
    assert request.completions[0].num_drawn == 1
    while engine.has_work:
        engine.step()


@SHARED
def test_a_prompt_that_is_read_alone_tells_nothing_of_how_long_answers_take(tiny: Tiny) -> None:
    engine = tiny.engine()
    engine.enqueue(engine.make(prompt(200), GREEDY))
    engine.step()
    assert engine.scheduler.pace.seconds_beside(1, 1, 1) == 0.0
    for _ in range(3):
        engine.step()
    assert engine.scheduler.pace.seconds_beside(1, 1, 1) > 0.0
