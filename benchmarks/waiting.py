"""What a user waits for beside others, and what is read or guessed ahead: `python -m benchmarks.waiting`.

- The first token of a request whose first 1,000 tokens another one had, in shares of the first one's wait.
- The first token of each turn of a chat, which has all turns before it in its prompt.
- The steps of running streams while a prompt of 4,000 tokens is read beside them, in their usual steps.
- A text that repeats itself, and one that does not, with guesses taken from the text before.

One process, the engine's own steps, medians of several rounds. Writes to this CPU's folder in
benchmarks/results/.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import infinicore
from benchmarks import report
from benchmarks.machine import arguments, folder, machine, write
from infinilm import LLM, SamplingParams
from infinilm.bench import Measured, greedy
from infinilm.engine.engine import Engine
from infinilm.engine.request import Request

SHARED, OWN, LONG = 1000, 20, 4000
NUM_TURNS = 10
RUNNING = (1, 4, 16)
GUESSES = {"method": "ngram", "num_speculative_tokens": 7}
SEA = "Write about the sea."


@dataclass(frozen=True)
class Found:
    what: str
    wanted: str
    found: str


class Prompts:
    """Random token ids, never the same twice"""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.random = vocab_size, random.Random(0)

    def __call__(self, length: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(length)]


def first_token_seconds(engine: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[float, Request]:
    """How long a request waits; it is answered to its end."""
    request = engine.make(list(prompt), greedy(num_tokens))
    start = time.perf_counter()
    engine.enqueue(request)
    while not request.completions[0].num_drawn:
        engine.step()
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    return seconds, request


# ---- what is measured --------------------------------------------------------------------------------------


def shared_prefix(engine: Engine, prompts: Prompts, num_rounds: int) -> Found:
    shares = []
    for _ in range(num_rounds):
        shared = prompts(SHARED)
        first, second = (first_token_seconds(engine, shared + prompts(OWN), 2)[0] for _ in range(2))
        shares.append(second / first)
    return Found(f"the wait after {SHARED} tokens that another prompt had", "≤ 10% of its", told(shares, "%"))


def chat_turns(llm: LLM, num_rounds: int) -> Found:
    """A chat begins with what it is about, some sixty tokens that no other one had. Each turn asks a little
    question, and is answered with 40 tokens."""
    waits = [one_chat(llm, seed) for seed in range(num_rounds + 1)][1:]
    first, last = (1e3 * statistics.median(turns[i] for turns in waits) for i in (0, -1))
    return Found(
        f"the wait of turn {NUM_TURNS} of a chat", "≤ that of turn 1", f"{last:.0f} ms after {first:.0f} ms"
    )


def one_chat(llm: LLM, seed: int) -> list[float]:
    messages, waits = [{"role": "system", "content": about(seed)}], []
    for turn in range(NUM_TURNS):
        question = f"Tell me something about the number {seed + turn}, please, in a few words."
        messages.append({"role": "user", "content": question})
        seconds, request = first_token_seconds(llm.engine, llm.tokenizer.encode_chat(messages), 40)
        waits.append(seconds)
        messages.append({"role": "assistant", "content": request.output().outputs[0].text})
    return waits


def about(seed: int) -> str:
    return (
        f"{seed} is your number. You are a helpful assistant who answers questions about numbers in plain "
        "words, briefly, without lists or formulas. If you do not know something, say so. Never make up a "
        "fact. Keep to the language of the question, and be kind."
    )


def steps_beside_a_prompt(engine: Engine, prompts: Prompts, num_running: int) -> Found:
    """In usual steps of the running streams. Those grow with their texts, so they are measured before the
    prompt comes and after it is read, and taken to grow evenly."""
    for _ in range(num_running):
        engine.enqueue(engine.make(prompts(32), greedy(4096)))
    for _ in range(30):
        engine.step()
    before = usual_step(engine)
    long = engine.make(prompts(LONG), greedy(1))
    engine.enqueue(long)
    start, seconds = time.perf_counter(), []
    while not long.is_finished:
        seconds.append(step_seconds(engine))
    total, after = time.perf_counter() - start, usual_step(engine)
    for request_id in list(engine.requests):
        engine.abort(request_id)
    growth = (after - before) / len(seconds)
    steps = sorted(took / (before + growth * i) for i, took in enumerate(seconds))
    found = f"{statistics.median(steps):.1f}, p95 {steps[int(0.95 * len(steps))]:.1f}, most {steps[-1]:.1f}"
    beside = f"{num_running} running, a step of {1e3 * before:.1f} to {1e3 * after:.1f} ms"
    return Found(
        f"steps while {LONG} tokens are read in {total:.0f} s ({beside})",
        "≤ 3 usual ones",
        f"median {found}",
    )


def usual_step(engine: Engine) -> float:
    return statistics.median(step_seconds(engine) for _ in range(30))


def step_seconds(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def guesses(plain: LLM) -> list[Found]:
    guessing = LLM(kv_cache_memory="1GB", speculative_config=GUESSES)
    text = Path(__file__).read_text()
    copied = f"Copy this text exactly.\n\n{text[:1600]}\n\nThe copy:\n\n{text[:200]}"
    free = SamplingParams(temperature=1.2, seed=2, max_tokens=250, ignore_eos=True)
    return [
        Found("a text that is copied, with guesses", "≥ 1.5x", race(plain, guessing, copied, greedy(150))),
        Found("a text that is not, with guesses", "≥ 0.95x", race(plain, guessing, SEA, free)),
    ]


def race(plain: LLM, guessing: LLM, prompt: str, params: SamplingParams, num_rounds: int = 7) -> str:
    """How many times as fast with guesses; the same tokens come of it."""
    ratios = []
    for _ in range(num_rounds + 2):
        (one, seconds), (other, faster) = (timed(llm, prompt, params) for llm in (plain, guessing))
        assert one == other, "guesses changed the tokens"
        ratios.append(seconds / faster)
    return told(ratios[2:], "x")  # the first ones record steps


def timed(llm: LLM, prompt: str, params: SamplingParams) -> tuple[Any, float]:
    """The tokens, and the seconds from the first of them on"""
    tokens, start = [], 0.0
    for token, _ in llm.stream(prompt, params):
        start = start or time.perf_counter()
        tokens.append(token)
    return tokens, time.perf_counter() - start


def told(values: Sequence[float], unit: str) -> str:
    measured = Measured(tuple(values))
    median = f"{measured.median:.1%}" if unit == "%" else f"{measured.median:.2f}x"
    return f"{median} ±{measured.spread:.0%}"


# ---- all of it ---------------------------------------------------------------------------------------------


def run(model: str | None, num_rounds: int) -> list[Found]:
    llm = LLM(model, kv_cache_memory="2GB")
    prompts = Prompts(llm.model.config.vocab_size)
    first_token_seconds(llm.engine, prompts(600), 8)
    found = [shared_prefix(llm.engine, prompts, num_rounds)]
    if llm.tokenizer.chat_template is not None:
        found.append(chat_turns(llm, num_rounds))
    found += [steps_beside_a_prompt(llm.engine, prompts, count) for count in RUNNING]
    return found + (guesses(llm) if model is None else [])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a GGUF file; the built-in model, which is to guess too, if left out")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    infinicore.set_num_threads(options.threads)
    found, facts = run(options.model, options.rounds), machine(options.threads)
    text = report.table(["", "wanted", "found"], [[one.what, one.wanted, one.found] for one in found])
    print(text)
    stem = folder(options.threads) / ("partial_waiting" if options.model else "waiting")
    content = {"machine": facts, "found": [asdict(one) for one in found]}
    write(stem, content, f"{report.head(facts)}\n{text}")


if __name__ == "__main__":
    main()
