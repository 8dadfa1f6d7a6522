"""What a GPU does with the shape of an 8B Llama, next to its own limits: `python -m benchmarks.gpu`.

Weights are random, and made on the device. Decoding is measured against the memory wall: the bytes of weights
and keys that a step must read, at the speed of a copy measured in the same run. Prompts are measured against
the largest product that cuBLAS makes. Steps go through the runner as the engine drives it, a step ahead, with
the draw of tokens by temperature and top_p. Results are printed and written to this GPU's folder in
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.charts import has_matplotlib, new_figure
from benchmarks.gpu_peers import PEERS
from benchmarks.machine import RESULTS, short, write
from benchmarks.report import OURS, table
from infinicore import nn
from infinicore.quantization import QuantizedTensor
from infinilm.batch import Stream
from infinilm.bench import decode
from infinilm.cache import BlockShape, PagedCache
from infinilm.config import EngineConfig, LlamaConfig
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.weights import Placement
from infinilm.recording import RECORDED_AT
from infinilm.runner import Runner
from infinilm.sampling import SamplingParams
from infinilm.work import Work

CONFIG = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=1 << 18, rope_theta=500000.0,
    eos_token_id=None,
)  # fmt: skip
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=1 << 20)
BLOCK = 16
CONTEXT = 1024
BATCHES = (1, 8, 32, 128, 256)
PROMPTS = (512, 2048, 8192)
CONTEXTS = (1024, 4096, 16384, 65536, 131072 - 64)
KINDS = ("bfloat16", "fp8", "q8_0", "q4_0")  # of weights
NUM_STEPS = 24


@dataclass
class Results:
    """Bytes and operations a second of the device, and seconds by what was done"""

    device: str
    versions: str
    copy_rate: float = 0.0
    product_rate: float = 0.0
    weight_bytes: dict[str, int] = field(default_factory=dict)  # that a step reads
    steps: dict[str, dict[int, float]] = field(default_factory=dict)  # by contender and batch
    contexts: dict[int, float] = field(default_factory=dict)  # a step of one stream, by its context
    prompts: dict[str, dict[int, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# ---- the limits of the device ------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object], num_calls: int = 10, num_rounds: int = 5) -> float:
    """The median of rounds, of each the mean; a first call is not counted."""
    call()
    rounds = []
    for _ in range(num_rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / num_calls)
    return statistics.median(rounds)


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written"""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def product_rate(device: torch.device) -> float:
    """Operations a second of cuBLAS, on a large square product"""
    size = 8192
    x = torch.randn(size, size, device=device).bfloat16()
    out = torch.empty_like(x)
    return float(2 * size**3 / seconds_of(lambda: torch.mm(x, x, out=out)))


# ---- infinilm ----------------------------------------------------------------------------------------------


