"""Every model says on a GPU what it says on a CPU, in float32 but for rounding: its logits whole and in
pieces, and its tokens through an engine; in blocks, with adapters, as an embedder. In deterministic engines
a request has the bits it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import VOCAB_SIZE, finish, prompt, write_model
from loras import adapter
from parity import nmse
from parity import prompt as token_ids
from test_models import MODELS, QWEN_EXPERTS, has_experts, write_mxfp4
from torch import Tensor

import infinicore
from infinilm import LLM, DynamicCache, EngineConfig, RequestOutput, SamplingParams, load_model
from infinilm.checkpoint.staging import Staging
from infinilm.engine.engine import Engine
from infinilm.models import registry
from infinilm.models.llama import LlamaForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("record_at_once"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

FLOAT32_BAR, BFLOAT16_BAR = 1e-9, 1e-3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    **MODELS,
}
# One or two layers as wide as those of models that people have
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2 2b": (
        "Gemma2",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 20,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "hidden_size": 2880,
            "intermediate_size": 704,
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "sliding_window": 20,
        },
    ),
    "qwen3 30b-a3b": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 1,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
}


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, sizes: list[int]) -> Tensor:
    """Of two streams, fed in pieces of these sizes"""
    held, parts = DynamicCache(), token_ids(2, sum(sizes)).to(model.device).split(sizes, dim=1)
    return torch.cat([model(part, past_key_values=held, logits_to_keep=0) for part in parts], 1).float().cpu()


def on_cpu(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return logits_of(LlamaForCausalLM.from_pretrained(folder, dtype=dtype, **options), [30])


def check_logits(folder: Path, dtype: torch.dtype, bar: float, **options: Any) -> None:
    """Against those of a CPU in float32"""
    wanted = on_cpu(folder, **options)
    model = LlamaForCausalLM.from_pretrained(folder, device="cuda", dtype=dtype, **options)
    for sizes in ([30], [10, 3, *[1] * 17]):
        assert nmse(logits_of(model, sizes), wanted) <= bar


def test_every_model_that_is_registered_is_tried_here() -> None:
    for name in registry.FILES:
        registry.import_module(f"infinilm.models.{name}")
    known = {entry.model_class.__name__ for entry in registry.ENTRIES}
    assert known == {f"{kind}ForCausalLM" for kind, _ in KINDS.values()}


@pytest.mark.parametrize("name", KINDS)
def test_logits_in_float32_are_those_of_a_cpu(name: str, make: Any) -> None:
    kind, options = KINDS[name]
    check_logits(make(kind, **options)[1], torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("name", WIDE)
def test_logits_of_layers_as_wide_as_people_have_them_are_those_of_a_cpu(name: str, make: Any) -> None:
    kind, options = WIDE[name]
    check_logits(make(kind, initializer_range=0.02, **options)[1], torch.float32, FLOAT32_BAR)


NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def all_chosen(name: str) -> dict[str, Any]:
    """As many experts as there are: where a few are chosen, rounding may tip a token over to others."""
    options = KINDS[name][1]
    if not has_experts(options):
        return options
    count = next(options[key] for key in NUM_EXPERTS if key in options)
    chosen = {"moe_k" if "moe_k" in options else "num_experts_per_tok": count}
    return {**options, **chosen, **({"topk_group": options["n_group"]} if "n_group" in options else {})}


@pytest.mark.parametrize("name", KINDS)
def test_logits_in_bfloat16_are_near_those_of_a_cpu_in_float32(name: str, make: Any) -> None:
    """As near as a CPU's are in bfloat16, where rounding adds up to more over many layers"""
    sizes = {"initializer_range": 0.1, **all_chosen(name)}
    _, folder = make(KINDS[name][0], torch.bfloat16, **sizes)
    rounding = nmse(on_cpu(folder, torch.bfloat16), on_cpu(folder))
    check_logits(folder, torch.bfloat16, max(BFLOAT16_BAR, 3 * rounding))


# ---- through an engine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(write_model(tmp_path_factory.mktemp("words")), device="cpu")[1]


