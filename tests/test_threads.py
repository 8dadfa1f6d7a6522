"""Several threads may run one model, or one each, and get what they get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinicore
from infinicore import ops
from infinicore.graph import Graph
from infinicore.nn import functional as F
from infinicore.ops.native import count_products, read_all
from infinicore.quantization import BlockType, quantize
from infinilm import LLM, SamplingParams
from infinilm.config import LlamaConfig
from infinilm.models.llama import LlamaForCausalLM

NUM_THREADS = 4


def tiny_model(**options: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **options)).eval()


# Short frequencies up to 16 positions, others beyond, so that two prompts want other tables.
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "longrope": {"rope_scaling": LONGROPE},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
}


def in_threads(task: Callable[[int], Any]) -> list[Any]:
    """What the task makes of each thread's number, all begun at the same moment"""
    gate = threading.Barrier(NUM_THREADS)

    def run(i: int) -> Any:
        gate.wait()
        return task(i)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(run, range(NUM_THREADS)))


def tiny_requests(model: LlamaForCausalLM, thread: int) -> list[list[int]]:
    """Tokens of prompts of several lengths, one of them beyond the first rope tables"""
    prompts = [[(7 * thread + i * j) % 64 for j in range(length)] for i, length in enumerate((5, 600, 30))]
    return [model.generate([ids], max_new_tokens=12)[0].tolist() for ids in prompts]


@pytest.mark.parametrize("kind", MODELS)
def test_threads_that_share_a_model_get_the_tokens_they_get_alone(kind: str) -> None:
    wanted = [tiny_requests(tiny_model(**MODELS[kind]), i) for i in range(NUM_THREADS)]
    for _ in range(2):
        model = tiny_model(**MODELS[kind])  # a new one, whose tables have yet to grow
        assert in_threads(partial(tiny_requests, model)) == wanted


def test_threads_with_a_model_each_get_the_tokens_they_get_alone() -> None:
    models = [tiny_model() for _ in range(NUM_THREADS)]
    wanted = [tiny_requests(model, i) for i, model in enumerate(models)]
    for _ in range(2):
        assert in_threads(lambda i: tiny_requests(models[i], i)) == wanted


@pytest.fixture(scope="module")
def llms(default_model_path: Path) -> list[LLM]:
    return [LLM(default_model_path) for _ in range(2)]


@pytest.mark.parametrize("num_llms", [1, 2])
def test_threads_with_the_default_model_get_the_tokens_they_get_alone(num_llms: int, llms: list[LLM]) -> None:
    for llm in llms:
        llm.reset_prefix_cache()

    def ask(i: int) -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        prompts = [f"Thread {i} counts: {j}," for j in range(2)]
        return [out.outputs for out in llms[i % num_llms].generate(prompts, params)]

    wanted = [ask(i) for i in range(NUM_THREADS)]
    assert in_threads(ask) == wanted


def test_what_another_thread_runs_is_not_recorded() -> None:
    x, y = torch.randn(2, 3, 8)

    def step() -> torch.Tensor:
        other = threading.Thread(target=F.silu, args=(y,))
        other.start()
        other.join()
        return F.silu(x)

    assert len(Graph.record(step)) == 1


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_a_run_in_the_midst_of_another_leaves_its_angles_alone(kind: str) -> None:
    model = tiny_model(**MODELS[kind])
    short, long = torch.arange(8)[None], torch.arange(40)[None]
    wanted = model(short)
    inner: list[torch.Tensor] = []

    def run_inside(*_: Any) -> None:
        if not inner:
            inner.append(torch.empty(0))
            inner.append(model(long))

    model.model.layers[1].register_forward_pre_hook(run_inside)
    assert torch.equal(model(short), wanted)
    assert torch.equal(inner[1], model(long))


def test_streams_taken_in_turns_on_one_thread_do_not_disturb_each_other(llms: list[LLM]) -> None:
    llm, params = llms[0], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [llm.tokenizer.encode(text) for text in ("One, two,", "The sky is")]
    alone = [list(llm.stream(ids, params)) for ids in prompts]
    together = list(zip(*(llm.stream(ids, params) for ids in prompts), strict=True))
    assert list(map(list, zip(*together, strict=True))) == alone


def test_a_thread_that_goes_on_to_the_next_region_begins_it_anew(keep_threads: None) -> None:
    """A lone row is rounded by each thread for itself: one that took that for done would use another row."""
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(8192, 64, generator=generator), BlockType.Q8_0).pack()
    rows = torch.randn(50, 1, 64, generator=generator)

    def products() -> list[Tensor]:
        return [ops.packed_linear(row, (weight,), (None,), None) for row in rows]

    infinicore.set_num_threads(1)
    wanted = products()
    infinicore.set_num_threads(NUM_THREADS)
    graph = Graph.record(products)
    for _ in range(400):
        assert all(map(torch.equal, graph.replay(), wanted))


def test_threads_take_denormals_as_their_caller_does(keep_threads: None) -> None:
    """Workers are there before the caller changes its mind."""
    x, weight = torch.randn(64, 256) * 1e-20, torch.randn(512, 256) * 1e-19
    infinicore.set_num_threads(NUM_THREADS)
    plain = F.linear(x, weight)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        found = [F.linear(x, weight) for _ in range(20)]
        infinicore.set_num_threads(1)
        alone = F.linear(x, weight)
    finally:
        torch.set_flush_denormal(False)
    assert not torch.equal(plain.view(torch.int32), alone.view(torch.int32))
    assert all(torch.equal(y.view(torch.int32), alone.view(torch.int32)) for y in found)


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_every_item_of_regions_large_and_small_is_done_once(count: int, keep_threads: None) -> None:
    """A region begins while threads may still be leaving the one before, or sleep."""
    infinicore.set_num_threads(count)
    sums = [torch.zeros(num_pieces, 4096) for num_pieces in (2, 3, 17, 1, 64, 5)]
    ones = [torch.ones_like(total) for total in sums]
    graph = Graph.record(lambda: [ops.add(s, one, out=s) for s, one in zip(sums, ones, strict=True)])
    for _ in range(499):
        graph.replay()
    assert all(bool((total == 500).all()) for total in sums)


def test_products_are_counted_by_rounds_and_threads(level: str, keep_threads: None) -> None:
    infinicore.set_num_threads(1)
    one = count_products(1)
    assert one > 0 and count_products(7) == 7 * one and count_products(0) == 0
    infinicore.set_num_threads(3)
    assert count_products(7) == 21 * one
    with pytest.raises(ValueError, match="expected 0 to 2\\^30 rounds"):
        count_products(-1)


@pytest.mark.parametrize("length", [0, 7, 8, 200_003])
def test_every_word_is_read_whichever_are_asked_for_early(length: int) -> None:
    words = torch.arange(length) * 3
    assert {read_all(words, ahead) for ahead in (None, 0, 512, 8192)} == {int(words.sum())}
