"""The infinilm command: arguments to calls. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import infinilm

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.sampling import SamplingParams

CHAT_HELP = (
    "/reset forgets the conversation, /system TEXT sets its first message, /save FILE writes it, "
    "//TEXT says /TEXT, /exit leaves"
)
# Lines of a paste that reach the terminal less than this after one another are one message.
PASTE_GAP = 0.03


def main(arguments: Sequence[str] | None = None) -> int:
    prepare_streams()
    options = parser().parse_args(arguments)
    try:
        check_output()
        options.run(options)
        sys.stdout.flush()  # what cannot be written is to be told here, not while Python ends
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (ValueError, OSError, IndexError, TypeError, MemoryError, ImportError) as error:
        print(f"infinilm: error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def prepare_streams() -> None:
    """Text that the terminal cannot show is written with backslashes; what was closed takes no complaint."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")


def check_output() -> None:
    if sys.stdout is None:
        raise ValueError("standard output is closed, so that nothing could be printed")


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


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="infinilm", description="Run Llama-family models.")
    top.add_argument("--version", action="version", version=f"infinilm {infinilm.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without a chat template"
    )
    generate.add_argument("--system", help="a system message before the prompt")
    add_model_options(generate)
    add_engine_options(generate)
    add_sampling_options(generate)
    generate.set_defaults(run=run_generate)
    chat = commands.add_parser("chat", help="talk with a model", epilog=CHAT_HELP)
    chat.add_argument("--system", help="a system message to begin with")
    add_model_options(chat)
    add_engine_options(chat)
    add_sampling_options(chat)
    chat.set_defaults(run=run_chat)
    batch = commands.add_parser("batch", help="answer a file of requests, in OpenAI's batch format")
    batch.add_argument("input", metavar="IN.jsonl", type=Path, help="a request a line")
    batch.add_argument(
        "output",
        metavar="OUT.jsonl",
        type=Path,
        help="an answer a line; lines that have one there are not asked",
    )
    add_model_options(batch)
    add_engine_options(batch)
    batch.set_defaults(run=run_batch)
    bench = commands.add_parser("bench", help="measure speed").add_subparsers(required=True, metavar="WHAT")
    latency = bench.add_parser("latency", help="prefill and decode tokens per second")
    add_model_options(latency)
    latency.add_argument("--prompt-length", type=int, default=512)
    latency.add_argument("--output-length", type=int, default=64)
    latency.add_argument("--batch-size", type=int, default=1)
    latency.add_argument("--rounds", type=int, default=5)
    latency.add_argument("--json", action="store_true", help="print one JSON object")
    latency.set_defaults(run=run_latency)
    throughput = bench.add_parser("throughput", help="many requests at once, through the engine")
    add_model_options(throughput)
    add_engine_options(throughput)
    throughput.add_argument("--num-prompts", type=int, default=64)
    throughput.add_argument(
        "--input-len", type=int, default=128, help="tokens of each prompt, drawn at random"
    )
    throughput.add_argument("--output-len", type=int, default=64)
    throughput.add_argument(
        "--concurrency", type=int, default=16, help="requests in the engine at once, at most"
    )
    throughput.add_argument("--json", action="store_true", help="print one JSON object")
    throughput.set_defaults(run=run_throughput)
    info = commands.add_parser("info", help="what a model is and the memory it needs")
    info.add_argument("model", nargs="?", help="a path or a Hugging Face id; the built-in model if left out")
    info.set_defaults(run=run_info)
    return top


def add_model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help="a path or a Hugging Face id; the built-in model if left out")
    command.add_argument("--dtype", help="float32, bfloat16 or float16; as stored if left out")
    command.add_argument("--device", help="cpu (the default), cuda, cuda:1 ...")
    command.add_argument(
        "--quantize",
        choices=("q8_0", "q4_0"),
        help="round the matrices of a float checkpoint to 8 or 4 bits while it is loaded",
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
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help='have tokens guessed ahead, as by \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    )


def json_object(text: str) -> Any:
    """Python's own reader, under a name that argparse can show"""
    return json.loads(text)


def add_sampling_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-tokens", type=int, default=256)
    command.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--repetition-penalty", type=float, default=1.0)
    command.add_argument("--seed", type=int)
    command.add_argument("--stats", action="store_true", help="print tokens per second at the end")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("device", "dtype", "activations", "quantize")}


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ("max_model_len", "kv_cache_dtype", "kv_cache_memory", "speculative_config")
    return model_options(options) | {name: getattr(options, name) for name in names}


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    from infinilm.sampling import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return SamplingParams(**{name: getattr(options, name) for name in names})


def load(options: argparse.Namespace) -> LLM:
    """The model, with a bar while its weights come in."""
    from infinilm.hub import resolve

    path = resolve(options.model)
    from infinilm.checkpoint import open_checkpoint
    from infinilm.llm import LLM

    with open_checkpoint(path) as checkpoint:
        num_bytes = checkpoint.num_bytes
    with progress("loading", num_bytes) as report:
        llm: LLM = LLM(path, **engine_options(options), report=report)
    return llm


@contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    """A bar on standard error that goes away when it is done; nothing where no one looks on."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


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
    return "".join(pieces)


def run_generate(options: argparse.Namespace) -> None:
    sampling_params(options)  # a wrong option is reported before the model is loaded
    prompt = read_prompt() if options.prompt == "-" else options.prompt
    llm = load(options)
    if options.raw or llm.tokenizer.chat_template is None:
        answer(llm, llm.tokenizer.encode(prompt), options)
        return
    messages = [{"role": "system", "content": options.system}] if options.system else []
    answer(llm, llm.tokenizer.encode_chat([*messages, {"role": "user", "content": prompt}]), options)


def read_prompt() -> str:
    check_input()
    with reading_input():
        return sys.stdin.read()


def run_chat(options: argparse.Namespace) -> None:
    check_input()
    edit_lines()
    sampling_params(options)
    llm, chat = load(options), Chat(options.system)
    print(CHAT_HELP, file=sys.stderr)
    while (text := ask()) is not None:
        if is_command(text):
            if not chat.obey(text):
                return
        elif text.strip():
            chat.turn(llm, text.removeprefix("/") if text.startswith("//") else text, options)


def edit_lines() -> None:
    """Give input() a history and line editing, and have it take a paste as a whole, where it can."""
    with suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")


def is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//")


def ask() -> str | None:
    """What the user says next, None at the end: a line, and those pasted along with it."""
    lines: list[str] = []
    with reading_input(), suppress(EOFError):
        lines.append(input("> "))
        while not is_command(lines[0]) and is_more_pasted():
            lines.append(input())
    if lines:
        return "\n".join(lines)
    print()  # the shell goes on below the prompt
    return None


def is_more_pasted() -> bool:
    return sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], PASTE_GAP)[0])


class Chat:
    """A conversation and the commands on it."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, llm: LLM, text: str, options: argparse.Namespace) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            reply = answer(llm, llm.tokenizer.encode_chat(asked), options)
        except KeyboardInterrupt:
            print("\n(stopped; the turn is forgotten)", file=sys.stderr)
            return
        except ValueError as error:
            print(f"infinilm: {one_line(error)}; /reset begins anew", file=sys.stderr)
            return
        self.messages = [*asked, {"role": "assistant", "content": reply}]

    def obey(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        command, _, argument = line.partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self.reset()
        elif command == "/system":
            self.system = argument or None
            self.reset()
        elif command == "/save" and argument:
            self.save(argument.strip())
        else:
            print(CHAT_HELP, file=sys.stderr)
        return True

    def save(self, path: str) -> None:
        text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        try:
            # What UTF-8 cannot write, half a surrogate pair, becomes an escape that JSON knows.
            Path(path).expanduser().write_text(text, encoding="utf-8", errors="backslashreplace")
        except (OSError, ValueError, RuntimeError) as error:  # of a disk, a NUL in the name, no such home
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"infinilm: cannot write {path}: {reason}", file=sys.stderr)


def run_batch(options: argparse.Namespace) -> None:
    from infinilm.batch_files import Answers, Questions, Run

    questions = Questions(options.input)
    if options.output.exists() and options.output.samefile(options.input):
        raise ValueError(f"{options.output}: is the input; answers need a file of their own")
    with Answers(options.output, questions.num_lines) as answers:
        llm = load(options)
        with progress("answering", questions.num_lines) as report:
            counts = Run(llm, questions, answers, report).run()
    known = f", {counts.known:,} were there already" if counts.known else ""
    print(f"{counts.answered:,} answered, {counts.refused:,} refused{known}", file=sys.stderr)


def run_latency(options: argparse.Namespace) -> None:
    from infinilm.bench import Workload, measure_latency

    workload = Workload(options.prompt_length, options.output_length, options.batch_size, options.rounds)
    measured = measure_latency(workload, options.model, **model_options(options))
    if options.json:
        values = {name: value.median for name, value in measured.items()}
        spreads = {f"{name}_spread": value.spread for name, value in measured.items()}
        print(json.dumps(values | spreads))
        return
    for name, value in measured.items():
        print(f"{name.replace('_', ' '):34} {value.median:18,.1f} ±{value.spread:.0%}")


def run_throughput(options: argparse.Namespace) -> None:
    from infinilm.bench import Requests, measure_throughput

    requests = Requests(options.num_prompts, options.input_len, options.output_len, options.concurrency)
    measured = measure_throughput(requests, options.model, **engine_options(options))
    if options.json:
        print(json.dumps(measured))
        return
    for name, value in measured.items():
        numbers = value.items() if isinstance(value, dict) else [("", value)]
        shown = "  ".join(f"{of} {number:,.4g}".strip() for of, number in numbers)
        print(f"{name.replace('_', ' '):34} {shown}")


def run_info(options: argparse.Namespace) -> None:
    from infinilm.hub import resolve

    path = resolve(options.model)
    from infinilm.checkpoint import open_checkpoint
    from infinilm.models.weights import describe

    with open_checkpoint(path) as checkpoint:
        for name, value in describe(checkpoint).items():
            print(f"{name:14} {value}")
