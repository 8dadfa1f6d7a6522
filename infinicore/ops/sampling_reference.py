"""What the ops between logits and tokens mean, in plain torch, with the inputs they are tested on."""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore.ops.registry import DEFAULT_TOLERANCES, RECORDING, Kernel, Tolerance, op
from infinicore.ops.samples import EXACT, NOT_FINITE, ODD_SIZES, Samples, not_finite, random

SMALLEST_TEMPERATURE = 2.0**-126  # what is less may be 0 as a float32, and is greedy


def random_sample_samples(dtype: torch.dtype) -> Samples:
    logits = random(1000, dtype=dtype, scale=2.0)
    for random_val in (0.0, 0.3, 0.999):
        for topp, topk, temperature in (
            (1.0, 0, 1.0),
            (0.9, 50, 0.8),
            (0.3, 0, 2.0),
            (1.0, 7, 0.5),
            (1.0, 0, 0.0),
            (0.5, 0, 1e-50),
        ):
            yield logits, random_val, topp, topk, temperature
    yield torch.zeros(8, dtype=dtype), 0.5, 0.5, 0, 1.0  # exact ties: four kept, the third taken
    yield logits, 0.7, 1.0, 5, 1e12  # by weights alone, these five would be the first of all
    yield torch.zeros(1, dtype=dtype), 0.9, 0.1, 1, 1.0
    yield torch.tensor([-torch.inf, 1.0, -torch.inf], dtype=dtype), 0.99, 1.0, 0, 1.0


@op(random_sample_samples, EXACT)
def random_sample(logits: Tensor, random_val: float, topp: float, topk: int, temperature: float) -> Tensor:
    """The token drawn by random_val from softmax(logits / temperature) cut to topk, then to topp of the rest.

    Tokens stand in falling order of logits, equal ones by id; the smallest set that reaches topp is kept.
    """
    is_greedy = temperature < SMALLEST_TEMPERATURE
    weights, order = falling_weights(logits, 1.0 if is_greedy else temperature)
    if is_greedy:
        return order[0].clone()
    num_kept = topk if 0 < topk < len(weights) else len(weights)
    weights = weights[:num_kept]
    if topp < 1:
        is_short = weights.cumsum(0) < topp * weights.sum()
        weights = weights[: int(is_short.sum()) + 1]
    passed = weights.cumsum(0) > random_val * weights.sum()
    last = int((weights > 0).sum()) - 1
    rank = int(passed.int().argmax()) if passed.any() else last
    return order[min(rank, last)].clone()


