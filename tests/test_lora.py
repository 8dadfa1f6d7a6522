"""LoRA adapters: what PEFT computes, for each request its own, and no bit of it from its company."""

from __future__ import annotations

import asyncio
import copy
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    DEVICE,
    PLACED,
    VOCAB_SIZE,
    Job,
    Tiny,
    alone,
    check_idle,
    check_outputs,
    finish,
    generated,
    is_same,
    prompt,
    random_jobs,
    run,
    said,
    write_model,
)
from loras import ALL, adapter, tensors_for, write_adapter
from parity import nmse
from parity import prompt as token_ids
from test_models import MODELS
from torch import Tensor

from infinicore import ops
from infinilm import (
    LLM,
    AsyncLLM,
    DynamicCache,
    EngineConfig,
    LoRARequest,
    RequestError,
    SamplingParams,
    load_model,
)
from infinilm.adapters import AdaptedModel, Adapter
from infinilm.engine.engine import Engine
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.lora import read_adapter

pytestmark = pytest.mark.usefixtures("record_at_once")

BAR = 1e-9
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, all layers": ("Llama", {}, {"target_modules": list(ALL)}),
    "llama, a pattern": ("Llama", {}, {"target_modules": r".*\.(q_proj|down_proj)"}),
    "llama, all-linear": ("Llama", {}, {"target_modules": "all-linear"}),
    "llama, rslora": ("Llama", {}, {"target_modules": ATTENTION, "use_rslora": True, "lora_alpha": 3}),
    "llama, ranks of their own": (
        "Llama",
        {"attention_bias": True},
        {
            "target_modules": list(ALL),
            "rank_pattern": {
                "layers.1.self_attn.q_proj": 7,
                "^model.layers.0.mlp.down_proj": 3,
                "down_proj": 2,
            },
            "alpha_pattern": {"o_proj": 5, "model.layers.0.mlp.down_proj": 1},
        },
    ),
    "llama, one layer": ("Llama", {}, {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "qwen2": ("Qwen2", {}, {"target_modules": ["q_proj", "v_proj", "gate_proj"]}),
    "qwen3": ("Qwen3", {"head_dim": 32}, {"target_modules": list(ALL)}),
    "phi3, fused layers": ("Phi3", {}, {"target_modules": "all-linear"}),
    "phi4-mini, fused layers": (
        "Phi3",
        {"partial_rotary_factor": 0.5},
        {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    ),
    "qwen2moe, a shared expert": ("Qwen2Moe", MODELS["qwen2moe"][1], {"target_modules": "all-linear"}),
    "gemma2, all layers": ("Gemma2", {"head_dim": 16}, {"target_modules": "all-linear"}),
    "granite, all layers": ("Granite", MODELS["granite"][1], {"target_modules": list(ALL)}),
    **{name: (*model, {"target_modules": r".*\.self_attn\.\w+_proj"}) for name, model in MODELS.items()},
}


# ---- against PEFT ------------------------------------------------------------------------------------------


def adapted(theirs: Any, folder: Path, seed: int = 0, **options: Any) -> Any:
    """transformers' model with an adapter of PEFT's, which is saved to the folder"""
    import peft  # not where other tests of this file run on a GPU

    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **options})
    model = peft.get_peft_model(copy.deepcopy(theirs), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, adapters: list[Adapter | None], ids: Tensor) -> Tensor:
    """Of streams [B, S], each with its adapter -> [B, S, V]"""
    known = [one for one in adapters if one is not None]
    cache = DynamicCache()
    batch = cache.place([ids.shape[1]] * len(ids), token_ids=ids.flatten())
    rope, rows = model.model.placed(batch.slots, batch.streams)
    places = torch.tensor([-1 if one is None else known.index(one) for one in adapters])
    batch = replace(batch, rope_rows=rows, adapters=places[batch.streams])
    return AdaptedModel(model, known).step(batch, cache, rope)[1].view(*ids.shape, -1)


