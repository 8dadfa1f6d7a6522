"""AsyncLLM: many coroutines over one engine in a thread, and nobody left waiting whatever happens to it."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import PLACED, Tiny, check_idle, generated, is_beginning, prompt, said
from patience import PATIENCE, until, wait_until, within_patience
from warm import RunPython

from infinilm import (
    AsyncLLM,
    EngineDead,
    QueueFull,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = SamplingParams(seed=1, ignore_eos=True, max_tokens=20, logprobs=1)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)  # minutes
OPTIONS: dict[str, Any] = {"kv_cache_memory": "32MB", "block_size": 16, **PLACED}


@pytest.fixture
def llm(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(folder, **OPTIONS)  # there is no event loop yet
    yield made
    made.shutdown()


async def outputs_of(llm: AsyncLLM, *args: Any, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(*args, **options)]


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of other tests, which may end when they like"""
    monkeypatch.setattr(sys.modules[__name__], "STRANGERS", set(threading.enumerate()))


STRANGERS: set[threading.Thread] = set()


def our_threads() -> list[str]:
    found = set(threading.enumerate()) - STRANGERS
    return [thread.name for thread in found if thread.name.startswith("infinilm")]


# ---- outputs -----------------------------------------------------------------------------------------------


def test_outputs_grow_until_the_last_which_is_what_an_engine_says(llm: AsyncLLM, folder: Path) -> None:
    outputs = within_patience(outputs_of(llm, prompt(30), SAMPLED))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for part, whole in zip(outputs, outputs[1:], strict=False):
        assert is_beginning(part, whole)
        assert whole.outputs[0].text.startswith(part.outputs[0].text)
    tiny = Tiny(folder, llm.model, llm.tokenizer)
    wanted = generated(tiny.engine(), prompt(30), temperature=1.0, seed=1, max_tokens=20, logprobs=1)
    assert said(outputs[-1]) == said(wanted)


def test_many_consumers_get_what_each_gets_alone(llm: AsyncLLM) -> None:
    async def last(i: int) -> Any:
        params = SamplingParams(seed=i, n=1 + i % 3, max_tokens=3 + i % 7, logprobs=i % 2, ignore_eos=True)
        *_, output = await outputs_of(llm, prompt(5 + 3 * i, i), params, priority=i % 2)
        return said(output)

    async def one_after_the_other() -> list[Any]:
        return [await last(i) for i in range(24)]

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(last(i) for i in range(24))))

    assert within_patience(together()) == within_patience(one_after_the_other())
    check_idle(llm.engine)


def test_prompts_may_be_texts_and_mappings(llm: AsyncLLM) -> None:
    for given in ("abc", {"prompt": "abc"}, {"prompt_token_ids": llm.tokenizer.encode("abc")}):
        *_, output = within_patience(outputs_of(llm, given, SAMPLED))
        assert output.prompt_token_ids == llm.tokenizer.encode("abc") and output.finished


def test_a_request_that_was_made_before_is_followed_as_one_that_is_made_now(llm: AsyncLLM) -> None:
    async def followed() -> list[RequestOutput]:
        return [output async for output in llm.follow(llm.engine.make(prompt(30), SAMPLED))]

    *_, now = within_patience(outputs_of(llm, prompt(30), SAMPLED))
    *_, before = within_patience(followed())
    assert said(before) == said(now)
    check_idle(llm.engine)


def test_a_slow_reader_misses_steps_and_never_the_end(llm: AsyncLLM) -> None:
    async def read_slowly() -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate(prompt(5), SAMPLED):
            outputs.append(output)
            await until(lambda: not llm.engine.has_work)
        return outputs

    outputs = within_patience(read_slowly())
    assert len(outputs) <= 3 and outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 20


