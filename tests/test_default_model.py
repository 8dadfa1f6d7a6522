"""The built-in SmolLM2: its answers are those of transformers on the same file; it loads in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import at_level
from gguf_files import whole_file
from torch import Tensor

from infinicore import _native, nn
from infinicore.quantization import QuantizedTensor
from infinilm import LLM, SamplingParams, load_model
from infinilm.cache import DynamicCache
from infinilm.cli import parser
from infinilm.cli.options import load

DATA = Path(__file__).parent / "data"
RECORDED: dict[str, Any] = json.loads((DATA / "smollm2_answers.json").read_text())
NUM_TOKENS, MANY_TOKENS, FEW_TOKENS, LEAST_TOKENS = 1024, 256, 128, 16


@pytest.fixture(scope="module")
def exact(default_model_path: Path) -> LLM:
    return LLM(default_model_path, dtype="float32")


@pytest.fixture(scope="module")
def default(default_model_path: Path) -> LLM:
    """What every level but AMX keeps by default."""
    return LLM(default_model_path, activations="int16")


@pytest.fixture(scope="module")
def fast(default_model_path: Path) -> LLM:
    return LLM(default_model_path, activations="int8")


@pytest.fixture(scope="module")
def on_amx(default_model_path: Path) -> LLM:
    """12 bits against weights of four, which every level computes and AMX alone chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "isa", lambda: "amx")
        return LLM(default_model_path)


def test_it_is_sampled_as_its_makers_recommend(default_model_path: Path) -> None:
    model, _ = load_model()
    assert model.recommended == SamplingParams(temperature=0.2, top_p=0.9)


def test_commands_sample_it_as_its_makers_recommend(default_model_path: Path) -> None:
    llm = load(parser().parse_args(["batch", "asked.jsonl", "answered.jsonl"]))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.2, top_p=0.9)


@pytest.fixture(scope="module")
def text_ids(exact: LLM) -> list[int]:
    """A text and the beginnings of some chats"""
    ids = exact.tokenizer.encode((DATA / "declaration.txt").read_text())
    for record in RECORDED["answers"]:
        ids += record["prompt_ids"] + record["answer_ids"]
    assert len(ids) >= NUM_TOKENS
    return ids[:NUM_TOKENS]


@torch.inference_mode()
def all_logits(llm: LLM, token_ids: list[int]) -> Tensor:
    held = DynamicCache(dtype=llm.model.cache_dtype)
    return llm.model(torch.tensor([token_ids]), past_key_values=held, logits_to_keep=0)[0]


@pytest.fixture(scope="module")
def exact_logits(exact: LLM, text_ids: list[int]) -> Tensor:
    with at_level(_native.isa_levels()[-1]):
        return all_logits(exact, text_ids[:MANY_TOKENS])


