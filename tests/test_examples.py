"""The examples run, and each computes what a plain torch formulation of it computes."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from warm import RunPython

from infinicore import nn
from infinicore.distributed import LocalCommunicator

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
FORKING = ("tensor_parallel", "model_on_two_processes")
Example = Callable[[str], ModuleType]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Example:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotate_half(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, S, H, D] as Hugging Face's LLaMA rotates it"""
    frequency = 10000.0 ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    angle = torch.outer(positions.double(), frequency).repeat(1, 2)[:, None]  # [S, 1, D]
    first, second = x.double().chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (x.double() * angle.cos() + rotated * angle.sin()).to(x.dtype)


def plain_attention(x: Tensor, w_qkv: Tensor, w_out: Tensor, num_heads: int) -> Tensor:
    positions = torch.arange(x.shape[1])
    q, k, v = (t.unflatten(-1, (num_heads, -1)) for t in (x @ w_qkv.T).chunk(3, dim=-1))
    q, k, v = (t.transpose(1, 2) for t in (rotate_half(q, positions), rotate_half(k, positions), v))
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return heads.transpose(1, 2).flatten(-2) @ w_out.T


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FORKING])
def test_example_runs_and_prints(name: str, example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main()
    assert capsys.readouterr().out


def test_transformer_mlp_is_fc2_of_gelu_of_fc1(example: Example) -> None:
    mlp, x = example("transformer_mlp").TransformerMLP(16), random(2, 3, 16)
    hidden = torch.nn.functional.gelu(x @ mlp.fc1.weight.T + mlp.fc1.bias)
    torch.testing.assert_close(mlp(x), hidden @ mlp.fc2.weight.T + mlp.fc2.bias)


def test_transformer_mlp_holds_its_parameters_under_the_names_they_were_assigned_to(example: Example) -> None:
    names = {"gating", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert set(example("transformer_mlp").TransformerMLP(16).state_dict()) == names


def test_gpt_block_equals_a_plain_torch_block(example: Example) -> None:
    block = example("gpt_block").GPTBlock(vocab_size=50, hidden_size=32, num_heads=4, max_seq_len=16)
    input_ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    hidden = block.wte.weight[input_ids]
    normalized = torch.nn.functional.rms_norm(hidden, [32], block.ln1.weight, eps=1e-5)
    hidden = hidden + plain_attention(normalized, block.qkv.weight, block.out.weight, num_heads=4)
    wanted = hidden + block.mlp(torch.nn.functional.rms_norm(hidden, [32], block.ln2.weight, eps=1e-5))
    torch.testing.assert_close(block(input_ids, torch.arange(5)), wanted)


def test_gpt_block_never_looks_ahead(example: Example) -> None:
    block = example("gpt_block").GPTBlock(vocab_size=50, hidden_size=32, num_heads=4, max_seq_len=16)
    first, second = (block(torch.tensor([[1, 2, 3, last]]), torch.arange(4)) for last in (4, 5))
    assert torch.equal(first[:, :3], second[:, :3]) and not torch.equal(first[:, 3], second[:, 3])


def test_gpt_block_learns_once_asked_to(example: Example) -> None:
    block = example("gpt_block").GPTBlock(vocab_size=50, hidden_size=32, num_heads=4, max_seq_len=16)
    block.requires_grad_()(torch.tensor([[1, 2, 3]]), torch.arange(3)).square().sum().backward()
    assert all(parameter.grad.any() for parameter in block.parameters())


def test_model_comes_back_equal_from_its_file(example: Example, tmp_path: Path) -> None:
    save_and_load = example("save_and_load")
    saved, loaded = save_and_load.small_model(seed=0), save_and_load.small_model(seed=1)
    save_and_load.save(saved, tmp_path / "model.safetensors")
    save_and_load.load(loaded, tmp_path / "model.safetensors")
    assert saved.state_dict().keys() == loaded.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in saved.state_dict().items())


def test_file_of_a_model_holds_no_rope_tables(example: Example) -> None:
    assert not any("table" in name for name in example("save_and_load").small_model(seed=0).state_dict())


def test_nested_parameter_is_loaded_from_bytes(example: Example) -> None:
    save_and_load = example("save_and_load")
    model, values = save_and_load.small_model(seed=0), np.arange(64 * 256, dtype=np.float32).reshape(256, 64)
    save_and_load.load_from_bytes(model, "mlp.fc1.weight", values)
    assert torch.equal(model.mlp.fc1.weight, torch.from_numpy(values))


def test_two_processes_each_get_the_unsharded_result(example: Example, run_python: RunPython) -> None:
    code = "import json, tensor_parallel; print(json.dumps(tensor_parallel.run(2)))"
    child = run_python(code, cwd=EXAMPLES)
    assert child.returncode == 0, child.stderr
    outputs = json.loads(child.stdout)
    whole = example("tensor_parallel").feed_forward(LocalCommunicator()).flatten()
    assert len(outputs) == 2 and outputs[0] == outputs[1]
    torch.testing.assert_close(torch.tensor(outputs[0]), whole)


def test_a_model_on_two_processes_has_halves_and_the_tokens_of_the_whole(run_python: RunPython) -> None:
    child = run_python("import model_on_two_processes as example; example.main()", cwd=EXAMPLES)
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert len(lines) == 4
    assert all("50% of the layers' weights, the whole model's tokens" in line for line in lines)


def test_feed_forward_gates_with_silu(example: Example) -> None:
    x, w_gate, w_up, w_down = (
        random(2, 3, 8),
        random(20, 8, seed=1),
        random(20, 8, seed=2),
        random(8, 20, seed=3),
    )
    wanted = (torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T
    found = example("feed_forward").feed_forward_network(x, w_gate, w_up, w_down)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_self_attention_equals_torchs_with_rotated_heads(example: Example) -> None:
    self_attention = example("self_attention")
    x, w_qkv, w_out = random(2, 7, 32), random(96, 32, seed=1) / 6, random(32, 32, seed=2) / 6
    tables = self_attention.rope_tables(length=7, head_dim=8)
    found = self_attention.self_attention(x, w_qkv, w_out, torch.arange(7), *tables, num_heads=4)
    torch.testing.assert_close(found, plain_attention(x, w_qkv, w_out, num_heads=4), rtol=1e-5, atol=1e-5)


def test_rms_norm_class_equals_torchs(example: Example) -> None:
    norm, x = example("rms_norm_class").RMSNorm(16), random(2, 3, 16) / 100  # eps counts
    norm.weight = random(16, seed=1)
    torch.testing.assert_close(norm.forward(x), torch.nn.functional.rms_norm(x, [16], norm.weight, eps=1e-5))


def test_generation_repeats_by_seed_and_differs_between_seeds(example: Example) -> None:
    loop = example("generation_loop")
    model = loop.BigramModel(vocab_size=100, hidden_size=16, eos_token_id=2)
    first, again, other = (loop.generate_text(model, [1], seed, max_tokens=30) for seed in (0, 0, 1))
    assert first == again != other


def test_generation_at_temperature_zero_follows_the_largest_logit(example: Example) -> None:
    loop = example("generation_loop")
    model = loop.BigramModel(vocab_size=100, hidden_size=16, eos_token_id=-1)
    table = model.embed_tokens.weight @ model.lm_head.weight.T  # [V, V]: the logits after each token
    token_ids = loop.generate_text(model, [7], seed=0, max_tokens=20, temperature=0.0)
    assert len(token_ids) == 21
    assert all(new == table[old].argmax() for old, new in zip(token_ids[:-1], token_ids[1:], strict=True))


def test_generation_ends_with_the_end_token(example: Example) -> None:
    loop = example("generation_loop")
    model = loop.BigramModel(vocab_size=5, hidden_size=4, eos_token_id=2)
    token_ids = loop.generate_text(model, [1], seed=0, max_tokens=1000)
    assert token_ids.index(2) == len(token_ids) - 1 < 1000


def test_in_place_ffn_equals_the_plain_one_and_applies_silu_once(example: Example) -> None:
    x, norm_weight = random(2, 3, 8), random(8, seed=4)
    weights = random(20, 8, seed=1), random(20, 8, seed=2), random(8, 20, seed=3)
    plain = example("feed_forward").feed_forward_network(x, *weights)
    wanted = torch.nn.functional.rms_norm(plain, [8], norm_weight, eps=1e-5)
    found = example("in_place_ffn").memory_efficient_ffn(x, *weights, norm_weight)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_mlp_block_equals_the_block_with_its_weights_decoded(example: Example) -> None:
    block, x = nn.MLPBlock(32, 96), random(2, 5, 32)
    torch.testing.assert_close(block(x), example("mlp_block").dense_mlp(block, x))
