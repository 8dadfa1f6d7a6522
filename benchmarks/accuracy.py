"""How far a contender's logits are from the exact model's, on the file whose weights are real."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.contenders import EXACT
from benchmarks.report import Accuracy
from benchmarks.worker import Worker
from infinilm.checkpoint import open_checkpoint
from infinilm.startup import tokenizer_of

DATA = Path(__file__).parent.parent / "tests" / "data"
NUM_TOKENS, FEW_TOKENS = 1024, 256


def exact_logits(path: Path, token_ids: list[int], num_threads: int) -> Tensor:
    """Of infinilm in float32, on the same file"""
    with closing(Worker(EXACT, str(path), num_threads)) as exact:
        return logits_of(exact, token_ids)


def text_ids(path: Path) -> list[int]:
    """A text, then chats of the built-in model with their answers"""
    with open_checkpoint(path) as checkpoint:
        token_ids = list(tokenizer_of(checkpoint).encode((DATA / "declaration.txt").read_text()))
    for record in json.loads((DATA / "smollm2_answers.json").read_text())["answers"]:
        token_ids += record["prompt_ids"] + record["answer_ids"]
    return token_ids


def logits_of(worker: Worker, token_ids: list[int]) -> Tensor:
    """[tokens, vocabulary]; 200 MB go from process to process as a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logits.npy"
        worker.save_logits(token_ids, path)
        return torch.from_numpy(np.load(path))


def accuracy(wanted: Tensor, found: Tensor) -> Accuracy:
    total, num_same = 0.0, 0
    for w, f in zip(torch.split(wanted, 128), torch.split(found, 128), strict=True):
        p, q = torch.log_softmax(w.double(), -1), torch.log_softmax(f.double(), -1)
        total += float((p.exp() * (p - q)).sum())
        num_same += int((w.argmax(-1) == f.argmax(-1)).sum())
    return Accuracy(total / len(wanted), num_same / len(wanted))
