"""What an engine tells of itself: counts, progress, times; and calls between two of its steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Tiny, finish, generated, prompt, said
from patience import PATIENCE, until, within_patience

from infinilm import AsyncLLM, EngineDead, RequestOutput, SamplingParams
from infinilm.engine.stats import Counts, Progress

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)
OPTIONS: dict[str, Any] = {"kv_cache_memory": "32MB", "block_size": 16}


@pytest.fixture
def llm(tiny: Tiny) -> Iterator[AsyncLLM]:
    made = AsyncLLM(tiny.folder, **OPTIONS)
    yield made
    made.shutdown()


async def last_of(llm: AsyncLLM, *args: Any, **options: Any) -> RequestOutput:
    *_, output = [output async for output in llm.generate(*args, **options)]
    return output


# ---- counts ------------------------------------------------------------------------------------------------


def test_counts_are_of_what_was_read_found_and_written(tiny: Tiny) -> None:
    engine = tiny.engine()
    generated(engine, prompt(40), max_tokens=5)
    assert engine.counts == Counts(prompt_tokens=40, generated_tokens=5, prefix_queries=40)
    generated(engine, prompt(40), max_tokens=5)
    generated(engine, prompt(40), max_tokens=7, n=2, cache_salt="other")
    finish(engine, engine.make_encoding(prompt(40)))
    assert engine.counts == Counts(
        prompt_tokens=160, cached_tokens=64, generated_tokens=24, prefix_queries=160, prefix_hits=64
    )


def test_what_is_not_looked_up_is_neither_a_query_nor_a_hit(tiny: Tiny) -> None:
    engine = tiny.engine()
    for _ in range(2):
        generated(engine, prompt(40), prompt_logprobs=0)
    without = tiny.engine(enable_prefix_caching=False)
    generated(without, prompt(40))
    for counts in (engine.counts, without.counts):
        assert counts.prefix_queries == counts.prefix_hits == counts.cached_tokens == 0


def test_preemptions_are_counted(tiny: Tiny) -> None:
    engine = tiny.engine(num_blocks=8)
    requests = [engine.make(prompt(40, i), SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(3)]
    finish(engine, *requests)
    assert engine.stats().preemptions == sum(r.metrics.num_preemptions for r in requests) > 0


def test_guesses_are_counted_and_how_many_were_right(tiny: Tiny) -> None:
    config = {"num_speculative_tokens": 4, "model": "itself"}
    engine = tiny.engine(draft=tiny, speculative_config=config)
    generated(engine, prompt(9), max_tokens=30)
    stats = engine.stats()
    assert stats.drafts > 0 and stats.generated_tokens == 30
    assert stats.draft_tokens - 4 <= stats.accepted_tokens <= stats.draft_tokens
    assert stats.generated_tokens <= 30 <= stats.accepted_tokens + stats.drafts + 2


def test_what_runs_and_waits_and_the_blocks_that_are_held(tiny: Tiny) -> None:
    engine = tiny.engine(num_blocks=32, max_num_seqs=2)
    for i in range(4):
        engine.enqueue(engine.make(prompt(40, i), GREEDY))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (2, 2, 80)
    assert (stats.num_blocks_used, stats.num_blocks) == (6, 32)
    finish(engine)
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_waiting_tokens == stats.num_blocks_used == 0


def test_any_thread_may_ask_while_the_engine_runs(llm: AsyncLLM) -> None:
    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(last_of(llm, prompt(50, i), GREEDY, str(i))) for i in range(40)]
        found = []
        while not all(task.done() for task in tasks):
            found.append((llm.stats(), [llm.progress(str(i)) for i in range(40)]))
            await asyncio.sleep(0.001)  # without it Python's lock would be the engine's for moments alone
        return found

    within_patience(ask())
    assert llm.stats().generated_tokens == 40 * 5 and llm.stats().prompt_tokens == 40 * 50


# ---- progress and times ------------------------------------------------------------------------------------


def test_progress_goes_from_what_was_found_to_the_whole_prompt(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=16)
    generated(engine, prompt(40))
    request = engine.make(prompt(40) + prompt(50, 1), GREEDY, request_id="a")
    assert engine.progress("a") is None
    engine.enqueue(request)
    seen = [engine.progress("a")]
    while engine.has_work:
        engine.step()
        seen.append(engine.progress("a"))
    assert seen[:5] == [Progress(90, 0, 0), *(Progress(90, 32, at) for at in (48, 64, 80, 90))]
    assert set(seen[5:-1]) == {Progress(90, 32, 90)} and seen[-1] is None


def test_progress_does_not_go_back_for_an_answer_that_is_interrupted(tiny: Tiny) -> None:
    engine = tiny.engine()
    request = engine.make(prompt(40), GREEDY, request_id="a")
    engine.enqueue(request)
    engine.step()
    engine.scheduler.preempt(request.completions[0])
    assert engine.progress("a") == Progress(40, 0, 40)


@pytest.mark.parametrize("is_encoding", [False, True])
def test_a_request_notes_its_times_in_their_order(is_encoding: bool, tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=16)
    request = engine.make_encoding(prompt(40)) if is_encoding else engine.make(prompt(40), GREEDY)
    finish(engine, request)
    times = request.metrics
    steps = [
        times.arrival_time,
        times.first_scheduled_time,
        times.first_token_time,
        times.last_token_time,
        times.finished_time,
    ]
    known = [at for at in steps if at is not None]
    assert len(known) == 5 and known == sorted(known)
    assert known[1] < known[2] and (known[2] < known[3]) is not is_encoding


def test_arrival_is_when_the_call_came_and_not_when_its_text_was_encoded(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = llm.engine.make, []

    def noted(*args: Any, **options: Any) -> Any:
        request = make(*args, **options)
        made.append(request.metrics.arrival_time)
        return request

    monkeypatch.setattr(llm.engine, "make", noted)
    output = within_patience(last_of(llm, prompt(5), GREEDY))
    assert output.metrics is not None and output.metrics.arrival_time < made[0]


# ---- calls between steps -----------------------------------------------------------------------------------


def test_a_call_runs_in_the_engines_thread_and_gives_back_its_result_or_error(llm: AsyncLLM) -> None:
    async def both() -> str:
        with pytest.raises(ZeroDivisionError):
            await llm.run(lambda: 1 // 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await llm.run(lambda: next(iter(())))
        return await llm.run(lambda: threading.current_thread().name)

    assert within_patience(both()) == "infinilm-engine"
    assert within_patience(last_of(llm, prompt(5), GREEDY)).finished


def test_a_call_comes_between_two_steps_of_requests_that_run(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, is_inside = llm.engine.step, False

    def noted() -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return step()
        finally:
            is_inside = False

    monkeypatch.setattr(llm.engine, "step", noted)

    async def ask() -> list[tuple[bool, bool]]:
        task = asyncio.create_task(last_of(llm, prompt(5), SamplingParams(max_tokens=400, ignore_eos=True)))
        await until(lambda: llm.engine.has_work)
        found = [await llm.run(lambda: (is_inside, llm.engine.has_work)) for _ in range(5)]
        await task
        return found

    assert within_patience(ask())[0] == (False, True)


def test_a_call_that_nobody_waits_for_any_more_is_not_made(llm: AsyncLLM) -> None:
    async def given_up() -> list[str]:
        may_go_on, made = threading.Event(), list[str]()
        blocker = asyncio.create_task(llm.run(lambda: may_go_on.wait(PATIENCE)))
        unwanted = asyncio.create_task(llm.run(lambda: made.append("unwanted")))
        await asyncio.sleep(0)
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        await asyncio.sleep(0.01)  # some turns of the loop, in which the engine's side hears of it
        may_go_on.set()
        await blocker
        await llm.run(lambda: made.append("wanted"))
        return made

    assert within_patience(given_up()) == ["wanted"]


def test_calls_that_wait_when_the_engine_ends_fail_and_later_ones_too(tiny: Tiny) -> None:
    llm = AsyncLLM(tiny.folder, **OPTIONS)

    async def late() -> list[Any]:
        is_running, may_go_on = threading.Event(), threading.Event()
        calls = [asyncio.create_task(llm.run(lambda: is_running.set() or may_go_on.wait(PATIENCE)))]
        await until(is_running.is_set)
        llm._worker.inbox.put(None)
        calls.append(asyncio.create_task(llm.run(lambda: 5)))
        await asyncio.sleep(0)
        may_go_on.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = within_patience(late())
    assert first is True and isinstance(second, EngineDead)
    llm.shutdown()
    with pytest.raises(EngineDead):
        within_patience(llm.run(lambda: 5))


def test_prefixes_are_saved_and_loaded_while_requests_run(llm: AsyncLLM, tiny: Tiny, tmp_path: Path) -> None:
    other = AsyncLLM(tiny.folder, **OPTIONS)

    async def both() -> tuple[RequestOutput, int, int, RequestOutput]:
        first = await last_of(llm, prompt(70), GREEDY)
        beside = asyncio.create_task(last_of(llm, prompt(9), GREEDY))
        num_saved = await llm.save_prefixes(tmp_path / "prefixes")
        await beside
        num_loaded = await other.load_prefixes(tmp_path / "prefixes")
        return first, num_saved, num_loaded, await last_of(other, prompt(70), GREEDY)

    first, num_saved, num_loaded, again = within_patience(both())
    assert num_saved == num_loaded >= 4
    assert said(again) == said(first) and again.num_cached_tokens == 64
    with pytest.raises(FileNotFoundError):
        within_patience(other.load_prefixes(tmp_path / "nothing"))
    assert within_patience(last_of(other, prompt(5), GREEDY)).finished
    other.shutdown()