@pytest.mark.parametrize("record", RECORDED["answers"], ids=lambda record: record["prompt"][:20])
def test_answers_equal_those_of_transformers_token_for_token(exact: LLM, record: dict[str, Any]) -> None:
    """Each token is the likeliest after those before it, so the loop, whose bits are these, chooses it."""
    prompt, answer = record["prompt_ids"], record["answer_ids"]
    assert exact.tokenizer.encode_chat([{"role": "user", "content": record["prompt"]}]) == prompt
    assert all_logits(exact, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("mode", ["exact", "default", "on_amx"])
def test_a_chat_gives_the_answer_of_transformers(mode: str, request: pytest.FixtureRequest) -> None:
    llm, record = request.getfixturevalue(mode), RECORDED["answers"][0]
    params = SamplingParams(temperature=0.0, max_tokens=len(record["answer_ids"]))
    (output,) = llm.chat([{"role": "user", "content": record["prompt"]}], params)
    assert output.outputs[0].token_ids == record["answer_ids"]


def test_logits_equal_those_of_transformers(exact: LLM, level: str) -> None:
    logits = all_logits(exact, RECORDED["answers"][0]["prompt_ids"])[-1]
    found = logits[RECORDED["top_tokens"]]
    torch.testing.assert_close(found, torch.tensor(RECORDED["top_logits"]), rtol=0, atol=1e-4)


def test_replayed_steps_of_the_whole_model_give_the_bits_of_a_prefill(default: LLM) -> None:
    ids = RECORDED["answers"][1]["prompt_ids"][:12]
    wanted = all_logits(default, ids).double().log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)
    (drawn,) = default.generate([ids[:9]], params)[0].outputs
    (whole,) = default.generate([ids[:9] + drawn.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert drawn.logprobs == whole.prompt_logprobs[9:]
    assert drawn.logprobs[0][drawn.token_ids[0]].logprob == pytest.approx(wanted[8].max().item(), abs=1e-5)
    assert not default.engine.runner.obstacle


def test_quantised_weights_stay_quantised_in_every_mode(exact: LLM, default: LLM, fast: LLM) -> None:
    for llm in (exact, default, fast):
        matrices = [m.weight for m in llm.model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
        assert len(matrices) == 30 * 7 + 2 and all(isinstance(weight, QuantizedTensor) for weight in matrices)
        assert llm.model.lm_head.weight is llm.model.model.embed_tokens.weight


def test_amx_keeps_12_bits_against_weights_of_four_by_default(on_amx: LLM) -> None:
    matrices = [m.weight for m in on_amx.model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    assert {(weight.type.name.startswith("Q4"), weight.activation_bits) for weight in matrices} == {
        (True, 12),
        (False, 16),
    }


def divergence(wanted: Tensor, found: Tensor) -> tuple[float, float]:
    """(the mean Kullback-Leibler divergence of what is found, how often the likeliest token is the same)"""
    total, num_same = 0.0, 0
    for w, f in zip(wanted.split(128), found.split(128), strict=True):
        p, q = torch.log_softmax(w.double(), -1), torch.log_softmax(f.double(), -1)
        total += float((p.exp() * (p - q)).sum())
        num_same += int((w.argmax(-1) == f.argmax(-1)).sum())
    return total / len(wanted), num_same / len(wanted)


# A few times what was measured at every level; a perplexity would not tell these modes from one another.
of_each_mode = pytest.mark.parametrize(
    "mode, most, least_same",
    [("default", 5e-6, 0.999), ("on_amx", 3e-4, 0.98), ("fast", 5e-2, 0.9)],
)


@of_each_mode
def test_a_mode_diverges_from_the_exact_model_by_no_more_than_its_rounding(
    mode: str,
    most: float,
    least_same: float,
    request: pytest.FixtureRequest,
    exact_logits: Tensor,
    text_ids: list[int],
    level: str,
    is_best: bool,
) -> None:
    """At the level that callers get here, on a page of text; at the slower ones, on its beginning."""
    num_tokens = MANY_TOKENS if is_best else LEAST_TOKENS if level == "portable" else FEW_TOKENS
    found = all_logits(request.getfixturevalue(mode), text_ids[:num_tokens])
    divergence_found, share_same = divergence(exact_logits[:num_tokens], found)
    assert divergence_found < most and share_same >= least_same


@pytest.mark.slow
@of_each_mode
def test_over_a_long_text_a_mode_diverges_by_no_more_than_its_rounding(
    mode: str,
    most: float,
    least_same: float,
    request: pytest.FixtureRequest,
    exact: LLM,
    text_ids: list[int],
) -> None:
    found = all_logits(request.getfixturevalue(mode), text_ids)
    divergence_found, share_same = divergence(all_logits(exact, text_ids), found)
    assert divergence_found < most and share_same >= least_same


def test_the_modes_are_told_apart(default: LLM, fast: LLM, exact_logits: Tensor, text_ids: list[int]) -> None:
    """What is called near exact is so by its rounding, and int8 is not that mode under another name."""
    near, far = (
        divergence(exact_logits[:FEW_TOKENS], all_logits(llm, text_ids[:FEW_TOKENS]))[0]
        for llm in (default, fast)
    )
    assert 0 < near < far / 1000


def test_a_stream_concatenates_to_the_whole_answer(fast: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ids = fast.tokenizer.encode("The rain in Spain")
    (output,) = fast.generate("The rain in Spain", params)
    pieces = list(fast.stream(ids, params))
    assert "".join(text for _, text in pieces) == output.outputs[0].text
    assert [token for token, _ in pieces] == output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "length" and len(pieces) == 24


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(fast: LLM) -> None:
    with pytest.raises(ValueError, match="8192 tokens.* 8191 are the most"):
        next(fast.stream([1] * 8192, SamplingParams()))


MEASURE = """
import resource, sys
import infinilm.startup
infinilm.startup.load_model(sys.argv[2], device="cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model, tokenizer = infinilm.startup.load_model(sys.argv[1], device="cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other ways")
def test_loading_takes_little_memory_beyond_the_file(default_model_path: Path, tmp_path: Path) -> None:
    """Peak memory of weights, tokenizer and all; a tiny model goes first, so that it is not torch's code."""
    tiny = tmp_path / "tiny.gguf"
    tiny.write_bytes(whole_file().encode())
    command = [sys.executable, "-c", MEASURE, str(default_model_path), str(tiny)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) * 1024 < 1.25 * default_model_path.stat().st_size
