"""Save a model to a safetensors file, load it back, and load one parameter from raw bytes."""

import tempfile
from pathlib import Path

import numpy as np
from gpt_block import GPTBlock
from safetensors.torch import load_file, save_file

import infinicore
from infinicore import nn


def small_model(seed: int) -> GPTBlock:
    infinicore.manual_seed(seed)
    return GPTBlock(vocab_size=100, hidden_size=64, num_heads=4, max_seq_len=32)


def save(model: nn.Module, path: Path) -> None:
    save_file(model.state_dict(), path)


def load(model: nn.Module, path: Path) -> None:
    """Names that only one side has are reported; a wrong shape would raise before anything is written."""
    missing, unexpected = model.load_state_dict(load_file(path))
    print(f"missing: {missing}, unexpected: {unexpected}")


def load_from_bytes(model: nn.Module, name: str, values: np.ndarray) -> None:
    """Dotted names reach nested parameters; the bytes are of the whole tensor, in its dtype."""
    model.load_parameter_from_blob(name, values)


def main() -> None:
    saved, loaded = small_model(seed=0), small_model(seed=1)
    input_ids, positions = infinicore.tensor([[1, 2, 3]]), infinicore.arange(3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(saved, path)
        load(loaded, path)
        print(f"{path.name}: {path.stat().st_size} bytes")
    print("equal after loading:", saved(input_ids, positions).equal(loaded(input_ids, positions)))
    load_from_bytes(loaded, "mlp.fc1.bias", np.zeros(256, dtype=np.float32))
    print("mlp.fc1.bias is zero:", not loaded.mlp.fc1.bias.any())


if __name__ == "__main__":
    main()
