"""From logits to tokens: each row by the parameters of its stream, with a random number of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinicore import ops
from infinilm.batch import Stream
from infinilm.parcels import Kinds, Parcel, sent, tensors_of
from infinilm.sampling import SamplingParams

# R rows, V vocabulary, W words of 32 bits that have one for every token

WORD = 32
ALL_ALLOWED = -1  # every bit of a word
BITS = (1 << 64) - 1


class Row(NamedTuple):
    """Logits that a token of the stream is drawn from, which will stand at `position`."""

    stream: Stream
    position: int


class Ranked(NamedTuple):
    """A token, its logprob by the model's own logits, and how many tokens are at least as likely."""

    token_id: int
    logprob: float
    rank: int


def uniform(seed: int, index: int, position: int) -> float:
    """A number from 0 to 1 that these three alone decide: no neighbour and no interruption changes it."""
    mixed = 0
    for value in (seed, index, position):
        mixed = mix((mixed + value + 0x9E3779B97F4A7C15) & BITS)
    return (mixed >> 11) * 2.0**-53


def mix(bits: int) -> int:
    """splitmix64's last step (Steele et al., 2014): each bit of the input moves half of the output"""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & BITS
    return bits ^ (bits >> 31)


class Settings:
    """What ops.sample reads of R rows, in arrays of a parcel.

    After a step nothing but weights is in the CPU's caches, and each call into torch would take tens of
    microseconds.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._uniforms, self._top_k, self._numbers = arrays
        self._params: list[SamplingParams | None] = [None] * len(self._top_k)

    @staticmethod
    def kinds(num_rows: int) -> Kinds:
        return ("d", num_rows), ("q", num_rows), ("f", 3 * num_rows)

    def fill(self, rows: Sequence[Row]) -> None:
        for i, (stream, position) in enumerate(rows):
            params = stream.params
            if params.temperature > 0:
                self._uniforms[i] = uniform(stream.seed, stream.index, position)
            if params is not self._params[i]:
                self._params[i] = None  # until they are all there: an interrupt may come in between
                self._numbers[3 * i : 3 * i + 3] = array(
                    "f", [params.temperature, params.top_p, params.min_p]
                )
                self._top_k[i] = max(params.top_k, 0)
                self._params[i] = params


def sampled(logits: Tensor, settings: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """A token from each row [V] by the settings, which are as Settings has them"""
    uniforms, top_k, numbers = settings
    return ops.sample(logits, uniforms, numbers.view(-1, 3), top_k, out=out)


@torch.inference_mode()
def draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """A token from each row [V]; -1 where the logits are no numbers"""
    streams = [row.stream for row in rows]
    kinds = Settings.kinds(len(rows))
    parcel = Parcel(kinds, is_sent=False)
    Settings(parcel.arrays).fill(rows)
    if any(map(needs_adjusting, streams)):
        logits = adjusted(logits, streams)
    return sampled(logits, tensors_of(sent(parcel.memory, logits.device), kinds))


# ---- what a stream forbids or makes less likely ------------------------------------------------------------


def needs_adjusting(stream: Stream) -> bool:
    params = stream.params
    has_penalty = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
    is_too_short = params.min_tokens > stream.num_drawn
    is_bound = params.allowed_token_ids or stream.bad_words or stream.matcher
    return bool(has_penalty or params.logit_bias or is_too_short or is_bound)


def adjusted(logits: Tensor, streams: Sequence[Stream]) -> Tensor:
    """The logits [R, V] that the streams draw from, in float32: penalties, biases, what is allowed."""
    history, ends = histories(streams)
    penalties = torch.tensor(
        [
            (s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty)
            for s in streams
        ],
        dtype=torch.float32,
        device="cpu",
    )
    masks = allowed_tokens(streams, logits.shape[1])
    there = [sent(t, logits.device) for t in (history, ends, penalties, masks)]
    return biased(ops.adjust_logits(logits, *there), streams)


def biased(logits: Tensor, streams: Sequence[Stream]) -> Tensor:
    biases = [(row, *bias) for row, stream in enumerate(streams) for bias in stream.params.logit_bias]
    if biases:
        *places, values = zip(*biases, strict=True)
        rows, ids = (sent(torch.tensor(t, device="cpu"), logits.device) for t in places)
        added = torch.tensor(values, dtype=logits.dtype, device="cpu")
        logits[rows, ids] += sent(added, logits.device)
    return logits


def histories(streams: Sequence[Stream]) -> tuple[Tensor, Tensor]:
    """The tokens of all streams one after the other, and where the prompt and all of each ends"""
    tokens, ends = array("q"), []
    for stream in streams:
        start = len(tokens)
        tokens.extend(stream.token_ids)
        ends.append((start + stream.num_prompt, len(tokens)))
    return torch.frombuffer(tokens, dtype=torch.int64), torch.tensor(ends, device="cpu")


def allowed_tokens(streams: Sequence[Stream], vocab_size: int) -> Tensor:
    """A bit for each token that may come next [R, W]"""
    shape = len(streams), -(-vocab_size // WORD)
    masks = torch.full(shape, ALL_ALLOWED, dtype=torch.int32, device="cpu")
    for mask, stream in zip(masks, streams, strict=True):
        if stream.params.allowed_token_ids:
            mask.copy_(bits_of(stream.params.allowed_token_ids, len(mask)))
        if stream.matcher is not None:
            mask &= stream.matcher.mask()
        if banned := banned_tokens(stream):
            mask &= ~bits_of(banned, len(mask))
    return masks


def has_choice(stream: Stream, vocab_size: int) -> bool:
    """Whether any token may come next"""
    (words,) = allowed_tokens([stream], vocab_size).tolist()
    return any(words[token_id // WORD] >> token_id % WORD & 1 for token_id in range(vocab_size))


def bits_of(token_ids: Sequence[int], num_words: int) -> Tensor:
    """Words that have a bit for each token, v % 32 of word v // 32, set for these"""
    flags = np.zeros(num_words * WORD, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))


def banned_tokens(stream: Stream) -> list[int]:
    """What would end a stream that is too short, and the last tokens of bad words that it has begun"""
    num_drawn = stream.num_drawn
    banned = list(stream.stop_ids) if num_drawn < stream.params.min_tokens else []
    for *begun, last in stream.bad_words:
        if len(begun) <= num_drawn and stream.token_ids[len(stream) - len(begun) :].tolist() == begun:
            banned.append(last)
    return banned


# ---- logprobs ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def ranked(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[list[Ranked]]:
    """For each row [V] the given token, then the num_top likeliest ones, or all there are"""
    num_top = min(num_top, logits.shape[1])
    tokens = torch.tensor(token_ids, device=logits.device)
    ids, values = (t.tolist() for t in ops.logprobs(logits, tokens, num_top))
    return [
        [
            Ranked(token, chosen, rank),
            *(Ranked(*found, place) for place, found in enumerate(zip(others, rest, strict=True), 1)),
        ]
        for token, (rank, *others), (chosen, *rest) in zip(token_ids, ids, values, strict=True)
    ]
