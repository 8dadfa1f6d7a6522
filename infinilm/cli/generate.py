"""`infinilm generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from infinilm.cli.options import (
    add_answer_options,
    check_input,
    load,
    readable,
    reading_input,
    sampling_params,
)

if TYPE_CHECKING:
    from infinilm.llm import LLM


def add(commands: Any) -> None:
    """`infinilm generate`"""
    command = commands.add_parser("generate", help="answer one prompt")
    command.add_argument("prompt", type=readable, help="the prompt; - reads it from standard input")
    command.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without a chat template"
    )
    add_answer_options(command, "a system message before the prompt")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    sampling_params(options)  # a wrong option is reported before the model is loaded
    check_system(options.system, has_template=not options.raw)
    prompt = read_prompt(options.raw) if options.prompt == "-" else options.prompt
    llm = load(options)
    most = llm.engine.max_length
    if options.raw or llm.tokenizer.chat_template is None:
        check_system(options.system, has_template=False)
        answer(llm, llm.tokenizer.encode(prompt, max_tokens=most), options)
        return
    messages = [{"role": "system", "content": options.system}] if options.system else []
    asked = [*messages, {"role": "user", "content": prompt}]
    answer(llm, llm.tokenizer.encode_chat(asked, max_tokens=most), options)


def check_system(system: str | None, has_template: bool) -> None:
    if system and not has_template:
        raise ValueError("--system needs a chat template, which the model does not have, or --raw leaves out")


def read_prompt(raw: bool) -> str:
    """The newline that ends the last line of a file, or what echo says, is no part of a message, and with it
    the answer would be another; a raw prompt is continued as it is."""
    check_input()
    with reading_input():
        text = sys.stdin.read().removeprefix("\ufeff")  # the mark of UTF-8 that Windows begins files with
    return text if raw else text.removesuffix("\n")


def answer(llm: LLM, token_ids: list[int], options: argparse.Namespace) -> str:
    """Print an answer as it comes and return it."""
    stats, pieces = Stats(len(token_ids)), []
    for _, text in llm.stream(token_ids, sampling_params(options)):
        stats.count()
        pieces.append(text)
        print(text, end="", flush=True)
    print()
    if options.stats:
        print(stats, file=sys.stderr)
        tell_of_obstacle(llm)
    return "".join(pieces)


def tell_of_obstacle(llm: LLM) -> None:
    """Why steps took longer than those that are recorded, if some did"""
    runner = llm.engine.runner
    if runner.obstacle:
        steps = f"steps of {runner.refused_from} or more tokens"
        print(f"{steps} are run op by op, not recorded: {runner.obstacle}", file=sys.stderr)


class Stats:
    """Times a stream: the prompt up to the first token, then the rest."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.start = time.perf_counter()
        self.first = self.start

    def count(self) -> None:
        self.num_tokens += 1
        if self.num_tokens == 1:
            self.first = time.perf_counter()

    def __str__(self) -> str:
        prompt = (
            f"prompt {self.num_prompt_tokens} tokens, {rate(self.num_prompt_tokens, self.first - self.start)}"
        )
        rest = rate(self.num_tokens - 1, time.perf_counter() - self.first)
        return f"{prompt}; generated {self.num_tokens} tokens, {rest}"


def rate(num_tokens: int, seconds: float) -> str:
    return f"{max(num_tokens, 0) / max(seconds, 1e-9):.1f} tokens/s"
