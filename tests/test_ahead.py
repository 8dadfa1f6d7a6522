"""An engine that launches a step before it has read the last one says what one says that does not.

On a GPU that is how it runs; on a CPU while steps are brief and come again.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from engines import (
    DEVICE,
    VOCAB_SIZE,
    Job,
    Tiny,
    alone,
    check_blocks,
    check_idle,
    check_outputs,
    finish,
    generated,
    prompt,
    random_jobs,
    random_prompt,
    run,
    said,
)

from infinilm import SamplingParams, recording, runner
from infinilm.engine.engine import Engine
from infinilm.engine.request import NumericalError
from infinilm.runner import Pending
from infinilm.work import Work

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)


@pytest.fixture(autouse=True)
def record_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RECORDED_AT", 1)
    monkeypatch.setattr(recording, "BRIEF", math.inf)  # on a machine that has much else to do


class Launches:
    """How many steps were launched while the one before was unread, and with unknown tokens"""

    def __init__(self, engine: Engine) -> None:
        self.num_ahead = self.num_unknown = 0
        self.launch, self.engine = engine.runner.launch, engine
        engine.runner.launch = self  # type: ignore[method-assign,assignment]

    def __call__(self, work: list[Work]) -> Pending:
        unknown = [item for item in work if item.stream.num_unread]
        self.num_ahead += any(item.stream.num_unread for item in work)
        self.num_unknown += len(unknown)
        return self.launch(work)


def plain_job(rng: random.Random, max_prompt: int, max_tokens: int, arrive_within: int) -> Job:
    """One of which nothing but tokens is wanted; it may end by a token, a text or its length."""
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=rng.randint(1, max_tokens),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 20]),
        seed=rng.randrange(1 << 40),
        stop=rng.choice([(), ("e", "th")]),
        stop_token_ids=rng.choice([(), tuple(rng.randrange(VOCAB_SIZE) for _ in range(8))]),
    )
    arrival = rng.randint(0, arrive_within)
    return Job(
        random_prompt(rng, max_prompt),
        params,
        priority=rng.choice([0, 0, -1, 1]),
        arrival=arrival,
        end=arrival + rng.randint(0, 8) if rng.random() < 0.1 else None,
    )


@pytest.mark.parametrize("seed, max_num_batched_tokens", list(enumerate([1, 5, 16, 33, 512])))
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("reads_beside", [True, False], ids=["beside", "together"])
def test_a_mix_of_plain_requests_says_what_each_says_alone(
    seed: int, max_num_batched_tokens: int, enable_prefix_caching: bool, reads_beside: bool, tiny: Tiny
) -> None:
    rng = random.Random(seed)
    jobs = [plain_job(rng, min(8 * max_num_batched_tokens, 200), 20, 15) for _ in range(16)]
    engine = tiny.engine(
        num_blocks=24,
        is_ahead=True,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine.scheduler.reads_beside = reads_beside and DEVICE == "cpu"
    launches = Launches(engine)
    requests = run(engine, jobs, 3, rng)
    check_idle(engine)
    assert reads_beside or launches.num_unknown > 5
    assert any(request.metrics.num_preemptions for request in requests)
    check_outputs(tiny, jobs, requests)


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_all_kinds_among_plain_ones_say_what_they_say_alone(seed: int, tiny: Tiny) -> None:
    """Some want logprobs, penalties, a least length: those go a step at a time, and all with them."""
    rng = random.Random(100 + seed)
    jobs = [plain_job(rng, 100, 60, 20) for _ in range(12)] + random_jobs(rng, 6, 100, 6, arrive_within=25)
    engine = tiny.engine(num_blocks=30, is_ahead=True, max_num_batched_tokens=48)
    launches = Launches(engine)
    requests = run(engine, jobs, 4, rng)
    check_idle(engine)
    assert launches.num_unknown > 5
    check_outputs(tiny, jobs, requests)


def test_all_but_the_first_steps_of_an_answer_are_launched_ahead(tiny: Tiny) -> None:
    """On a CPU the prompt's, the one that is recorded, and the first that goes on behind"""
    engine = tiny.engine(is_ahead=True)
    launches = Launches(engine)
    generated(engine, prompt(20), max_tokens=30)
    assert launches.num_ahead == (27 if DEVICE == "cpu" else 29)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU is ahead whatever a step takes")
