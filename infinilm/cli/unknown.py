"""Options that a command does not have: that command tells of them, and what is meant by them."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

# What llama.cpp, ollama, vLLM and transformers call what is here. An option that a command lacks may in turn
# be another, or no option.
ELSEWHERE = {
    "-m": "--model",
    "--model": "a model that stands by itself",
    "-p": "a prompt that stands by itself",
    "--prompt": "a prompt that stands by itself",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--num-ctx": "--max-model-len",
    "-ngl": "--device",
    "--n-gpu-layers": "--device",
    "-t": "--threads",
    "--threads": "INFINICORE_NUM_THREADS in the environment",
    "--gpu-memory-utilization": "--kv-cache-memory",
    "--cache-type-k": "--kv-cache-dtype",
}
NEEDLESS = {
    "--trust-remote-code",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "--enable-prefix-caching",
}


class Command(argparse.ArgumentParser):
    """A parser that leaves nothing for the one above it, which would show a usage without any option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            what = f"unrecognized arguments: {' '.join(unknown)}"
            self.error("; ".join([what, *meanings(unknown, self._option_string_actions)]))
        return options, unknown


def meanings(unknown: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """What each option was probably meant to be, as far as that can be said"""
    for name in (argument.partition("=")[0] for argument in unknown if argument.startswith("-")):
        spelled = name.replace("_", "-")
        if spelled in NEEDLESS:
            yield f"{name} is not needed here"
        elif meant := meaning(spelled, known):
            yield f"{name} is {meant} here"
        elif close := difflib.get_close_matches(spelled, known, n=1):
            yield f"did you mean {close[0]}?"


def meaning(name: str, known: Collection[str]) -> str:
    meant = ELSEWHERE.get(name, "")
    is_lacking = meant.startswith("-") and meant not in known
    return meaning(meant, known) if is_lacking else meant
