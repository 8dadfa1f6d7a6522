"""What several commands share: their options, the model they ask for."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.progress import progress

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.sampling import SamplingParams

MODEL_HELP = "a path or a Hugging Face id; the built-in model if left out"


def add_model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help=MODEL_HELP)
    add_load_options(command)


def add_load_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", help="auto (the default: as stored), float32, bfloat16 or float16")
    command.add_argument("--device", help="auto (the default: cuda if there is one), cpu, cuda, cuda:1 ...")
    command.add_argument(
        "--quantize",
        choices=("q8_0", "q4_0", "fp8"),
        help="round the matrices of a float checkpoint to 8 or 4 bits while it is loaded; fp8 needs a GPU",
    )
    command.add_argument(
        "--activations",
        choices=("float32", "int16", "int8"),
        help="how quantised layers see their input: near exact if left out; int8 is faster and less exact",
    )


def add_engine_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="of a prompt and its answer together; the model's own limit if left out",
    )
    command.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help="float32, float16, bfloat16 or q8_0; as the model computes if left out",
    )
    command.add_argument(
        "--kv-cache-memory",
        metavar="BYTES",
        help="for keys and values, as in 2GiB; a share of what is free if left out",
    )
    command.add_argument(
        "--packed-cache",
        metavar="FOLDER",
        help="keep packed copies of GGUF models there, which a CPU loads faster and processes share",
    )
    command.add_argument(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help='have tokens guessed ahead, as by \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    )


def readable(given: str) -> str:
    """Bytes of an argument that are no text come as halves of surrogate pairs."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        byte, encoding = ord(given[error.start]) & 0xFF, sys.getfilesystemencoding()
        raise argparse.ArgumentTypeError(
            f"must be text in {encoding}, but has the byte {byte:#04x} at {error.start}"
        ) from error
    return given


def json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"must be a JSON object, but is {text!r}")


def positive(name: str, seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"{name} must be a number of seconds above 0, but is {seconds}")
    return seconds


def add_answer_options(command: argparse.ArgumentParser, system_help: str) -> None:
    """Options of a command that answers: system prompt, model, engine, and how tokens are chosen"""
    command.add_argument("--system", type=readable, help=system_help)
    add_model_options(command)
    add_engine_options(command)
    add_sampling_options(command)


def add_number(command: Any, name: str, default: float, help_text: str, metavar: str = "N") -> None:
    """An option of the default's type, which its help ends with"""
    told = f"{help_text}: {default:g}"
    command.add_argument(name, type=type(default), default=default, metavar=metavar, help=told)


def add_sampling_options(command: argparse.ArgumentParser) -> None:
    add_number(command, "--max-tokens", 256, "of an answer")
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the likeliest; 0: all")
    add_number(command, "--top-p", 1.0, "keep the likeliest that have so much", "P")
    add_number(command, "--min-p", 0.0, "keep what has this share of the likeliest", "P")
    add_number(command, "--repetition-penalty", 1.0, "above 1 against repeating", "R")
    command.add_argument("--seed", type=int, help="of what is drawn; another each time if left out")
    command.add_argument("--stats", action="store_true", help="print tokens per second at the end")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("device", "dtype", "activations", "quantize")}


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ("max_model_len", "kv_cache_dtype", "kv_cache_memory", "packed_cache", "speculative_config")
    return model_options(options) | {name: getattr(options, name) for name in names}


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    from infinilm.sampling import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return SamplingParams(**{name: getattr(options, name) for name in names})


def load(options: argparse.Namespace) -> LLM:
    """The model, with a bar while its weights come in."""
    from infinilm.hub import resolve

    path = resolve(options.model)
    from infinilm.llm import LLM

    with progress("loading", stored_bytes(path)) as report:
        llm: LLM = LLM(chosen_model(options, path), **engine_options(options), report=report)
    return llm


def chosen_model(options: argparse.Namespace, path: Path) -> Path | None:
    """What the engine is told to load. None is the built-in model: of how its tokens are drawn its file says
    nothing, so that it must not be taken for any file."""
    return None if options.model is None else path


def stored_bytes(path: Path) -> int:
    from infinilm.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return checkpoint.num_bytes


def check_input() -> None:
    if sys.stdin is None:
        raise ValueError("standard input is closed, so that nothing can be read from it")


@contextmanager
def reading_input() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not {error.encoding}: {error.reason}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
