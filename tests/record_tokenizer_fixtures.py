"""Record what transformers makes of hard texts and chats with the default model's tokenizer.

Run by hand, as `python tests/record_tokenizer_fixtures.py`, when the corpus below changes; it takes half a
minute and writes tests/data/smollm2_tokenizer.json, which test_tokenizer.py compares our tokenizer with.
"""

import hashlib
import json
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infinilm import hub

OUTPUT = Path(__file__).parent / "data" / "smollm2_tokenizer.json"

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "Hello, world!",
    " leading and trailing ",
    "two  three   four    spaces" + " " * 50 + "fifty",
    " " * 17,
    "tabs\tand\t\ttabs \t mixed",
    "\n\n\r\n\r \n\t\n mixed\nnewlines\r\n",
    "I'm, you're, he'd, we'll, IT'S, don't, '' 's",
    "1 12 123 1234567890 3.14 1,000 0x1F 2⁵ ½ ٣٤ ४५ Ⅻ ①",
    "  7",
    "a1b22c333  4444\n5",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass",
    "emoji 😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 ❤️",
    "你好，世界。今天天气很好！",
    "こんにちは 世界 カタカナ ｶﾀｶﾅ",
    "안녕하세요 세계",
    "สวัสดีชาวโลก नमस्ते दुनिया",
    "שלום עולם مرحبا بالعالم \u202eright to left\u202c",
    "e\u0301 é n\u0303 Z̷̛̲a̴l̸g̵o̷ \u0301lone",
    "ﬁ Å Å ℌ ① \u00a0nbsp\u2003em\u200bzero\ufeffbom",
    "\x00 \x01\x02\x1b[0m \x7f \x85",
    "\ufffd \ufffe \U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a<|im_end|>b <|im_end|> c<|im_end|><|im_end|>",
    "<|im_start", "<| im_end |>", "<|IM_END|>", "<repo_name><file_sep><empty_output>",
    "<0x0A> <0x-1> <0xZZ> [INST] <s> </s> ▁ Ġ Ċ",
    "https://example.com/a?b=c&d=%20#e user@example.com C:\\path\\to",
    "{\"key\": [1, 2.5, null, true]}\n\\u00e9 \\n `~!@#$%^&*()_+-=[]{}|;':\",./<>?",
    "supercalifragilisticexpialidocious antidisestablishmentarianism Donaudampfschifffahrt",
    "x" * 300 + " " + "=" * 80 + "-" * 81,
]  # fmt: skip

# Too long to be kept: their ids are compared by number and hash.
REPEATED = [("a", 100_000), (" ", 100_000), ("\n", 10_000), ("ab ", 30_000), ("😀", 10_000), ("9", 10_000)]

CHATS = [
    [("user", "Hi")],
    [("system", "You are terse."), ("user", "What is 2+2?")],
    [("user", "Hi"), ("assistant", "Hello! "), ("user", "  How are you?\n")],
    [("system", ""), ("user", "你好 👩‍👩‍👧"), ("assistant", ""), ("user", "1\n\n2")],
    [("user", "a"), ("user", "b"), ("system", "late"), ("tool", '{"x": 1}')],
]


def load_oracle() -> PreTrainedTokenizerBase:
    path = hub.resolve(None)
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers does not know the pre-tokenizer name "smollm" and falls back to GPT-2's, which differs for
    # spaces before digits. This is what SmolLM2's published tokenizer.json has.
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return oracle


def record_text(oracle: PreTrainedTokenizerBase, text: str) -> dict[str, object]:
    ids = oracle.encode(text)
    as_text = oracle.encode(text, split_special_tokens=True)
    return {"text": text, "ids": ids, "ids_without_special": as_text, "decoded": oracle.decode(ids)}


def record_repeated(oracle: PreTrainedTokenizerBase, unit: str, times: int) -> dict[str, object]:
    ids = oracle.encode(unit * times)
    return {"unit": unit, "times": times, "num_ids": len(ids), "sha256": hash_of(ids)}


def hash_of(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def record_chat(
    oracle: PreTrainedTokenizerBase, turns: list[tuple[str, str]], add_generation_prompt: bool
) -> dict[str, object]:
    messages = [{"role": role, "content": content} for role, content in turns]
    text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    ids = oracle.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    return {"messages": messages, "add_generation_prompt": add_generation_prompt, "text": text, "ids": ids}


def main() -> None:
    oracle = load_oracle()
    recorded = {
        "texts": [record_text(oracle, text) for text in TEXTS],
        "repeated": [record_repeated(oracle, unit, times) for unit, times in REPEATED],
        "chats": [record_chat(oracle, turns, prompt) for turns in CHATS for prompt in (True, False)],
    }
    lines = [
        f'"{name}": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]" for name, cases in recorded.items()
    ]
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
