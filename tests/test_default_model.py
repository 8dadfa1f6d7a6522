"""The built-in SmolLM2: its answers are those of transformers on the same file, and it is quick to load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infinicore import _native, nn
from infinilm import LLM, SamplingParams

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "smollm2_answers.json").read_text())


@pytest.fixture(scope="module")
def exact(default_model_path: Path) -> LLM:
    return LLM(default_model_path, dtype="float32")


@pytest.fixture(scope="module")
def default(default_model_path: Path) -> LLM:
    return LLM(default_model_path)


@pytest.fixture(scope="module")
def fast(default_model_path: Path) -> LLM:
    return LLM(default_model_path, activations="int8")


@pytest.fixture
def on_amx(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    with monkeypatch.context() as patch:
        patch.setattr(_native, "isa", lambda: "amx")
        return LLM(default_model_path)


@pytest.mark.parametrize("record", RECORDED["answers"], ids=lambda record: record["prompt"][:20])
def test_answers_equal_those_of_transformers_token_for_token(exact: LLM, record: dict[str, Any]) -> None:
    message = {"role": "user", "content": record["prompt"]}
    ids = exact.tokenizer.encode_chat([message])
    assert ids == record["prompt_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=len(record["answer_ids"]))
    (output,) = exact.chat([message], params)
    assert output.outputs[0].token_ids == record["answer_ids"]


def test_logits_equal_those_of_transformers(exact: LLM) -> None:
    logits = exact.model(torch.tensor([RECORDED["answers"][0]["prompt_ids"]]))[0, 0]
    found = logits[RECORDED["top_tokens"]]
    torch.testing.assert_close(found, torch.tensor(RECORDED["top_logits"]), rtol=1e-4, atol=1e-4)


def test_quantised_weights_stay_quantised_in_either_mode(exact: LLM, fast: LLM) -> None:
    from infinicore.quantization import QuantizedTensor

    for llm in (exact, fast):
        assert isinstance(llm.model.model.layers[0].mlp.up_proj.weight, QuantizedTensor)
        assert llm.model.lm_head.weight is llm.model.model.embed_tokens.weight


@torch.inference_mode()
def perplexity(llm: LLM, text: str) -> float:
    ids = torch.tensor([llm.tokenizer.encode(text)])
    log_probabilities = torch.log_softmax(llm.model(ids, logits_to_keep=0)[0, :-1].double(), -1)
    return float(log_probabilities.gather(1, ids[0, 1:, None]).mean().neg().exp())


def test_the_default_gives_the_same_answers(default: LLM) -> None:
    for record in RECORDED["answers"][:4]:
        params = SamplingParams(temperature=0.0, max_tokens=len(record["answer_ids"]))
        (output,) = default.chat([{"role": "user", "content": record["prompt"]}], params)
        assert output.outputs[0].token_ids == record["answer_ids"]


def test_int16_activations_keep_the_perplexity_within_half_a_percent(exact: LLM, default: LLM) -> None:
    text = (Path(__file__).parent / "data" / "declaration.txt").read_text()[:1800]
    assert abs(perplexity(default, text) / perplexity(exact, text) - 1) < 0.005


def test_what_amx_would_keep_by_default_gives_the_same_answers(exact: LLM, on_amx: LLM) -> None:
    """12 bits against weights of four, which every level computes and AMX alone chooses."""
    bits = {
        module.weight.activation_bits for module in on_amx.model.modules() if isinstance(module, nn.Linear)
    }
    assert bits == {12, 16}
    test_the_default_gives_the_same_answers(on_amx)
    text = (Path(__file__).parent / "data" / "declaration.txt").read_text()[:1800]
    assert abs(perplexity(on_amx, text) / perplexity(exact, text) - 1) < 0.005


def test_int8_activations_change_the_perplexity_by_little(exact: LLM, fast: LLM) -> None:
    text = (Path(__file__).parent / "data" / "declaration.txt").read_text()[:1800]
    assert abs(perplexity(fast, text) / perplexity(exact, text) - 1) < 0.02


def test_a_stream_concatenates_to_the_whole_answer(fast: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ids = fast.tokenizer.encode("The rain in Spain")
    (output,) = fast.generate("The rain in Spain", params)
    pieces = list(fast.stream(ids, params))
    assert "".join(text for _, text in pieces) == output.outputs[0].text
    assert [token for token, _ in pieces] == output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "length" and len(pieces) == 24


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(fast: LLM) -> None:
    with pytest.raises(ValueError, match="8192 tokens; the model takes 1 to 8191"):
        next(fast.stream([1] * 8192, SamplingParams()))


MEASURE = """
import resource, sys, time
import torch
import infinicore
from infinilm.checkpoint import open_checkpoint
import infinilm.llm
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
model, tokenizer = infinilm.llm.load_model(sys.argv[1])
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_loading_takes_little_memory_beyond_the_file(default_model_path: Path) -> None:
    """Peak resident memory of weights, tokenizer and all stays within the file and the tokenizer's share."""
    command = [sys.executable, "-c", MEASURE, str(default_model_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    _, kilobytes = result.stdout.split()
    assert int(kilobytes) * 1024 < 1.15 * default_model_path.stat().st_size + 60e6