@pytest.mark.parametrize("name", ["deepseek3", "erniemoe", "qwen3moe"])
@torch.no_grad()
def test_what_chooses_experts_may_be_adapted(name: str, make: Any, tmp_path: Path) -> None:
    """PEFT saw a linear layer there while transformers had one."""
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = tensors_for(model, modules=["gate"])
    path = write_adapter(tmp_path / "adapter", tensors, target_modules=["gate"])
    for key in (key for key in tensors if "lora_A" in key):
        router = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        added = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        theirs.get_submodule(router).weight.add_(2 * added)  # 2: alpha / r
    ids = token_ids()
    found = logits_of(model, [read_adapter(path, model, 64), None], ids)
    assert nmse(found[0], theirs(ids).logits[0]) <= BAR


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_greedy_tokens_are_those_of_peft(name: str, make: Any, tmp_path: Path) -> None:
    kind, sizes, options = KINDS[name]
    base, folder = make(kind, **{"vocab_size": VOCAB_SIZE, **sizes})
    theirs = adapted(base, tmp_path / "adapter", **options)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = read_adapter(tmp_path / "adapter", model, 64)
    ids = token_ids()
    with torch.inference_mode():
        wanted, plain = theirs(ids).logits, base(ids).logits
    assert nmse(plain, wanted) > 1e-3  # it does something
    found = logits_of(model, [ours, None], ids)
    assert nmse(found[0], wanted[0]) <= BAR and nmse(found[1], plain[1]) <= BAR
    greedy = theirs.generate(ids[:1], max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 21:].tolist()
    _, tokenizer = load_model(write_model(tmp_path / "words"))
    engine = Engine(model, tokenizer, EngineConfig(kv_cache_memory="8MB", max_model_len=64))
    lora = LoRARequest("one", 1, tmp_path / "adapter")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = finish(engine, engine.make(ids[0].tolist(), params, lora_request=lora))
    assert output.outputs[0].token_ids == greedy


# ---- in company --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["dense", "q8_0"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model of floats, and one whose weights are in blocks"""
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    quantize = None if request.param == "dense" else request.param
    with pytest.warns(UserWarning, match="stay dense") if quantize else nullcontext():
        return Tiny(folder, *load_model(folder, quantize=quantize, **PLACED))