def random_model(device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(CONFIG)
    finally:
        torch.set_default_dtype(torch.float32)
    model.lm_head.weight.data.mul_(6)  # so that logits are as far apart as those of a trained model
    model.lay_out()
    return model


def linears_of(model: LlamaForCausalLM) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def weight_bytes(model: LlamaForCausalLM) -> int:
    """What a step reads of the weights: all matrices but the embedding"""
    weights = [layer.weight for layer in linears_of(model)]
    return sum(w.num_bytes if isinstance(w, QuantizedTensor) else w.nbytes for w in weights)


def streams_of(count: int, length: int, room: int) -> list[Stream]:
    """Streams of random tokens with blocks of their own"""
    num_blocks = -(-(length + room) // BLOCK)
    generator, streams = torch.Generator().manual_seed(0), []
    for i in range(count):
        tokens = torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist()
        streams.append(Stream(tokens, PARAMS, seed=i))
        streams[-1].block_ids = list(range(i * num_blocks, (i + 1) * num_blocks))
    return streams


def runner_of(model: LlamaForCausalLM, streams: Sequence[Stream], length: int) -> Runner:
    """Over a cache of random keys and values"""
    shape = BlockShape(CONFIG.num_key_value_heads, CONFIG.head_dim, BLOCK, torch.bfloat16)
    num_blocks = sum(len(stream.block_ids) for stream in streams)
    cache = PagedCache(CONFIG.num_hidden_layers, shape, num_blocks, model.device)
    for pools in cache.layers:
        for pool in pools:
            pool.normal_()
    return Runner(model, cache, len(streams), length)


def decode_seconds(model: LlamaForCausalLM, batch: int, context: int) -> float:
    """Of a step, once recorded, at this context: the steps that count end as far behind it as they begin
    before it"""
    num_warm = 8
    first, room = context - num_warm - NUM_STEPS, 2 * NUM_STEPS + 2 * num_warm
    streams = streams_of(batch, first, room)
    runner = runner_of(model, streams, first + room)
    for stream in streams:
        stream.num_computed = first - 1
    decode(runner, streams, num_warm)  # which records it
    torch.cuda.synchronize()
    rounds = []
    for _ in range(2):
        start = time.perf_counter()
        decode(runner, streams, NUM_STEPS)
        rounds.append((time.perf_counter() - start) / NUM_STEPS)
    return min(rounds)


def prompt_seconds(model: LlamaForCausalLM, length: int) -> float:
    streams = streams_of(1, length, BLOCK)
    runner = runner_of(model, streams, length + BLOCK)
    for _ in range(RECORDED_AT):
        runner.run([Work(streams[0], length)])
    return seconds_of(lambda: runner.run([Work(streams[0], length)]), num_calls=1, num_rounds=3)


def prompt_operations(length: int) -> float:
    """Products with the layers' weights, the head's for one token, and attention to what is before"""
    hidden, heads = CONFIG.hidden_size, CONFIG.num_attention_heads * CONFIG.head_dim
    narrow = 2 * CONFIG.num_key_value_heads * CONFIG.head_dim
    layer = hidden * (2 * heads + narrow + 3 * CONFIG.intermediate_size)
    attention = 2 * heads * length  # of a token: two products with half the keys on average
    per_token = CONFIG.num_hidden_layers * (2 * layer + attention)
    return float(length * per_token + 2 * hidden * CONFIG.vocab_size)


def wall_seconds(results: Results, name: str, batch: int) -> float:
    """What reading weights, keys and values takes at the speed of a copy"""
    keys = 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * CONFIG.head_dim * 2
    return (results.weight_bytes[name] + batch * CONTEXT * keys) / results.copy_rate


def of_kind(model: LlamaForCausalLM, kind: str) -> LlamaForCausalLM | None:
    """The model with weights of another kind, made as loading makes them; None if that is not there"""
    if kind == "bfloat16":
        return model
    try:
        config = EngineConfig(device=model.device, dtype="bfloat16", quantize=kind)
        placement = Placement(config, torch.bfloat16)
    except ValueError:
        return None
    for layer in linears_of(model):
        layer.set_weight(placement.kept(placement.quantized(layer.weight.detach())))
    model.lay_out()
    return model


# ---- the run -----------------------------------------------------------------------------------------------


def measure(device: torch.device, batches: Sequence[int], is_quick: bool, stem: str) -> Results:
    """Written down after each part: what was found stays, if the next should fail."""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    results = Results(
        f"{torch.cuda.get_device_name(device)} (sm {capability})",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}",
    )
    print(results.device, results.versions, sep="\n")
    results.copy_rate, results.product_rate = copy_rate(device), product_rate(device)
    print(f"copy {results.copy_rate / 1e12:.2f} TB/s, product {results.product_rate / 1e12:.0f} TFLOP/s")
    for kind in KINDS[: 1 if is_quick else None]:
        with left_out(results, kind):
            measure_kind(results, device, kind, batches, is_quick)
        write_results(results, stem)
    for name in PEERS:
        with left_out(results, name):
            measure_peer(results, device, name, batches)
        write_results(results, stem)
    return results


@contextmanager
def left_out(results: Results, name: str) -> Iterator[None]:
    """Whatever fails is told of, and the others are still worth measuring."""
    try:
        yield
    except Exception as error:
        note(results, f"{name}: left out, {(str(error) or repr(error)).splitlines()[0]}")
    empty_cache()


def measure_kind(
    results: Results, device: torch.device, kind: str, batches: Sequence[int], is_quick: bool
) -> None:
    model = of_kind(random_model(device), kind)
    if model is None:
        note(results, f"{kind}: not there for a GPU yet")
        return
    name = OURS if kind == KINDS[0] else f"{OURS} {kind}"
    results.weight_bytes[name] = weight_bytes(model)
    with torch.inference_mode():
        for batch in batches:
            note_step(results, name, batch, decode_seconds(model, batch, CONTEXT))
        for length in PROMPTS[: 1 if is_quick else None]:
            seconds = prompt_seconds(model, length)
            results.prompts.setdefault(name, {})[length] = seconds
            rate = prompt_operations(length) / seconds
            share = f"{rate / results.product_rate:.1%} of cuBLAS's rate"
            print(f"{name}, prompt of {length}: {length / seconds:,.0f} tokens/s, {share}", flush=True)
        for context in CONTEXTS if kind == KINDS[0] and not is_quick else ():
            results.contexts[context] = decode_seconds(model, 1, context)
            print(f"{name}, context {context}: {1e3 * results.contexts[context]:.3f} ms a token", flush=True)
            empty_cache()


def measure_peer(results: Results, device: torch.device, name: str, batches: Sequence[int]) -> None:
    peer = PEERS[name](CONFIG, device)
    for batch in (batch for batch in batches if batch <= peer.most_streams):
        note_step(results, name, batch, peer.step_seconds(batch, CONTEXT, NUM_STEPS))
        empty_cache()


def note_step(results: Results, name: str, batch: int, seconds: float) -> None:
    results.steps.setdefault(name, {})[batch] = seconds
    rate = step_cell(results, name, batch)
    print(f"{name}, batch {batch}: {1e3 * seconds:.3f} ms a step, tokens/s {rate}", flush=True)


def note(results: Results, text: str) -> None:
    results.notes.append(text)
    print(text, flush=True)


def empty_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# ---- what is told of it ------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    batches = sorted({batch for steps in results.steps.values() for batch in steps})
    rates = [[name, *(step_cell(results, name, batch) for batch in batches)] for name in results.steps]
    lengths = sorted({length for prompts in results.prompts.values() for length in prompts})
    prompts = [
        [name, *(prompt_cell(results, length, seconds.get(length)) for length in lengths)]
        for name, seconds in results.prompts.items()
    ]
    contexts = [[f"{context:,}", f"{1e3 * seconds:.3f}"] for context, seconds in results.contexts.items()]
    limits = f"copy {results.copy_rate / 1e12:.2f} TB/s, cuBLAS {results.product_rate / 1e12:.0f} TFLOP/s"
    parts = [
        f"{results.device}; {results.versions}; {limits}; an 8B Llama of random weights, context {CONTEXT}\n",
        table(["tokens a second (share of the memory wall) at batch", *map(str, batches)], rates),
        table(["prompts, tokens a second (share of cuBLAS)", *map(str, lengths)], prompts),
        table(["context of one stream", "milliseconds a token"], contexts) if contexts else "",
        "".join(f"- {text}\n" for text in results.notes),
    ]
    return "\n".join(part for part in parts if part)


def step_cell(results: Results, name: str, batch: int) -> str:
    seconds = results.steps[name].get(batch)
    if seconds is None:
        return "–"
    has_wall = name in results.weight_bytes
    share = f" ({wall_seconds(results, name, batch) / seconds:.0%})" if has_wall else ""
    return f"{batch / seconds:,.0f}{share}"


def prompt_cell(results: Results, length: int, seconds: float | None) -> str:
    if seconds is None:
        return "–"
    share = prompt_operations(length) / seconds / results.product_rate
    return f"{length / seconds:,.0f} ({share:.0%})"


def draw(results: Results, path: Path) -> None:
    """Tokens a second by batch, and milliseconds of a step by context and by batch"""
    if not has_matplotlib():
        return
    figure = new_figure((14, 3.8), f"8B Llama, context {CONTEXT}, on {results.device}")
    rates, steps, contexts = figure.subplots(1, 3)
    for name, seconds in results.steps.items():
        rates.plot(list(seconds), [batch / s for batch, s in seconds.items()], "o-", label=name)
        steps.plot(list(seconds), [1e3 * s for s in seconds.values()], "o-", label=name)
    contexts.plot(list(results.contexts), [1e3 * s for s in results.contexts.values()], "o-")
    finish_panel(rates, "streams at once", "tokens a second")
    finish_panel(steps, "streams at once", "milliseconds a step")
    finish_panel(contexts, "tokens of context", "milliseconds a token, one stream")
    rates.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=120)


def finish_panel(panel: Any, x_name: str, y_name: str) -> None:
    panel.set(xlim=0, ylim=0, xlabel=x_name, ylabel=y_name)
    panel.grid(alpha=0.3)


def write_results(results: Results, stem: str) -> None:
    path = RESULTS / short(results.device) / stem
    write(path, asdict(results), markdown(results))
    draw(results, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="batches 1 and 128, one prompt, bfloat16 alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu: there is no CUDA device here")
    batches = (1, 128) if options.quick else BATCHES
    stem = "partial_gpu" if options.quick else "gpu"
    results = measure(torch.device("cuda", 0), batches, options.quick, stem)
    print(f"\n{markdown(results)}")


if __name__ == "__main__":
    main()
