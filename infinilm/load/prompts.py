"""What is asked and when: prompts of random words, lengths and moments by chance."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SIGMA = 0.5  # of a lognormal distribution's logarithm
MOST = 4  # times the mean: no length is beyond it
# One token each in most vocabularies
WORDS = """
    the of and to in is that for it as with was on be by at from are this have or an they which one you had
    not but what all were when we there can your said if do will each about how up out them then she many
    some so these would other into has more her two like him see time could no make than first been its who
    now people my made over did down only way find use may water long little very after word called just
    where most know get through back much go good new write our me man too any day same right look think
    also around another came come work three must because does part even place well such here take why help
    put different away again off went old number great tell men say small every found still between name
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Load:
    """Requests: how many, and how long their prompts and answers are, on average or each."""

    num_prompts: int = 128
    input_len: int = 128
    output_len: int = 64
    lengths: str = "lognormal"  # or "fixed"
    token_ids: int | None = None  # prompts of ids below it; of words if None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                told = f"{name.replace('_', '-')} must be at least 1, but is {getattr(self, name)}"
                raise ValueError(told)
        if self.lengths not in ("lognormal", "fixed"):
            raise ValueError(f"lengths must be lognormal or fixed, but is {self.lengths!r}")
        if self.token_ids is not None and self.token_ids < 1:
            raise ValueError(f"token-ids must be at least 1, but is {self.token_ids}")

    @property
    def distribution(self) -> str:
        """In words"""
        if self.lengths == "fixed":
            return f"prompts of {self.input_len} and answers of {self.output_len} tokens"
        return (
            f"lognormal lengths, sigma {SIGMA:g}, at most {MOST} times the mean: "
            f"prompts of {self.input_len} and answers of {self.output_len} tokens on average"
        )


@dataclass(frozen=True)
class Query:
    prompt: str | list[int]
    num_tokens: int  # of the answer


def queries(load: Load, run: int) -> list[Query]:
    """Lengths are the same in every run, prompts are not: no run finds those of another in a cache."""
    of_lengths, of_words = random.Random(load.seed), random.Random(f"{load.seed} {run}")
    return [
        Query(prompt(load, drawn(load, load.input_len, of_lengths), of_words), num_tokens)
        for num_tokens in [drawn(load, load.output_len, of_lengths) for _ in range(load.num_prompts)]
    ]


def drawn(load: Load, mean: int, chosen: random.Random) -> int:
    if load.lengths == "fixed":
        return mean
    length = round(chosen.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))
    return min(max(length, 1), MOST * mean)


def prompt(load: Load, length: int, chosen: random.Random) -> str | list[int]:
    if load.token_ids is not None:
        return [chosen.randrange(load.token_ids) for _ in range(length)]
    return " ".join(chosen.choices(WORDS, k=length))


@dataclass(frozen=True)
class Arrivals:
    """Requests a second, and how many there may be at once, if there is a limit."""

    rate: float = math.inf
    concurrency: int | None = None

    def moments(self, count: int, seed: int) -> list[float]:
        """Seconds from the start at which requests are due: a Poisson process, or all at once"""
        chosen, moment, found = random.Random(seed), 0.0, []
        for _ in range(count):
            found.append(moment)
            moment += chosen.expovariate(self.rate) if math.isfinite(self.rate) else 0.0
        return found