def falling_weights(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities in float64, and the token of each, that of the largest logit first: where
    the temperature is high, rounding leaves many probabilities equal."""
    wide, order = torch.sort(logits.double(), descending=True, stable=True)
    return ((wide - wide[0]) / temperature).exp(), order


def sample_samples(dtype: torch.dtype) -> Samples:
    settings = torch.tensor(
        [
            [1.0, 1.0, 0.0],
            [0.8, 0.9, 0.0],
            [2.0, 0.3, 0.02],
            [0.5, 1.0, 0.3],
            [0.0, 1.0, 0.0],
            [1.0, 0.7, 1.0],
            [1e-40, 1.0, 0.5],
        ]
    )
    top_k = torch.tensor([0, 50, -1, 7, 3, 1, 0])
    for size in (1, 7, 33, 1023, 5003):
        for uniform in (0.0, 0.3, 0.999):
            uniforms = torch.full((7,), uniform, dtype=torch.float64)
            yield random(7, size, dtype=dtype, scale=2.0), uniforms, settings, top_k
    size = 133
    spoilt = torch.cat([not_finite(size, dtype), torch.full((1, size), -torch.inf, dtype=dtype)])
    rows = torch.arange(14) % 6
    yield spoilt, torch.full((14,), 0.7, dtype=torch.float64), settings[rows], top_k[rows]
    unsound = torch.tensor([[t, 1.0, 0.0] for t in (*NOT_FINITE, -1.0)])
    yield spoilt[2:3].repeat(4, 1), torch.full((4,), 0.7, dtype=torch.float64), unsound, top_k[:4] * 0
    yield random(0, 8, dtype=dtype), torch.empty(0, dtype=torch.float64), settings[:0], top_k[:0]


@op(sample_samples, EXACT)
def sample(logits: Tensor, uniforms: Tensor, settings: Tensor, top_k: Tensor) -> Tensor:
    """random_sample of each row by its own number and settings, which are temperature, top_p and min_p.

    Tokens less than min_p times as likely as the likeliest are dropped first. A row with NaN, +inf or nothing
    but -inf, or whose temperature is negative or not finite, gets -1 and leaves the others alone.
    logits [R, V], uniforms [R], settings [R, 3], top_k [R] -> [R]; those beside the logits may be on the CPU.
    """
    rows = zip(logits, uniforms.tolist(), settings.tolist(), top_k.tolist(), strict=True)
    return torch.tensor([drawn(*row) for row in rows], dtype=torch.int64, device=logits.device)


def is_greedy(out: Tensor | None, logits: Tensor, uniforms: Tensor, settings: Tensor, _: Tensor) -> bool:
    """Whether the largest logit of each row is wanted, which is known without waiting for a device"""
    is_elsewhere = out is None and not logits.is_cpu and settings.is_cpu and not RECORDING.stack
    return is_elsewhere and not settings[:, 0].any()


def largest(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row; -1 in a row with NaN, +inf, or nothing but -inf"""
    values, tokens = logits.max(-1)
    return tokens.masked_fill(~values.isfinite(), -1)


sample.register(
    Kernel(
        "torch",
        is_greedy,
        lambda *args: largest(args[1]) if is_greedy(*args) else None,
        lambda *args: lambda: args[0].copy_(largest(args[1])),
    )
)


def drawn(logits: Tensor, uniform: float, settings: list[float], top_k: int) -> int:
    temperature, top_p, min_p = settings
    if is_spoilt(logits) or not 0 <= temperature < torch.inf:
        return -1
    if temperature >= SMALLEST_TEMPERATURE:
        weights = ((logits.double() - logits.max()) / temperature).exp()
        logits = logits.masked_fill(weights < min(min_p, 1.0), -torch.inf)
    return int(random_sample.reference(logits, uniform, top_p, top_k, temperature))


def is_spoilt(logits: Tensor) -> Tensor:
    """Whether a row [..., V] has no probabilities: with NaN or +inf, or nothing but -inf"""
    return ~((logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1))


def logprobs_samples(dtype: torch.dtype) -> Samples:
    for size, num_top in ((1, 0), (1, 1), (7, 3), (33, 33), (1023, 5), (5003, 20)):
        yield random(3, size, dtype=dtype, scale=3.0), torch.tensor([0, size - 1, size // 2]), num_top
    yield not_finite(133, dtype), torch.arange(13) * 11 - 1, 20
    yield torch.full((2, 40), -torch.inf, dtype=dtype), torch.tensor([-1, 3]), 2
    yield random(2, 40, dtype=dtype).round(), torch.tensor([3, 9]), 30  # many equal ones
    yield random(0, 8, dtype=dtype), torch.empty(0, dtype=torch.int64), 2


@op(logprobs_samples, dict.fromkeys(DEFAULT_TOLERANCES, Tolerance(1e-6, 1e-6)))
def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """log-softmax of each row at its token, then at its num_top largest logits (equal ones: lower id first).

    Beside the logprobs stand the rank of the token, 1 for the largest, and the ids of the others. A token of
    -1 has the rank -1 and the logprob NaN; in a row without probabilities (`is_spoilt`) all are so.
    logits [R, V], tokens [R] -> ranks and ids [R, 1 + num_top], logprobs in float32 [R, 1 + num_top]
    """
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"logprobs: num_top must be from 0 to {logits.shape[1]}, but is {num_top}")
    check_ids("logprobs: token", tokens, -1, logits.shape[1])
    chosen = tokens.clamp(min=0)[:, None]
    ranks = 1 + (logits > logits.gather(1, chosen)).sum(-1, keepdim=True)
    largest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    values = torch.log_softmax(logits.double(), -1).gather(1, torch.cat([chosen, largest], 1))
    is_missing = is_spoilt(logits)[:, None].repeat(1, 1 + num_top)
    is_missing[:, 0] |= tokens < 0
    ids = torch.cat([ranks, largest], 1).masked_fill(is_missing, -1)
    return ids, values.masked_fill(is_missing, torch.nan).float()


def check_ids(what: str, ids: Tensor, lowest: int, end: int) -> None:
    is_bad = (ids < lowest) | (ids >= end)
    if is_bad.any():
        at = int(is_bad.int().argmax())
        raise IndexError(f"{what} {int(ids[at])} (element {at}) is outside [0, {end})")


def adjust_logits_samples(dtype: torch.dtype) -> Samples:
    penalties = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.5, 0.25], [0.7, -1.0, 0.0], [1.0, 0.0, 2.0]])
    generator = torch.Generator().manual_seed(0)
    for size in (*ODD_SIZES, 5003):
        history = torch.randint(size, (40,), generator=generator)
        ends = torch.tensor([[3, 9], [9, 17], [30, 31], [31, 40]])
        words = torch.randint(-(1 << 31), 1 << 31, (4, (size + 31) // 32), generator=generator)
        words[0] = -1
        for allowed in (None, words.int()):
            yield random(4, size, dtype=dtype, scale=3.0), history, ends, penalties, allowed
    rows = torch.arange(13) % 4
    whole = torch.tensor([[0, 133]] + [[133, 133]] * 12)
    yield not_finite(133, dtype), torch.arange(140).clamp(max=132), whole, penalties[rows] + 0.5, None
    nothing = torch.empty(0, dtype=torch.int64)
    yield random(0, 8, dtype=dtype), nothing, nothing.view(0, 2), penalties[:0], None
    yield random(1, 8, dtype=dtype), nothing, torch.zeros(1, 2, dtype=torch.int64), penalties[1:2], None


@op(adjust_logits_samples, EXACT)
def adjust_logits(
    logits: Tensor, history: Tensor, ends: Tensor, penalties: Tensor, allowed: Tensor | None
) -> Tensor:
    """Logits [R, V] in float32 after the penalties of the tokens before them, -inf where none is allowed.

    Row r's tokens are history[ends[r - 1, 1] : ends[r, 1]] (the first row's from 0), the prompt's up to
    ends[r, 0]. penalties [R, 3]: repetition divides positive logits of all these tokens and multiplies
    negative ones; then presence, and frequency for each time it was drawn, are subtracted from what was drawn
    after the prompt. allowed [R, ceil(V / 32)] in int32 has a bit for each token (word v // 32, bit v % 32).
    """
    check_ends(ends.flatten().tolist(), len(history))
    check_ids("adjust_logits: token", history[: int(ends[-1, 1])] if len(ends) else ends, 0, logits.shape[1])
    begins = [0, *ends[:-1, 1].tolist()]
    rows = [
        punished(row.float(), history[begin:prompt_end], history[prompt_end:end], penalty)
        for row, begin, (prompt_end, end), penalty in zip(
            logits, begins, ends.tolist(), penalties, strict=False
        )
    ]
    adjusted = torch.stack(rows) if rows else logits.float()
    if allowed is None:
        return adjusted
    column = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (allowed[:, column // 32] >> (column % 32)) & 1
    return adjusted.masked_fill(is_allowed == 0, -torch.inf)


def check_ends(ends: list[int], length: int) -> None:
    for at, (before, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if not before <= end <= length:
            raise IndexError(
                f"adjust_logits: end {end} (element {at}) is before the one in front of it, or beyond the"
                f" {length} tokens of the history"
            )


def punished(logits: Tensor, prompt: Tensor, drawn: Tensor, penalties: Tensor) -> Tensor:
    """logits [V] after tokens of a prompt and tokens drawn since"""
    repetition, presence, frequency = penalties
    counts = drawn.bincount(minlength=len(logits))
    is_seen = (counts + prompt.bincount(minlength=len(logits))) > 0
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(is_seen, scaled, logits)
    return torch.where(counts > 0, logits - (presence + frequency * counts), logits)