def test_an_event_loop_is_woken_once_a_step_however_many_listen(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakers, num_steps, step = list[str](), 0, llm.engine.step

    def counted() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    async def listen() -> int:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def noted(*args: Any, **options: Any) -> Any:
            wakers.append(threading.current_thread().name)
            return wake(*args, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
        readers = (outputs_of(llm, prompt(5, i), SAMPLED) for i in range(24))
        return sum(map(len, await asyncio.gather(*readers)))

    monkeypatch.setattr(llm.engine, "step", counted)
    num_read = within_patience(listen())
    assert wakers.count("infinilm-engine") <= num_steps < num_read


# ---- mistakes and limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, options",
    [
        ([[1]], {}),
        (None, {}),
        ([], {}),
        ([99999], {}),
        ("\ud800", {}),
        ([5], {"sampling_params": {"n": 1}}),
        ([5], {"request_id": ["a"]}),
        ([5], {"request_id": 7}),
        ([5], {"priority": "high"}),
        ([5], {"cache_salt": 5}),
        ([5], {"cache_salt": "\ud800"}),
    ],
    ids=repr,
)
def test_a_users_mistake_is_a_request_error_and_harms_nobody(
    given: Any, options: dict[str, Any], llm: AsyncLLM
) -> None:
    with pytest.raises(RequestError):
        within_patience(outputs_of(llm, given, **options))
    assert within_patience(outputs_of(llm, [5], SAMPLED))[-1].finished


def come_during_a_step(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, launch: Callable[[Any], Any], count: int
) -> list[Any]:
    """What becomes of a request, and of others that come before its first step is launched"""
    is_running, may_go_on = threading.Event(), threading.Event()

    def launch_when_told(work: Any) -> Any:
        is_running.set()
        may_go_on.wait(PATIENCE)
        return launch(work)

    monkeypatch.setattr(llm.engine.runner, "launch", launch_when_told)

    async def crowd() -> list[Any]:
        tasks = [asyncio.create_task(outputs_of(llm, prompt(10), SAMPLED))]
        await until(is_running.is_set)
        tasks += [asyncio.create_task(outputs_of(llm, prompt(10, i), SAMPLED)) for i in range(count)]
        await until(lambda: llm._worker.inbox.qsize() == count)
        may_go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return within_patience(crowd())


@pytest.mark.parametrize(
    ("call", "keyword", "way_out"),
    [
        ("generate", {"temperature": 0.0}, "sampling_params has it"),
        ("generate", {"max_new_tokens": 3}, "sampling_params has it, as max_tokens"),
        ("generate", {"prompts": ["a"]}, "it takes one prompt; others may be asked for at once"),
        ("generate", {"messages": []}, "prompt may be what tokenizer.encode_chat makes of messages"),
        ("generate", {"request": "1"}, "did you mean request_id?"),
        ("encode", {"pooling_params": 3}, "states are pooled as the model's files say"),
    ],
    ids=str,
)
def test_keywords_that_others_have_are_refused_with_ours_by_the_call_itself(
    call: str, keyword: dict[str, Any], way_out: str, llm: AsyncLLM
) -> None:
    with pytest.raises(TypeError, match=f"{call} does not know '{next(iter(keyword))}'; {way_out}"):
        getattr(llm, call)("a", **keyword)


def test_keywords_of_others_that_ask_for_nothing_are_taken(llm: AsyncLLM) -> None:
    idle = {"stream": True, "trace_headers": None, "use_tqdm": False}
    outputs = within_patience(outputs_of(llm, [5], SAMPLED, **idle))
    assert said(outputs[-1]) == said(within_patience(outputs_of(llm, [5], SAMPLED))[-1])


@pytest.mark.parametrize("limit", [{"max_queue": 2}, {"max_queue_tokens": 25}], ids=str)
def test_more_than_may_wait_are_turned_away_and_the_others_answered(
    limit: dict[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(folder, **OPTIONS, max_num_seqs=1, **limit)
    found = come_during_a_step(llm, monkeypatch, llm.engine.runner.launch, count=7)
    llm.shutdown()
    turned_away = [each for each in found if isinstance(each, BaseException)]
    assert [type(each) for each in turned_away] == [QueueFull] * 5
    assert all(each[-1].finished for each in found if isinstance(each, list))


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(llm: AsyncLLM) -> None:
    async def both() -> tuple[Any, Any]:
        first = asyncio.create_task(outputs_of(llm, prompt(5), ENDLESS, "a"))
        await until(lambda: "a" in llm.engine.requests)
        with pytest.raises(RequestError, match="request_id 'a' is in use"):
            await outputs_of(llm, prompt(6), SAMPLED, "a")
        (owner,) = llm.engine.requests["a"].completions
        num_tokens = len(owner)
        await until(lambda: len(owner) > num_tokens + 5)
        await llm.abort("a")
        return await first, await outputs_of(llm, prompt(6), SAMPLED, "a")

    first, again = within_patience(both())
    assert first[-1].outputs[0].finish_reason == "abort"
    assert again[-1].outputs[0].finish_reason == "length"


# ---- giving up ---------------------------------------------------------------------------------------------


def test_cancelling_the_consumer_frees_the_request(llm: AsyncLLM) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(outputs_of(llm, prompt(5), ENDLESS))
        await until(lambda: llm.engine.has_work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not llm.engine.has_work)

    within_patience(cancelled())
    check_idle(llm.engine)


@pytest.mark.parametrize("is_made", [False, True])
def test_leaving_the_loop_frees_the_request(llm: AsyncLLM, is_made: bool) -> None:
    async def left() -> None:
        given = prompt(5), ENDLESS
        outputs = llm.follow(llm.engine.make(*given)) if is_made else llm.generate(*given)
        async for _ in outputs:
            break
        await outputs.aclose()  # type: ignore[attr-defined]
        await until(lambda: not llm.engine.has_work)

    within_patience(left())
    check_idle(llm.engine)


def test_a_consumer_whose_loop_ends_leaves_nothing(llm: AsyncLLM) -> None:
    async def begin() -> None:
        task = asyncio.create_task(outputs_of(llm, prompt(5), ENDLESS))
        await until(lambda: llm.engine.has_work)
        del task

    within_patience(begin())
    wait_until(lambda: not llm.engine.has_work)
    check_idle(llm.engine)


@pytest.mark.parametrize("when", ["running", "at once", "while it is encoded"])
def test_an_aborted_request_ends_with_a_last_output(
    when: str, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, may_make = llm.engine.make, threading.Event()

    def slow_make(*args: Any, **options: Any) -> Any:
        may_make.wait(PATIENCE)
        return make(*args, **options)

    async def aborted() -> list[RequestOutput]:
        task = asyncio.create_task(outputs_of(llm, prompt(5), ENDLESS, "a"))
        if when == "running":
            await until(lambda: "a" in llm.engine.requests)
        elif when == "while it is encoded":
            await until(lambda: bool(llm._making))
        else:
            await asyncio.sleep(0)
        await llm.abort("a")
        may_make.set()
        return await task

    monkeypatch.setattr(llm.engine, "make", slow_make)
    if when != "while it is encoded":
        may_make.set()
    output = within_patience(aborted())[-1]
    assert output.finished and output.outputs[0].finish_reason == "abort"
    check_idle(llm.engine)
    assert within_patience(outputs_of(llm, prompt(5), SAMPLED, "a"))[-1].outputs[0].finish_reason == "length"


def test_an_abort_that_met_a_wrong_request_does_not_wait_for_the_next_of_its_name(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, may_make = llm.engine.make, threading.Event()

    def slow_make(*args: Any, **options: Any) -> Any:
        may_make.wait(PATIENCE)
        return make(*args, **options)

    async def refused() -> None:
        task = asyncio.create_task(outputs_of(llm, [], SAMPLED, "a"))
        await until(lambda: bool(llm._making))
        await llm.abort("a")
        may_make.set()
        with pytest.raises(RequestError):
            await task

    monkeypatch.setattr(llm.engine, "make", slow_make)
    within_patience(refused())
    assert within_patience(outputs_of(llm, prompt(5), SAMPLED, "a"))[-1].outputs[0].finish_reason == "length"


def test_whoever_comes_and_goes_when_nobody_is_forgotten_and_the_others_are_not_disturbed(
    folder: Path,
) -> None:
    llm = AsyncLLM(folder, **{**OPTIONS, "kv_cache_memory": "80KB"}, max_num_seqs=6)

    async def come_and_go(i: int) -> Any:
        rng = random.Random(i)
        await asyncio.sleep(rng.random() * 0.3)
        task = asyncio.create_task(outputs_of(llm, prompt(5 + i, i), SAMPLED, str(i)))
        deed = rng.choice(["stay", "cancel", "abort"])
        if deed != "stay":
            await asyncio.sleep(rng.random() * 0.05)
        if deed == "cancel":
            task.cancel()
        if deed == "abort":
            await llm.abort(str(i))
        try:
            return (await task)[-1]
        except asyncio.CancelledError:
            return None

    async def all_of_them() -> list[Any]:
        outputs = await asyncio.gather(*map(come_and_go, range(60)))
        llm._worker.inbox.put((has_obeyed := threading.Event()).set)
        await until(has_obeyed.is_set)
        await until(lambda: not llm.engine.has_work and not llm._worker.listeners)
        return list(outputs)

    outputs = within_patience(all_of_them())
    check_idle(llm.engine)
    assert not llm._making
    ended = [output for output in outputs if output and output.outputs[0].finish_reason == "length"]
    assert len(ended) > 10
    for output in ended:
        wanted = within_patience(outputs_of(llm, output.prompt_token_ids, SAMPLED))[-1]
        assert said(output) == said(wanted)
    llm.shutdown()


def test_aborting_nobody_is_nothing(llm: AsyncLLM) -> None:
    within_patience(llm.abort("nobody"))


def test_a_request_that_has_ended_is_not_let_in_again(llm: AsyncLLM) -> None:
    request = llm.engine.make(prompt(5), SAMPLED)

    async def followed() -> list[RequestOutput]:
        return [output async for output in llm.follow(request)]

    assert within_patience(followed())[-1].finished
    with pytest.raises(RequestError, match="has ended already"):
        within_patience(followed())


@pytest.mark.parametrize("given", [None, ["a"], 5], ids=repr)
def test_what_is_no_id_ends_neither_the_engine_nor_a_request_without_one(given: Any, llm: AsyncLLM) -> None:
    async def beside() -> list[RequestOutput]:
        being_made = asyncio.create_task(outputs_of(llm, prompt(5), SAMPLED))
        await until(lambda: bool(llm._making or llm.engine.requests))
        with pytest.raises(RequestError, match="request_id must be a string"):
            await llm.abort(given)
        return await being_made

    assert within_patience(beside())[-1].outputs[0].finish_reason == "length"
    assert within_patience(outputs_of(llm, prompt(5), SAMPLED))[-1].finished


class Unhashable(str):
    """A text as some libraries have it, equal and without a hash"""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]


class Incomparable(int):
    def __lt__(self, other: object) -> bool:
        raise TypeError("no order")

    __gt__ = __le__ = __ge__ = __lt__


def test_names_and_numbers_of_odd_classes_end_nobody(llm: AsyncLLM) -> None:
    odd = {"request_id": Unhashable("odd"), "cache_salt": Unhashable("salt"), "priority": Incomparable(1)}
    params = SamplingParams(max_tokens=4, stop=[Unhashable("end")])

    async def beside() -> list[list[RequestOutput]]:
        others = [outputs_of(llm, prompt(5), SAMPLED, priority=Incomparable(2)) for _ in range(3)]
        found = await asyncio.gather(outputs_of(llm, prompt(5), params, **odd), *others)
        await llm.abort(Unhashable("nobody"))
        return [*found, await outputs_of(llm, prompt(5), SAMPLED)]

    assert all(outputs[-1].finished for outputs in within_patience(beside()))


def test_a_name_that_a_caller_chose_is_in_nobodys_way(llm: AsyncLLM) -> None:
    async def beside() -> list[RequestOutput]:
        named = [llm.generate(prompt(5), ENDLESS, f"request-{i}") for i in range(1, 9)]
        for each in named:
            await anext(each)
        found = [await outputs_of(llm, prompt(5), SAMPLED) for _ in range(4)]
        for each in named:
            await each.aclose()  # type: ignore[attr-defined]
        return [outputs[-1] for outputs in found]

    outputs = within_patience(beside())
    assert all(output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 4


# ---- death -------------------------------------------------------------------------------------------------


def test_whoever_the_engine_dies_of_letting_in_hears_of_it(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: Any) -> None:
        raise MemoryError("no memory for another")

    monkeypatch.setattr(llm.engine, "enqueue", fail)
    with pytest.raises(MemoryError, match="no memory for another"):
        within_patience(outputs_of(llm, prompt(5), SAMPLED))
    wait_until(lambda: llm.death is not None)


def test_who_waited_to_be_encoded_hears_of_the_shutdown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(folder, **OPTIONS)
    make, may_go_on = llm.engine.make, threading.Event()

    def make_when_told(*args: Any, **options: Any) -> Any:
        may_go_on.wait(PATIENCE)
        return make(*args, **options)

    monkeypatch.setattr(llm.engine, "make", make_when_told)

    async def cut_off() -> list[Any]:
        tasks = [asyncio.create_task(outputs_of(llm, prompt(5), SAMPLED)) for _ in range(5)]
        await until(lambda: len(llm._making) == len(tasks))
        llm.shutdown()
        may_go_on.set()
        await asyncio.wait(tasks)
        return [not task.cancelled() and type(task.exception()) for task in tasks]

    assert within_patience(cut_off()) == [EngineDead] * 5


def test_the_engines_own_thread_may_shut_it_down(llm: AsyncLLM) -> None:
    assert within_patience(llm.run(llm.shutdown)) is None
    wait_until(lambda: llm.death is not None)


def test_a_thread_for_masks_that_cannot_start_is_the_failure_of_its_request_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith("infinilm-masks"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            within_patience(outputs_of(llm, prompt(5), params))
    assert llm.death is None and within_patience(outputs_of(llm, prompt(5), params))


def test_when_the_engine_dies_everybody_hears_why_and_so_do_later_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(folder, **OPTIONS, max_num_seqs=2)
    run, may_die = llm.engine.runner.launch, threading.Event()

    def fail(work: Any) -> Any:
        if may_die.is_set():
            raise OSError("no light")
        return run(work)

    monkeypatch.setattr(llm.engine.runner, "launch", fail)

    async def all_fail() -> list[Any]:
        tasks = [asyncio.create_task(outputs_of(llm, prompt(5, i), ENDLESS)) for i in range(6)]
        await until(lambda: len(llm.engine.requests) == 6)
        may_die.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in within_patience(all_fail()):
        assert type(error) is EngineDead and isinstance(error.__cause__, OSError)
        assert "no light" in str(error)
    for call in (lambda: outputs_of(llm, [5], SAMPLED), lambda: llm.abort("a")):
        with pytest.raises(EngineDead, match="no light"):
            within_patience(call())
    llm.shutdown()


def test_requests_that_the_engine_had_not_heard_of_when_it_died_fail_as_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(folder, **OPTIONS)

    def fail(work: Any) -> Any:
        raise OSError("no light")

    found = come_during_a_step(llm, monkeypatch, fail, count=3)
    assert [type(error) for error in found] == [EngineDead] * 4


def test_an_error_in_a_step_is_told_as_death_to_whoever_waits_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(folder, **OPTIONS)

    def fail() -> Any:
        raise OSError("no light")

    async def wait_for_it() -> None:
        impatient = asyncio.create_task(llm.died())
        await asyncio.sleep(0)
        impatient.cancel()  # harms nobody else who waits
        death = asyncio.create_task(llm.died())
        await outputs_of(llm, prompt(5), SAMPLED)
        assert llm.death is None and not death.done()
        monkeypatch.setattr(llm.engine, "step", fail)
        calls = (outputs_of(llm, prompt(5), SAMPLED), llm.encode(prompt(5)))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, EngineDead) and error.__cause__ is llm.death
        assert await death is llm.death is await llm.died()
        assert str(llm.death) == "no light"

    within_patience(wait_for_it())
    llm.shutdown()


def test_shutdown_is_an_end_too(folder: Path) -> None:
    llm = AsyncLLM(folder, **OPTIONS)
    assert llm.death is None
    llm.shutdown()
    assert isinstance(within_patience(llm.died()), EngineDead) and isinstance(llm.death, EngineDead)


def test_a_loop_that_is_stuck_holds_up_nobody_and_nothing_piles_up_for_it(llm: AsyncLLM) -> None:
    may_go_on = threading.Event()

    async def get_stuck() -> RequestOutput:
        outputs = llm.generate(prompt(5), SamplingParams(max_tokens=300, ignore_eos=True))
        await anext(outputs)
        may_go_on.wait(PATIENCE)
        (output,) = [output async for output in outputs]
        return output

    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(within_patience, get_stuck())
        wait_until(lambda: llm._worker.listeners)
        for i in range(3):
            assert within_patience(outputs_of(llm, prompt(9, i), SAMPLED))[-1].finished
        wait_until(lambda: not llm.engine.has_work)  # to the end, though nobody has read it
        may_go_on.set()
        assert len(stuck.result(PATIENCE).outputs[0].token_ids) == 300


def test_a_loop_that_was_closed_in_the_midst_of_an_answer_ends_the_request(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    outputs = [llm.generate(prompt(5, i), ENDLESS) for i in range(3)]
    for each in outputs:
        loop.run_until_complete(anext(each))
    loop.close()
    wait_until(lambda: not llm.engine.has_work)
    check_idle(llm.engine)
    assert not llm._worker.listeners
    assert within_patience(outputs_of(llm, prompt(5), SAMPLED))[-1].finished


def test_after_shutdown_what_waited_has_failed_and_no_thread_is_left(folder: Path) -> None:
    llm = AsyncLLM(folder, **OPTIONS)

    async def cut_off() -> None:
        task = asyncio.create_task(outputs_of(llm, prompt(5), ENDLESS))
        await until(lambda: llm.engine.has_work)
        llm.shutdown()
        with pytest.raises(EngineDead, match="shut down"):
            await task
        with pytest.raises(EngineDead, match="shut down"):
            await outputs_of(llm, prompt(5), SAMPLED)

    within_patience(cut_off())
    llm.shutdown()
    wait_until(lambda: not our_threads())


def test_threads_that_make_masks_end_with_the_engine(folder: Path) -> None:
    llm = AsyncLLM(folder, **OPTIONS)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert within_patience(outputs_of(llm, prompt(5), params))[-1].outputs[0].text in ("yes", "no")
    llm.shutdown()
    wait_until(lambda: not our_threads(), 10)


def test_an_llm_that_nobody_holds_ends_its_threads(folder: Path) -> None:
    llm = AsyncLLM(folder, **OPTIONS)
    within_patience(outputs_of(llm, prompt(5), SAMPLED))
    assert our_threads()
    del llm
    gc.collect()
    wait_until(lambda: not our_threads())


# Ends, with or without an error of its own, while the engine's thread is within a kernel.
LEFT_AT_WORK = """
import asyncio, sys, time
import torch
from infinicore import ops
from infinilm import AsyncLLM

llm, x, begun = AsyncLLM(sys.argv[1], kv_cache_memory="1MB"), torch.ones(512, 512), []

def work():
    begun.append(True)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        ops.linear(x, x, None)

async def leave():
    asyncio.create_task(llm.run(work))
    while not begun:
        await asyncio.sleep(0.01)

asyncio.run(leave())
sys.exit(3)
"""


def test_a_script_that_ends_while_the_engine_works_ends_as_it_says(
    folder: Path, run_python: RunPython
) -> None:
    child = run_python(LEFT_AT_WORK, str(folder))
    assert child.returncode == 3, child.stderr


# Ends while the engine's thread, which was left alone with the model, frees it: as slowly as a large one.
LEFT_ALONE = """
import sys, threading, time
from infinilm import AsyncLLM

begun = threading.Event()

class Large:
    def __del__(self):
        begun.set()
        time.sleep(0.3)
        print("freed", flush=True)

llm = AsyncLLM(sys.argv[1], kv_cache_memory="1MB")
llm.model.large = Large()
del llm
begun.wait()
"""


def test_a_script_ends_after_a_model_that_nobody_holds_is_freed(folder: Path, run_python: RunPython) -> None:
    child = run_python(LEFT_ALONE, str(folder))
    assert (child.returncode, child.stdout) == (0, "freed\n"), child.stderr


FORKED = """
import asyncio, os, sys
from infinilm import AsyncLLM, EngineDead, SamplingParams

llm = AsyncLLM(sys.argv[1], kv_cache_memory="1MB")

async def last():
    *_, output = [each async for each in llm.generate([5], SamplingParams(seed=1, max_tokens=5))]
    return output.outputs[0].token_ids

def is_refused(call):
    try:
        asyncio.run(call)
    except EngineDead as error:
        return "fork" in str(error)

wanted = asyncio.run(last())
child = os.fork()
if child == 0:
    calls = [last(), llm.abort("a"), llm.encode([5]), llm.run(list), llm.died()]
    is_good = all(map(is_refused, calls))
    llm.shutdown()
    del llm
    os._exit(not is_good)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), asyncio.run(last()) == wanted)
"""


def test_in_a_fork_calls_raise_and_do_not_hang_and_the_parent_goes_on(
    folder: Path, run_python: RunPython
) -> None:
    child = run_python(FORKED, str(folder))
    assert child.stdout == "0 True\n", child.stderr
