"""A stream's logits are the same bits alone, in any batch, its prompt cut anyhow, on any threads.

At the level that callers get here for the built-in model and tiny ones of every type, at the others for tiny
ones of each way to multiply; test_matmul.py has every type at every level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from conftest import LEVELS, at_level
from gguf_files import llama_weights, write_folder
from torch import Tensor

import infinicore
from infinicore import _native, nn, ops
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType
from infinilm import DynamicCache, cache
from infinilm.batch import Stream
from infinilm.config import LlamaConfig
from infinilm.models.llama import LlamaForCausalLM
from infinilm.sampling import SamplingParams
from infinilm.work import Work

pytestmark = pytest.mark.usefixtures("record_at_once")

LENGTH, FEW = 40, 7
NUM_REAL_LAYERS = 3
DEFAULT = ["default float32", "default int16", "default int8"]
DENSE = ["safetensors float32", "safetensors bfloat16", "safetensors float16"]
BITS = {"float32": 32, "int16": 16, "int8": 8}
BLOCKS = [f"{block_type.name} {bits}" for block_type in BlockType for bits in BITS] + ["Q4_0 int12"]
BEST = _native.isa_levels()[-1]
# The ways to multiply, whatever the numbers of a matrix are packed in
WAYS = DENSE + [name for name in BLOCKS if name.startswith("Q4_0")]
EVERY_WAY = [f"{name} {BEST}" for name in DEFAULT] + [f"{name} {level}" for name in WAYS for level in LEVELS]
EVERY_TYPE = EVERY_WAY + [f"{name} {BEST}" for name in BLOCKS if name not in WAYS]


@pytest.fixture(scope="module", params=EVERY_TYPE)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaForCausalLM]:
    """The first layers of the built-in model, and tiny ones of every type that weights are stored in."""
    kind, detail, level = request.param.split()
    with at_level(level):
        if kind == "default":
            yield first_layers(request.getfixturevalue("default_model_path"), detail)
        elif kind == "safetensors":
            yield dense_model(tmp_path_factory.mktemp("dense"), getattr(torch, detail))
        else:
            yield block_model(BlockType[kind], BITS.get(detail, 12))


def is_tiny(model: LlamaForCausalLM) -> bool:
    return len(model.model.layers) == 2


def first_layers(path: Path, activations: str) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(path, activations=activations)
    model.model.layers = model.model.layers[:NUM_REAL_LAYERS]
    return model


def dense_model(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    weights = {name: weight.to(dtype) for name, weight in llama_weights().items()}
    return LlamaForCausalLM.from_pretrained(write_folder(folder, weights))


def block_model(block_type: BlockType, activation_bits: int) -> LlamaForCausalLM:
    """Of random blocks, its rows long enough for every type."""
    config = LlamaConfig(
        vocab_size=72,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            num_rows, length = module.weight.shape
            weight = random_blocks(block_type, num_rows, length // block_type.elements_per_block)
            module.set_weight(weight if activation_bits == 32 else weight.pack(activation_bits))
    return model.eval()


def prompt(model: LlamaForCausalLM, stream: int = 0, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(stream)
    return torch.randint(0, model.config.vocab_size, (1, length), generator=generator)


def all_logits(model: LlamaForCausalLM, token_ids: Tensor, *chunks: int) -> Tensor:
    """Logits of every position, the prompt fed in chunks of these sizes and then whole"""
    held, parts, start = DynamicCache(dtype=model.cache_dtype), [], 0
    for size in (*chunks, token_ids.shape[1] - sum(chunks)):
        part = token_ids[:, start : start + size]
        parts.append(model(part, past_key_values=held, logits_to_keep=0))
        start += size
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def test_logits_do_not_depend_on_the_batch(model: LlamaForCausalLM) -> None:
    """In small batches of many sizes, so that their rows leave every rest of a tile, and in a large one"""
    is_quick = is_tiny(model) and _native.isa() == BEST
    for length, batch_sizes in {FEW: range(2, 18) if is_quick else (2, 5), LENGTH: (7,)}.items():
        alone = all_logits(model, prompt(model, 0, length))
        for batch_size in batch_sizes:
            batch = torch.cat([prompt(model, i, length) for i in reversed(range(batch_size))])
            assert torch.equal(all_logits(model, batch)[-1:], alone)


@torch.inference_mode()
def test_logits_do_not_depend_on_how_the_prompt_is_cut(model: LlamaForCausalLM) -> None:
    whole = all_logits(model, prompt(model))
    for chunks in ((1,) * 4, (7, 16, 3), (39,)):
        assert torch.equal(all_logits(model, prompt(model), *chunks), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_a_model_in_half_precision_gives_the_same_bits_however_it_is_fed(
    dtype: torch.dtype, level: str, keep_threads: None, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(write_folder(tmp_path, llama_weights()), dtype=dtype)
    whole = all_logits(model, prompt(model))
    assert whole.dtype == dtype
    for chunks in ((1,), (7, 16, 3), (1,) * 39):
        assert torch.equal(all_logits(model, prompt(model), *chunks), whole)
    for batch_size in (2, 5, 17):
        batch = torch.cat([prompt(model, i) for i in range(1, batch_size)] + [prompt(model)])
        assert torch.equal(all_logits(model, batch)[-1:], whole)
    for count in (1, 3):
        infinicore.set_num_threads(count)
        assert torch.equal(all_logits(model, prompt(model)), whole)


@pytest.mark.parametrize("model", EVERY_WAY, indirect=True)
@torch.inference_mode()
def test_logits_do_not_depend_on_how_attention_is_cut(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.cat([prompt(model), prompt(model, 1)])
    whole = all_logits(model, batch)
    monkeypatch.setattr(cache, "CALL_WORK", 1)  # 16 tokens a call, the least there is
    assert torch.equal(all_logits(model, batch), whole)


def test_a_soft_cap_and_sinks_reach_attention_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    held, (q, k, v) = DynamicCache(16), torch.randn(3, 40, 4, 32, generator=generator)
    batch = held.place([40])
    pools = held.room(0, batch, (4, 32), k)
    places = batch.block_tables, batch.streams, batch.slots
    ops.store_kv(*pools, k, v, *places, out=pools)
    sinks = torch.linspace(-1, 1, 4)
    whole = cache.attend(pools, q, batch, 0.2, 30, softcap=1.5, sinks=sinks)
    wanted = ops.attention.reference(q, *pools, *places, 0.2, 30, 1.5, sinks)
    torch.testing.assert_close(whole, wanted, rtol=2e-5, atol=2e-6)
    monkeypatch.setattr(cache, "CALL_WORK", 1)
    assert torch.equal(cache.attend(pools, q, batch, 0.2, 30, softcap=1.5, sinks=sinks), whole)


@torch.inference_mode()
def test_logits_do_not_depend_on_the_threads(model: LlamaForCausalLM, keep_threads: None) -> None:
    results = []
    for count in (1, 2, 3):
        infinicore.set_num_threads(count)
        results.append(all_logits(model, prompt(model)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("head_dim", [64, 100])
def test_angles_do_not_depend_on_torchs_threads_or_on_those_beside_them(
    head_dim: int, keep_threads: None
) -> None:
    """Rope tables grow with the longest text there was, and some are made for a few positions alone."""
    rope = LlamaConfig(head_dim=head_dim).rope
    torch.set_num_threads(1)
    whole = rope.tables(1, torch.arange(4096))
    torch.set_num_threads(3)
    for start, end in ((0, 4096), (0, 1024), *((i, i + 3) for i in range(0, 4000, 37))):
        for found, wanted in zip(rope.tables(1, torch.arange(start, end)), whole, strict=True):
            assert torch.equal(found, wanted[start:end])


@torch.inference_mode()
def test_replayed_decoding_gives_the_bits_of_a_prefill(model: LlamaForCausalLM) -> None:
    whole = all_logits(model, prompt(model))
    for batch_size in (1, 3):
        batch = prompt(model).expand(batch_size, LENGTH)
        steps = Steps(model, batch[:, :20])
        for i in range(20, LENGTH):
            assert torch.equal(steps.replayed(batch[:, i].tolist())[-1], whole[0, i])


@pytest.mark.parametrize("model", EVERY_WAY, indirect=True)
@torch.inference_mode()
def test_recordings_made_anew_as_rope_tables_grow_give_the_bits_of_plain_steps(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.cat([prompt(model), prompt(model, 1)])
    plain, recorded = Steps(model, batch), Steps(model, batch)
    monkeypatch.setattr(model.model.rope_instance, "num_positions", LENGTH + 8)  # as if tables ended there
    graphs = []
    for i in range(16):
        tokens = [i % 40, 3 * i % 40]
        assert torch.equal(recorded.replayed(tokens), plain.plain(tokens))
        if recorded.graph not in graphs:
            graphs.append(recorded.graph)
    assert len(graphs) == 2


class Steps:
    """A batch after its prompts, one step after the other: the logits [B, V] after a token of each stream"""

    def __init__(self, model: LlamaForCausalLM, prompts: Tensor) -> None:
        params = SamplingParams(temperature=0.0)
        self.streams = [Stream(ids, params) for ids in prompts.tolist()]
        self.runner = model.runner(self.streams, LENGTH)
        self.runner.run(self.work())

    def replayed(self, tokens: list[int]) -> Tensor:
        self.runner.run(self.work(tokens))
        self.graph = self.runner.recordings[len(tokens), len(tokens)].graph
        return self.graph.result[1]

    def plain(self, tokens: list[int]) -> Tensor:
        work = self.work(tokens)
        self.runner.tables.show(work)
        return self.runner._outcome(work)[1]

    def work(self, tokens: Sequence[int] = ()) -> list[Work]:
        """All before the tokens has been computed."""
        for stream, token in zip(self.streams, tokens, strict=False):
            stream.num_computed = len(stream)
            stream.token_ids.append(token)
        return [Work(stream, stream.num_pending) for stream in self.streams]