def engine_of(folder: Path, tokenizer: Any, device: str, dtype: str = "float32", **options: Any) -> Engine:
    model = LlamaForCausalLM.from_pretrained(folder, device=device, dtype=dtype)
    config = EngineConfig(kv_cache_memory="32MB", max_num_seqs=8, max_model_len=60, **options)
    return Engine(model, tokenizer, config)


def answers(engine: Engine, prompts: list[list[int]], **params: Any) -> list[RequestOutput]:
    """To all of them at once"""
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20, **params}
    loras = params.pop("loras", [None] * len(prompts))
    settings = SamplingParams(**params)
    pairs = zip(prompts, loras, strict=True)
    return finish(engine, *(engine.make(ids, settings, lora_request=lora) for ids, lora in pairs))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


PROMPTS = [prompt(length, seed) for seed, length in enumerate((3, 24, 9, 40, 1))]


@pytest.mark.parametrize("name", KINDS)
def test_an_engine_draws_the_tokens_that_it_draws_on_a_cpu(name: str, make: Any, tokenizer: Any) -> None:
    """Prompts side by side and cut, longer than a window, replayed"""
    kind, options = KINDS[name]
    _, folder = make(kind, **{**options, "vocab_size": VOCAB_SIZE})
    sizes = {"max_num_batched_tokens": 48}
    engine = engine_of(folder, tokenizer, "cuda", **sizes)
    assert tokens_of(answers(engine, PROMPTS)) == tokens_of(
        answers(engine_of(folder, tokenizer, "cpu", **sizes), PROMPTS)
    )
    assert any(size == rows for size, rows in engine.runner.recordings)


ALONE = ["llama", "phi3, window", "gemma2", "gemma3", "qwen3moe", "mixtral", "gptoss"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALONE)
def test_in_a_deterministic_engine_a_request_has_the_bits_it_has_alone(
    name: str, dtype: str, make: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infinicore, "deterministic", False)  # which it is again when this has ended
    kind, options = KINDS[name]
    _, folder = make(kind, **{**options, "vocab_size": VOCAB_SIZE})
    sizes = {"deterministic": True, "enable_prefix_caching": False, "max_num_batched_tokens": 48}
    engine = engine_of(folder, tokenizer, "cuda", dtype, **sizes)
    asked = {"logprobs": 3, "prompt_logprobs": 1}
    together = answers(engine, PROMPTS, **asked)
    for ids, output in zip(PROMPTS, together, strict=True):
        (alone,) = answers(engine, [ids], **asked)
        assert alone.outputs == output.outputs and alone.prompt_logprobs == output.prompt_logprobs


# ---- weights in blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["Gemma2", "Granite", "Olmo2"])
def test_models_in_blocks_have_the_logits_of_the_same_blocks_on_a_cpu(
    kind: str, quantize: str, make: Any
) -> None:
    _, folder = make(kind, intermediate_size=128, head_dim=16)
    check_logits(folder, torch.float32, FLOAT32_BAR, quantize=quantize)


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
@pytest.mark.parametrize("dtype, bar", [(torch.float32, FLOAT32_BAR), (torch.bfloat16, BFLOAT16_BAR)])
def test_experts_in_blocks_have_the_logits_of_the_same_blocks_on_a_cpu(
    dtype: torch.dtype, bar: float, quantize: str, make: Any
) -> None:
    sizes = {**QWEN_EXPERTS, "num_experts_per_tok": 6, "moe_intermediate_size": 64}
    _, folder = make("Qwen3Moe", dtype, initializer_range=0.1, **sizes)
    check_logits(folder, dtype, bar, quantize=quantize)


@pytest.mark.filterwarnings("ignore:.* matrices stay dense")
def test_experts_may_be_partly_in_blocks_and_end_within_a_tile(make: Any) -> None:
    _, folder = make("Qwen3Moe", **QWEN_EXPERTS)
    check_logits(folder, torch.float32, FLOAT32_BAR, quantize="q8_0")