def test_a_cpu_is_ahead_of_its_own_accord_but_of_no_step_that_takes_long(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, num_ahead = tiny.engine().config, []
    for seconds in (math.inf, 0.0):
        monkeypatch.setattr(recording, "BRIEF", seconds)
        engine = Engine(tiny.model, tiny.tokenizer, config)
        launches = Launches(engine)
        generated(engine, prompt(20), max_tokens=30)
        num_ahead.append(launches.num_ahead)
    assert num_ahead == [27, 0]


def test_a_step_that_somebody_wants_more_of_is_read_before_the_next(tiny: Tiny) -> None:
    for more in ({"logprobs": 1}, {"presence_penalty": 0.5}, {"bad_words": ["x"]}, {"prompt_logprobs": 0}):
        engine = tiny.engine(is_ahead=True)
        launches = Launches(engine)
        wanted = generated(tiny.engine(), prompt(20), **more)
        assert said(generated(engine, prompt(20), **more)) == said(wanted)
        assert launches.num_ahead <= ("prompt_logprobs" in more) * 15


def test_who_guesses_does_not_run_ahead(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    config = tiny.engine(speculative_config={"num_speculative_tokens": 3}).config
    engine = Engine(tiny.model, tiny.tokenizer, config)
    assert not engine.runner.is_ahead
    (output,) = finish(engine, engine.make([7, 8, 9] * 4, params))
    assert said(output) == said(alone(tiny, Job([7, 8, 9] * 4, params)))


def test_a_token_too_many_is_dropped_and_counted_nowhere(tiny: Tiny) -> None:
    """The stream ends by a token that is known only when the next has been computed."""
    whole = generated(tiny.engine(), prompt(10), max_tokens=40).outputs[0].token_ids
    last = next(i for i in range(20, 40) if whole[i] not in whole[:i])
    engine = tiny.engine(is_ahead=True)
    output = generated(engine, prompt(10), max_tokens=40, stop_token_ids=[whole[last]])
    assert output.outputs[0].token_ids == whole[: last + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert engine.stats().generated_tokens == last + 1
    check_blocks(engine)
    check_idle(engine)
    # What others find are the blocks of tokens that were said, and no more.
    num_kept = (10 + last) // engine.blocks.size
    assert len(engine.blocks.contents) == num_kept
    following = generated(engine, prompt(10) + whole[: last + 1] + [5], max_tokens=3)
    assert following.num_cached_tokens == num_kept * engine.blocks.size


@pytest.mark.parametrize("num_steps", range(8))
def test_a_request_that_is_given_up_under_way_leaves_nothing_and_changes_nobody(
    num_steps: int, tiny: Tiny
) -> None:
    engine = tiny.engine(is_ahead=True)
    kept, given_up = (engine.make(prompt(20, i), GREEDY) for i in range(2))
    for request in (kept, given_up):
        engine.enqueue(request)
    for _ in range(num_steps):
        engine.step()
    engine.abort(given_up.request_id)
    check_blocks(engine)
    again = engine.make(prompt(20, 1), GREEDY, request_id=given_up.request_id)
    (other,) = finish(engine, again)
    assert said(kept.output()) == said(alone(tiny, Job(prompt(20, 0), GREEDY)))
    assert said(other) == said(alone(tiny, Job(prompt(20, 1), GREEDY)))
    check_idle(engine)


def test_an_engine_that_nobody_asks_anything_has_nothing_under_way(tiny: Tiny) -> None:
    engine = tiny.engine(is_ahead=True)
    first = generated(engine, prompt(20), max_tokens=9, stop=["e"])
    assert engine._launched is None
    request = engine.make(prompt(20, 3), GREEDY)
    engine.enqueue(request)
    engine.step()
    engine.abort(request.request_id)
    assert engine._launched is None and engine.step() == []
    assert said(generated(engine, prompt(20), max_tokens=9, stop=["e"])) == said(first)


def test_nan_fails_its_own_request_alone_and_its_blocks_are_not_found(tiny: Tiny) -> None:
    engine, params = tiny.engine(is_ahead=True), replace(GREEDY, max_tokens=40)
    good, bad = (engine.make(prompt(40, i), params) for i in range(2))
    for request in (good, bad):
        engine.enqueue(request)
    moved = [engine.step() for _ in range(4)]
    engine.runner.settle()
    for keys, values in engine.cache.layers:
        keys[bad.completions[0].block_ids] = values[bad.completions[0].block_ids] = torch.nan
    moved.clear()
    while engine.has_work:
        moved.append(engine.step())
        check_blocks(engine)
    assert isinstance(bad.error, NumericalError)
    is_told = [bad in requests for requests in moved]  # of the token that was under way, and of the end
    assert is_told[:2] == [True, True] and not any(is_told[2:])
    assert said(good.output()) == said(alone(tiny, Job(prompt(40, 0), params)))
    check_idle(engine)
    assert generated(engine, prompt(40, 1)).num_cached_tokens == 0


def test_on_a_gpu_steps_of_any_size_share_a_few_recordings_in_which_prompts_have_fewer_rows_than_tokens() -> (
    None
):
    found = set()
    for num_rows in range(1, recording.MAX_CAPTURED + 1):
        for num_tokens in range(num_rows, recording.PROMPTED[-1] + 1, 3):
            size = recording.captured_size(num_tokens, num_rows)
            assert size[0] >= num_tokens and size[1] >= num_rows
            assert (size[0] == size[1]) == (num_tokens == num_rows)
            found.add(size)
    assert len(found) <= recording.MAX_RECORDINGS
