"""Commands and options that there are not: what is told of them, and what is meant by them."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from infinilm import elsewhere

# What llama.cpp, ollama, vLLM and transformers call what is here. What a command lacks may be yet another.
COMMANDS_ELSEWHERE = {
    "run": "chat --model",
    "complete": "generate",
    "show": "info",
    "run-batch": "batch",
    "help": "--help",
    "version": "--version",
}
ELSEWHERE = {
    "-m": "--model",
    "-hf": "--model",
    "--hf-repo": "--model",
    "--model-name-or-path": "--model",
    "--model": "a model that stands by itself",
    "-p": "a prompt that stands by itself",
    "--prompt": "a prompt that stands by itself",
    "a prompt that stands by itself": "--input-len",
    "-sys": "--system",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--max-tokens": "--output-len",
    "-r": "--rounds",
    "--num-iters": "--rounds",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--num-ctx": "--max-model-len",
    "--context-length": "--max-model-len",
    "--n-ctx": "--max-model-len",
    "-ngl": "--device",
    "--n-gpu-layers": "--device",
    "--device-map": "--device",
    "--torch-dtype": "--dtype",
    "--load-in-8bit": "--quantize",
    "--load-in-4bit": "--quantize",
    "-t": "--threads",
    "--threads": "INFINICORE_NUM_THREADS in the environment",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--alias": "--served-model-name",
    "--host": "--base-url",
    "--port": "--base-url",
    "--gpu-memory-utilization": "--kv-cache-memory",
    "--swap-space": "--kv-cache-memory",
    "--cache-type-k": "--kv-cache-dtype",
}
NEEDLESS = {
    "--trust-remote-code",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--reasoning-parser",
    "--flash-attn",
    "--jinja",
    "--stream",
}
# How tokens are chosen, where no option does it: one that is spelled alike would do something else.
OF_REQUESTS = {"--stop", "--logprobs", "--presence-penalty", "--frequency-penalty", "--logit-bias"}


class Command(argparse.ArgumentParser):
    """A parser that leaves nothing for the one above it, which would show a usage without any option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            what = f"unrecognized arguments: {' '.join(unknown)}"
            self.error("; ".join([what, *meanings(unknown, self._names())]))
        return options, unknown

    def _names(self) -> list[str]:
        standing = [action.dest for action in self._actions if not action.option_strings]
        return [*self._option_string_actions, *(f"a {name} that stands by itself" for name in standing)]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        meant = COMMANDS_ELSEWHERE.get(value, "") if action.metavar == "COMMAND" else ""
        if meant:
            raise argparse.ArgumentError(action, f"{value!r} is {meant!r} here")
        super()._check_value(action, value)

    def _get_option_tuples(self, option_string: str) -> Any:
        """What it may be short for; one dash shortens nothing, or -hf would be -h and a value."""
        return super()._get_option_tuples(option_string) if option_string.startswith("--") else []


def meanings(unknown: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """What each was probably meant to be, as far as that can be said"""
    unknown = list(unknown)
    if not unknown[0].startswith("-"):  # else it may be the value of an option
        yield from meaning_of_word(known)
    for name in (argument.partition("=")[0] for argument in unknown if argument.startswith("-")):
        spelled = name.replace("_", "-")
        if spelled in NEEDLESS:
            yield f"{name} is not needed here"
        elif meant := meaning(spelled, known):
            yield f"{name} is {meant} here"
        elif told := instead(spelled, known):
            yield f"{name}: {told}"
        elif close := closest(spelled, known):
            yield f"did you mean {close}?"


def meaning(name: str, known: Collection[str]) -> str:
    meant = ELSEWHERE.get(name, "")
    is_there = meant in known or meant.endswith("in the environment")
    return meant if is_there or not meant else meaning(meant, known)


def instead(name: str, known: Collection[str]) -> str:
    """What does it where no option of the command does"""
    if name in OF_REQUESTS and "--temperature" in known:
        return "SamplingParams has it, and so have the bodies of infinilm batch and infinilm serve"
    if name in ("-f", "--file") and "a prompt that stands by itself" in known:
        return "a prompt of - is read from standard input, as by infinilm generate - < FILE"
    advice = elsewhere.ENGINE.get(name.removeprefix("--").replace("-", "_"))
    return advice[0] if advice and "--kv-cache-memory" in known else ""


def meaning_of_word(known: Collection[str]) -> Iterator[str]:
    """Of one that stands by itself where none, or none more, may stand"""
    if "a prompt that stands by itself" in known:
        yield "a prompt of several words is quoted"
    elif "--model" in known and "a model that stands by itself" not in known:
        yield "a model is named by --model"


def closest(name: str, known: Collection[str]) -> str:
    """By its letters: two dashes are no likeness."""
    letters = {option.lstrip("-"): option for option in known if option.startswith("--")}
    close = difflib.get_close_matches(name.lstrip("-"), letters, n=1)
    return letters[close[0]] if close else ""
