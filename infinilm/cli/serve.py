"""`infinilm serve`: options to a server and its model."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.options import (
    MODEL_HELP,
    add_engine_options,
    add_load_options,
    add_number,
    chosen_model,
    engine_options,
    positive,
)

if TYPE_CHECKING:
    from infinilm import AsyncLLM, LoRARequest
    from infinilm.server.serve import Options


SERVE_HELP = (
    "Each option may also stand in the environment: --max-model-len as INFINILM_MAX_MODEL_LEN, and so on. "
    "What is given here wins."
)

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)


class OneModel(argparse.Action):
    """A model by its place or by --model, as other commands have it; two of them are refused later"""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, given: Any, _: Any = None
    ) -> None:
        if given is self.default:  # none stands in its place
            return
        options.model = given
        options.given_models = [*getattr(options, "given_models", []), given]


class Several(argparse.Action):
    """Values that may stand after one option or each after its own; they replace those of the environment"""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, given: Any, _: Any = None
    ) -> None:
        before = getattr(options, self.dest)
        setattr(options, self.dest, given if before is self.default else [*before, *given])


def add(commands: Any) -> None:
    """`infinilm serve`"""
    command = commands.add_parser("serve", help="answer over HTTP, as OpenAI's API does", epilog=SERVE_HELP)
    command.add_argument("model", metavar="MODEL", nargs="?", action=OneModel, help=MODEL_HELP)
    command.add_argument("--model", metavar="MODEL", action=OneModel, help="the same")
    add_listening_options(command.add_argument_group("where it listens"))
    add_caller_options(command.add_argument_group("whom it answers"))
    add_running_options(command.add_argument_group("how the model is run"))
    add_load_options(command)
    add_engine_options(command)
    command.add_argument("--log-level", default="info", metavar="LEVEL", help="debug, info, warning or error")
    take_environment(command)
    command.set_defaults(run=run)


def add_listening_options(listen: Any) -> None:
    listen.add_argument("--host", default="127.0.0.1", help="this machine alone, 127.0.0.1, if left out")
    listen.add_argument("--port", type=int, default=8000, help="8000 if left out; 0 is any that is free")
    listen.add_argument("--uds", metavar="PATH", help="a Unix socket, in place of host and port")


def add_caller_options(who: Any) -> None:
    who.add_argument("--api-key", metavar="KEY", help="that callers must send; without one all are answered")
    who.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key a line, each of which will do")
    who.add_argument(
        "--served-model-name", nargs="+", action=Several, metavar="NAME", help="what callers call the model"
    )
    who.add_argument(
        "--lora",
        "--lora-modules",
        nargs="+",
        action=Several,
        metavar="NAME=PATH",
        help="adapters, folders of PEFT's, each of which callers ask for as a model of its name",
    )
    who.add_argument(
        "--allowed-origins",
        nargs="+",
        action=Several,
        metavar="ORIGIN",
        help="of web pages that may call it, as https://chat.example, or * for any; none if left out",
    )
    add_number(who, "--max-num-seqs", 64, "answers made at once")
    add_number(who, "--max-queue", 1024, "answers that may wait")
    who.add_argument(
        "--max-queue-tokens", type=int, default=1 << 22, metavar="N", help="tokens of prompts that may wait"
    )
    who.add_argument(
        "--request-timeout", type=float, metavar="SECONDS", help="for an answer; any time if left out"
    )
    add_number(who, "--shutdown-timeout", 30.0, "for answers under way when it is told to end", "SECONDS")


def add_running_options(how: Any) -> None:
    how.add_argument("--chat-template", type=Path, metavar="FILE", help="in place of the model's own")
    how.add_argument("--threads", type=int, metavar="N", help="of the CPU; all of them if left out")
    how.add_argument("--enable-lora", action="store_true", help=argparse.SUPPRESS)  # they always are
    add_number(how, "--max-loras", 64, "adapters that are kept")
    add_number(how, "--max-lora-rank", 512, "of any adapter")
    how.add_argument(
        "--prefix-cache-file",
        metavar="FILE",
        help="of prompts read before: loaded at the start if it is there, saved at the end",
    )


def take_environment(command: argparse.ArgumentParser) -> None:
    """What is not given on the command line is taken from there."""
    for action in command._actions:
        if (given := os.environ.get(f"INFINILM_{action.dest.upper()}")) is not None:
            action.default = given.split() if action.nargs == "+" else given


def run(options: argparse.Namespace) -> None:
    check_libraries()
    from infinilm.server import serve

    status = serve.run(server_options(options), lambda: load_async(options))
    if status:
        raise SystemExit(status)


def check_libraries() -> None:
    """What nothing but the server needs is installed by choice."""
    try:
        import infinilm.server.serve  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "h11", "prometheus_client"):
            raise
        raise ImportError(
            f"infinilm serve needs {error.name}, which is missing; pip install 'infinilm[serve]' installs it"
        ) from error


def server_options(options: argparse.Namespace) -> Options:
    from infinilm.hub import served_name
    from infinilm.server.exchange import Settings
    from infinilm.server.serve import Options

    check_one_model(options)
    check_queue(options)
    check_threads(options.threads)
    request_seconds = positive("--request-timeout", options.request_timeout)
    page_origins = origins(options.allowed_origins or [])
    return Options(
        settings=Settings(keys=api_keys(options), origins=page_origins, request_seconds=request_seconds),
        host=options.host,
        port=options.port,
        uds=options.uds,
        names=tuple(options.served_model_name or [served_name(options.model)]),
        loras=loras(options.lora or []),
        max_num_seqs=options.max_num_seqs,
        max_queue=options.max_queue,
        max_queue_tokens=options.max_queue_tokens,
        shutdown_seconds=positive("--shutdown-timeout", options.shutdown_timeout) or 0.0,
        prefix_file=options.prefix_cache_file,
        log_level=log_level(options.log_level),
    )


def check_one_model(options: argparse.Namespace) -> None:
    """Once all is parsed: what follows an option that is not known was taken for a model by its place."""
    given = list(dict.fromkeys(getattr(options, "given_models", [])))
    if len(given) > 1:
        raise ValueError(f"MODEL is {given[0]!r} and {given[1]!r}; give one of them")


def loras(given: Sequence[str]) -> tuple[LoRARequest, ...]:
    from infinilm.engine.adapters import LoRARequest

    parts = [one.partition("=") for one in given]
    if wrong := [one for one, (name, _, path) in zip(given, parts, strict=True) if not name or not path]:
        raise ValueError(f"--lora takes NAME=PATH, the name of an adapter and its folder, not {wrong[0]!r}")
    return tuple(LoRARequest(name, number, path) for number, (name, _, path) in enumerate(parts, start=1))


def origins(given: Sequence[str]) -> tuple[str, ...]:
    """As browsers send them; vLLM's commands have a list in JSON."""
    listed = [origin for one in given for origin in (json_list(one) if one.startswith("[") else [one])]
    found = tuple(origin.removesuffix("/") for origin in listed)
    if wrong := [one for one in found if one != "*" and not ORIGIN.fullmatch(one)]:
        wanted = "https://chat.example or http://localhost:3000, or *"
        raise ValueError(f"--allowed-origins takes origins of web pages, as {wanted}, but not {wrong[0]!r}")
    return found