@pytest.fixture(scope="module")
def loras(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Two, of ranks 4 and 9"""
    folder = tmp_path_factory.mktemp("adapters")
    return [adapter(folder / name, tiny.model, seed, rank) for seed, (name, rank) in enumerate(RANKS.items())]


RANKS = {"small": 4, "large": 9}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)


@pytest.mark.parametrize("num_batched", [512, 24], ids=["whole", "cut"])
def test_two_adapters_and_none_in_one_batch_say_what_each_says_alone(
    num_batched: int, tiny: Tiny, loras: list[LoRARequest], one_thread: None
) -> None:
    jobs = [Job(prompt(50), GREEDY, lora=lora) for lora in (None, *loras, None, *loras)]
    found = [said(request.output()) for request in run(tiny.engine(max_num_batched_tokens=num_batched), jobs)]
    wanted = [said(alone(tiny, job)) for job in jobs]
    assert found == wanted
    assert len({tuple(outputs[0].token_ids) for _, outputs, *_ in found}) == 3


def test_a_request_without_adapter_says_what_it_says_where_none_was_ever_loaded(
    tiny: Tiny, loras: list[LoRARequest], one_thread: None, level: str
) -> None:
    engine, plain = tiny.engine(), Job(prompt(40), GREEDY)
    before = said(alone(tiny, plain))
    generated(engine, prompt(30), lora=loras[0])
    together = [plain, Job(prompt(30), GREEDY, lora=loras[1])]
    assert said(run(engine, together)[0].output()) == before


@pytest.mark.parametrize("seed, is_ahead", [(0, False), (1, False), (2, True)])
def test_every_request_of_a_random_mix_says_what_it_says_alone(
    seed: int, is_ahead: bool, tiny: Tiny, loras: list[LoRARequest], one_thread: None
) -> None:
    """Prompts cut, found in the cache, preempted and given up; adapters and none side by side"""
    rng = random.Random(seed)
    jobs = [
        replace(job, lora=rng.choice([None, *loras]), salt=None)
        for job in random_jobs(rng, 24, 80, 24, arrive_within=20)
    ]
    engine = tiny.engine(num_blocks=20, max_num_batched_tokens=32, is_ahead=is_ahead)
    requests = run(engine, jobs, 3, rng)
    check_idle(engine)
    assert any(request.metrics.num_preemptions for request in requests)
    check_outputs(tiny, jobs, requests)


def test_a_prefix_is_found_by_requests_of_the_same_adapter_alone(
    tiny: Tiny, loras: list[LoRARequest], one_thread: None
) -> None:
    engine = tiny.engine()
    first = [generated(engine, prompt(50), lora=lora) for lora in (None, *loras)]
    assert [output.num_cached_tokens for output in first] == [0, 0, 0]
    again = [generated(engine, prompt(50), lora=lora) for lora in (None, *loras)]
    assert [output.num_cached_tokens for output in again] == [48, 48, 48]
    assert list(map(said, again)) == list(map(said, first))


def test_no_salt_of_a_caller_leads_to_the_blocks_of_an_adapter(tiny: Tiny, loras: list[LoRARequest]) -> None:
    engine = tiny.engine()
    made = engine.make(prompt(4), GREEDY, lora_request=loras[0])
    salt = made.completions[0].salt
    forged = engine.make(prompt(4), GREEDY, cache_salt=salt.decode("latin-1"))
    assert salt != forged.completions[0].salt


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_guesses_change_nothing_of_what_an_adapter_says(
    method: str, tiny: Tiny, loras: list[LoRARequest], one_thread: None
) -> None:
    jobs = [Job(prompt(12) * 3, GREEDY, lora=lora) for lora in (None, *loras)]
    config = {"method": method, "num_speculative_tokens": 3}
    draft = tiny if method == "draft_model" else None
    config |= {"model": "itself"} if draft else {}
    engine = tiny.engine(draft=draft, speculative_config=config)
    check_outputs(tiny, jobs, run(engine, jobs))
    assert engine.counts.draft_tokens > 0


def test_an_embedding_is_of_the_adapter_that_was_asked_for(tiny: Tiny, loras: list[LoRARequest]) -> None:
    engine = tiny.engine()
    made = [engine.make_encoding(prompt(20), lora_request=lora) for lora in (None, *loras)]
    finish(engine, *made)
    states = [request.state() for request in made]
    for lora, state in zip((None, *loras), states, strict=True):
        single = engine.make_encoding(prompt(20), cache_salt="other", lora_request=lora)
        finish(engine, single)
        assert is_same(single.state(), state)
    assert not torch.allclose(states[0], states[1]) and not torch.allclose(states[1], states[2])


def test_steps_without_adapters_are_the_models_own(tiny: Tiny, loras: list[LoRARequest]) -> None:
    """The very recording of before any adapter was loaded"""
    engine = tiny.engine()
    generated(engine, prompt(1), max_tokens=3)
    plain = engine.runner.recordings[1, 1].graph
    generated(engine, prompt(1), lora=loras[0], max_tokens=3)
    generated(engine, prompt(1), max_tokens=3)
    assert engine.runner.recordings[1, 1].graph is plain
    assert engine.runner._adapted is not None
    adapted = engine.runner._adapted.recordings[1, 1].graph
    assert adapted is not plain and (len(adapted) > len(plain) or DEVICE != "cpu")


def hook_a_layer(engine: Engine) -> None:
    engine.model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *call: 2 * call[-1])


def give_a_module_another_forward(engine: Engine) -> None:
    mlp = engine.model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def replace_a_layer(engine: Engine) -> None:
    mlp = engine.model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Tanh())
    assert engine.reset_prefix_cache()


@pytest.mark.parametrize("change", [hook_a_layer, give_a_module_another_forward, replace_a_layer])
def test_what_is_done_to_a_model_is_done_to_steps_with_adapters_alike(change: Any, tmp_path: Path) -> None:
    """An adapter that adds nothing tells whether all else is the same."""
    tiny = Tiny.at(tmp_path / "model")
    weights = {name: torch.zeros_like(weight) for name, weight in tensors_for(tiny.model).items()}
    nothing = LoRARequest("nothing", 1, write_adapter(tmp_path / "nothing", weights))
    engine = tiny.engine(enable_prefix_caching=False)
    before = said(generated(engine, prompt(9), lora=nothing, max_tokens=12))
    change(engine)
    plain = said(generated(engine, prompt(9), max_tokens=12))
    assert said(generated(engine, prompt(9), lora=nothing, max_tokens=12)) == plain != before


# ---- what is kept ------------------------------------------------------------------------------------------


def test_an_adapter_is_read_once_and_the_one_longest_unused_makes_room(
    tiny: Tiny, loras: list[LoRARequest]
) -> None:
    engine = tiny.engine(max_loras=1)
    first = engine.make(prompt(4), GREEDY, lora_request=loras[0]).adapter
    for same in (loras[0], replace(loras[0], lora_path=str(loras[0].lora_path), lora_name="another")):
        assert engine.make(prompt(4), GREEDY, lora_request=same).adapter is first
    both = [Job(prompt(30), GREEDY, lora=lora) for lora in loras]
    check_outputs(tiny, both, run(engine, both))
    assert engine.make(prompt(4), GREEDY, lora_request=loras[0]).adapter is not first


def test_a_folder_that_was_written_anew_is_read_anew_under_another_number(tiny: Tiny, tmp_path: Path) -> None:
    engine, first = tiny.engine(), adapter(tmp_path / "trained", tiny.model, seed=1)
    before = engine.make(prompt(4), GREEDY, lora_request=first).adapter
    second = replace(adapter(tmp_path / "trained", tiny.model, seed=2), lora_int_id=first.lora_int_id + 1)
    jobs = [Job(prompt(30), GREEDY, lora=lora) for lora in (first, second)]
    assert engine.make(prompt(4), GREEDY, lora_request=first).adapter is before
    says, says_now = [said(request.output()) for request in run(engine, jobs)]
    assert says != says_now == said(alone(tiny, jobs[1]))


def test_what_is_no_adapter_request_is_refused(tiny: Tiny, loras: list[LoRARequest]) -> None:
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest, but is 'small'"):
        tiny.engine().make(prompt(4), GREEDY, lora_request="small")
    with pytest.raises(RequestError, match="enable_lora is False"):
        tiny.engine(enable_lora=False).make(prompt(4), GREEDY, lora_request=loras[0])
    with pytest.raises(RequestError, match="rank 9; max_lora_rank is 8"):
        tiny.engine(max_lora_rank=8).make(prompt(4), GREEDY, lora_request=loras[1])
    for wrong in (("", 1, "path"), ("name", 0, "path"), ("name", True, "path"), ("name", 1, "")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*wrong)


# ---- as callers have it ------------------------------------------------------------------------------------


def test_an_llm_takes_an_adapter_for_all_prompts_or_one_for_each(
    tiny: Tiny, loras: list[LoRARequest]
) -> None:
    llm = LLM(tiny.folder, kv_cache_memory="8MB", enable_lora=True, max_loras=4, max_lora_rank=16, **PLACED)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    each = llm.generate(["hello"] * 3, params, lora_request=[None, *loras])
    texts = [output.outputs[0].text for output in each]
    assert len(set(texts)) == 3
    for lora, text in zip([None, *loras], texts, strict=True):
        assert [o.outputs[0].text for o in llm.generate(["hello"] * 2, params, lora_request=lora)] == [
            text
        ] * 2
        assert "".join(part for _, part in llm.stream("hello", params, lora_request=lora)) == text
    messages = [{"role": "user", "content": "hello"}]
    said_by = [llm.chat(messages, params, lora_request=lora)[0].outputs[0].text for lora in (None, *loras)]
    assert len(set(said_by)) == 3
    found = llm.embed(["hello"] * 2, lora_request=[None, loras[0]])
    assert found[0].outputs != found[1].outputs
    with pytest.raises(RequestError, match="lora_request must be one, or one for each of 2 prompts"):
        llm.generate(["a", "b"], lora_request=[loras[0]])
    with pytest.raises(RequestError, match="LoRARequest"):
        llm.generate(["a", "b"], lora_request="small")


def test_an_async_llm_answers_with_several_adapters_at_once(tiny: Tiny, loras: list[LoRARequest]) -> None:
    llm = AsyncLLM(tiny.folder, kv_cache_memory="8MB", **PLACED)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    async def text(lora: LoRARequest | None) -> str:
        outputs = [output async for output in llm.generate("hello", params, lora_request=lora)]
        return outputs[-1].outputs[0].text

    async def together() -> list[str]:
        return await asyncio.gather(*map(text, (None, *loras, None)))

    try:
        found = asyncio.run(together())
        assert [asyncio.run(text(lora)) for lora in (None, *loras, None)] == found
    finally:
        llm.shutdown()
    assert len(set(found)) == 3


# ---- the op ------------------------------------------------------------------------------------------------


def test_an_adapter_or_an_end_out_of_place_is_an_error_and_writes_nothing(level: str) -> None:
    base, x, a, b = torch.zeros(2, 3), torch.ones(2, 4), torch.ones(5, 4), torch.ones(5, 3)
    with pytest.raises(IndexError, match=r"adapter 2 of row 1 is not -1, and outside \[0, 2\)"):
        ops.add_lora(base, x, a, b, torch.tensor([2, 5]), torch.tensor([0, 2]), out=base)
    with pytest.raises(IndexError, match="adapter -2 of row 0"):
        ops.add_lora(base, x, a, b, torch.tensor([2, 5]), torch.tensor([-2, 0]), out=base)
    for ends in ([2, 6], [3, 2], [-1, 5]):
        with pytest.raises(IndexError, match="is before the one in front of it, or beyond the 5 rows of a"):
            ops.add_lora(base, x, a, b, torch.tensor(ends), torch.tensor([0, 1]), out=base)
    assert not base.any()


def test_a_row_has_the_bits_it_has_alone_wherever_it_stands(level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    base, x, a, b = (
        torch.randn(shape, generator=generator) for shape in ((37, 70), (37, 133), (21, 133), (21, 70))
    )
    ends, adapters = torch.tensor([4, 4, 21]), torch.randint(-1, 3, (37,), generator=generator).sort().values
    together = ops.add_lora(base, x, a, b, ends, adapters)
    for row in range(37):
        one = slice(row, row + 1)
        assert torch.equal(ops.add_lora(base[one], x[one], a, b, ends, adapters[one]), together[one])
    assert torch.equal(together[adapters < 0], base[adapters < 0])
