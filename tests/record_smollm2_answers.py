"""Records what transformers answers with the default model, for test_default_model.py to compare with.

    python tests/record_smollm2_answers.py

transformers dequantises the same GGUF to float32; prompts are token ids made by our own tokenizer, which has
tests of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from infinilm import hub
from infinilm.checkpoint import open_checkpoint
from infinilm.tokenizer import Tokenizer

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child in two sentences.",
    "List three uses of a paperclip.",
    "What is 12 times 7?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Name the planets of the solar system.",
    "Give me a recipe for pancakes.",
    "def fibonacci(n):",
)
NUM_TOKENS = 48
TARGET = Path(__file__).parent / "data" / "smollm2_answers.json"


def main() -> None:
    path = hub.resolve(None)
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    records = []
    for prompt in PROMPTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        generated = model.generate(
            torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=2
        )
        answer = generated[0, len(ids) :].tolist()
        records.append({"prompt": prompt, "prompt_ids": ids, "answer_ids": answer})
        print(prompt, "->", tokenizer.decode(answer))
    logits = model(torch.tensor([records[0]["prompt_ids"]])).logits[0, -1]
    top = logits.topk(20)
    content = {"answers": records, "top_tokens": top.indices.tolist(), "top_logits": top.values.tolist()}
    TARGET.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
