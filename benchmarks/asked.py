"""The engine, asked by coroutines of its own process as the server asks it: `python -m benchmarks.asked`.

Each line that comes in is a salt, with which no prompt is found in the cache; the seconds that all answers
took go out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from infinilm import AsyncLLM
from infinilm.bench import greedy, random_prompts


async def seconds_of(
    llm: AsyncLLM, prompts: Sequence[list[int]], num_new: int, num_clients: int, salt: str
) -> float:
    waiting = iter(enumerate(prompts))

    async def ask() -> None:
        for number, prompt in waiting:
            async for _ in llm.generate(prompt, greedy(num_new), f"{salt} {number}", cache_salt=salt):
                pass

    start = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for name in ("prompt", "num-new", "num-prompts", "clients"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    llm = AsyncLLM(options.model)
    vocab_size = llm.model.config.vocab_size
    prompts = random_prompts(vocab_size, options.prompt, options.num_prompts, seed=1)
    for salt in sys.stdin:
        print(asyncio.run(seconds_of(llm, prompts, options.num_new, options.clients, salt)), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