def json_list(given: str) -> list[str]:
    try:
        return [str(one) for one in json.loads(given)]
    except ValueError as error:
        raise ValueError(f"--allowed-origins: {given!r} is no list in JSON: {error}") from None


def api_keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = [] if options.api_key is None else [options.api_key]
    if options.api_key_file is not None:
        keys += options.api_key_file.read_text("utf-8").splitlines()
        if not any(key.strip() for key in keys):
            raise ValueError(f"{options.api_key_file}: has no key, so that nobody could be let in")
    if options.api_key is not None and not options.api_key.strip():
        raise ValueError("the API key is empty; leave it out to answer all")
    return tuple(key.strip() for key in keys if key.strip())


def check_queue(options: argparse.Namespace) -> None:
    """With a queue below 0 fewer answers than --max-num-seqs would be made at once."""
    for name in ("max_queue", "max_queue_tokens"):
        if (count := getattr(options, name)) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, but is {count}")


def check_threads(count: int | None) -> None:
    """What infinicore would find, told before the server listens and by the option's own name"""
    if count is None:
        return
    from infinicore.ops.native import MAX_THREADS

    if not 1 <= count <= MAX_THREADS:
        raise ValueError(f"--threads must be from 1 to {MAX_THREADS}, but is {count}")


def log_level(name: str) -> str:
    if name.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError(f"--log-level must be debug, info, warning or error, but is {name!r}")
    return name.lower()


def load_async(options: argparse.Namespace) -> AsyncLLM:
    """The model, in an engine that lets in whatever the server has let in."""
    from infinilm.hub import resolve

    path = resolve(options.model)
    from infinilm import AsyncLLM

    if options.threads is not None:
        set_threads(options.threads)
    template = None if options.chat_template is None else options.chat_template.read_text("utf-8")
    queue = {"max_queue": options.max_num_seqs + options.max_queue, "max_queue_tokens": 1 << 62}
    llm: AsyncLLM = AsyncLLM(
        chosen_model(options, path),
        **engine_options(options),
        **queue,
        max_num_seqs=options.max_num_seqs,
        chat_template=template,
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
    )
    keep_all()
    return llm


def keep_all() -> None:
    """What is there now stays: to search it for cycles would hold up all answers for a tenth of a second."""
    gc.collect()
    gc.freeze()


def set_threads(count: int) -> None:
    import torch

    import infinicore

    infinicore.set_num_threads(count)
    torch.set_num_threads(count)