def test_experts_in_blocks_say_why_their_steps_are_not_recorded(make: Any, tokenizer: Any) -> None:
    sizes = {**QWEN_EXPERTS, "moe_intermediate_size": 64, "vocab_size": VOCAB_SIZE}
    _, folder = make("Qwen3Moe", **sizes)
    engines = []
    for device in ("cuda", "cpu"):
        model = LlamaForCausalLM.from_pretrained(folder, device=device, dtype="float32", quantize="q8_0")
        config = EngineConfig(kv_cache_memory="32MB", max_num_seqs=8, max_model_len=60)
        engines.append(Engine(model, tokenizer, config))
    ours, exact = (tokens_of(answers(engine, PROMPTS)) for engine in engines)
    assert ours == exact
    assert "a CUDA graph cannot repeat this" in engines[0].runner.obstacle


def test_float8_is_near_what_it_was_made_of(make: Any) -> None:
    for kind, options in (
        ("Gemma2", {"head_dim": 16}),
        ("Qwen3Moe", {**QWEN_EXPERTS, "num_experts_per_tok": 6}),
    ):
        _, folder = make(kind, initializer_range=0.1, **{**options, "intermediate_size": 128})
        model = LlamaForCausalLM.from_pretrained(folder, device="cuda", dtype=torch.bfloat16, quantize="fp8")
        assert nmse(logits_of(model, [30]), on_cpu(folder)) < 2e-2


def test_gpt_oss_in_mxfp4_has_the_logits_it_has_on_a_cpu(make: Any) -> None:
    theirs, folder = make("GptOss", **MODELS["gptoss"][1], intermediate_size=64)
    write_mxfp4(theirs, folder)
    check_logits(folder, torch.float32, FLOAT32_BAR)


def test_a_tensor_that_lies_transposed_reaches_a_gpu_as_it_is() -> None:
    turned = torch.arange(15.0).view(3, 5).T
    assert torch.equal(Staging(torch.device("cuda")).send(turned).cpu(), turned)


# ---- adapters, embeddings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3, window", "gemma2", "olmo2", "granite"])
def test_adapters_in_one_batch_say_what_they_say_on_a_cpu(
    name: str, make: Any, tokenizer: Any, tmp_path: Path
) -> None:
    kind, options = KINDS[name]
    _, folder = make(kind, **{**options, "vocab_size": VOCAB_SIZE})
    ours, exact = (engine_of(folder, tokenizer, device) for device in ("cuda", "cpu"))
    small, large = (adapter(tmp_path / str(rank), exact.model, rank, rank) for rank in (4, 9))
    loras = [None, small, large, small, None]
    prompts = [PROMPTS[1], PROMPTS[1], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    found = tokens_of(answers(ours, prompts, loras=loras))
    assert found == tokens_of(answers(exact, prompts, loras=loras))
    assert found[0] != found[1] != found[2] != found[0]
    assert ours.runner._adapted is not None and ours.runner._adapted.recordings


@pytest.mark.parametrize("dtype, bar", [("float32", FLOAT32_BAR), ("bfloat16", BFLOAT16_BAR)])
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_embeddings_and_scores_are_those_of_a_cpu(
    kind: str, dtype: str, bar: float, make: Any, tmp_path: Path
) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "initializer_range": 0.1}
    _, folder = make(kind, getattr(torch, dtype), **sizes)
    write_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tmp_path / name).read_bytes())
    ours = LLM(folder, device="cuda", dtype=dtype, kv_cache_memory="32MB")
    exact = LLM(folder, device="cpu", dtype="float32", kv_cache_memory="32MB")
    texts = ["Paris is the capital of France.", "Cats purr, and sleep " * 12, "a"]
    for found, wanted in zip(ours.embed(texts), exact.embed(texts), strict=True):
        assert nmse(*(torch.tensor(each.outputs.embedding) for each in (found, wanted))) <= bar
    scores, others = (
        torch.tensor([output.outputs.score for output in llm.score("Who purrs?", texts)])
        for llm in (ours, exact)
    )
    assert nmse(scores, others) <= 100 * bar  # a difference of two logits
