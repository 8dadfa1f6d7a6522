"""Rotary angles: the six kinds of rope_scaling, checked when a config is read and applied to the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from infinicore import nn
from infinicore.nn.functional import RopeAlgo
from infinicore.nn.rope import sin_and_cos
from infinilm.values import check_flag, check_number, check_whole

# What rope_scaling may say for each type: required keys, then optional ones.
TRAINED = "original_max_position_embeddings"
YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {TRAINED}),
    "yarn": ({"factor"}, {TRAINED, *YARN}),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor", TRAINED}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", TRAINED}, set()),
}
# Keys that name the type, or repeat what the config itself says.
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Keys of other programs, in files of DeepSeek and of those who made yarn; transformers passes them over.
FOREIGN_KEYS = {"attn_factor", "finetuned"}
EVERY_KEY = set[str]().union(*(required | optional for required, optional in KEYS.values()))
INITIAL_LENGTH = 512
MAX_POSITION = 1 << 28


@dataclass(frozen=True)
class RopeParameters:
    """Everything that fixes the angle of a position. `scaling` has been through `checked_scaling`."""

    head_dim: int
    theta: float
    max_position: int
    scaling: Mapping[str, Any] = field(hash=False)
    rotary_dim: int  # how much of a head is rotated; its pairs lie half a head apart, and come first
    is_renewed: bool = False  # a text that outgrows its frequencies is computed anew with those of its length

    @property
    def original_max_position(self) -> int:
        return int(self.scaling.get(TRAINED) or self.max_position)

    @property
    def reach(self) -> int:
        """How long a sequence may be: by scaling, longer than the model was first trained for"""
        rope_type, factor = self.scaling["rope_type"], self.scaling.get("factor", 1.0)
        if rope_type == "dynamic":
            return MAX_POSITION
        stretched = {"linear": self.max_position, "yarn": self.original_max_position}.get(rope_type, 0)
        return min(max(self.max_position, int(stretched * factor)), MAX_POSITION)

    @property
    def is_fixed(self) -> bool:
        """Whether a position has one angle, however long the sequence is."""
        return self.scaling["rope_type"] not in ("dynamic", "longrope")

    def regime(self, length: int) -> int:
        """Lengths of one regime share their frequencies. Streams whose prompts are of one share all angles: a
        prompt is rotated as a whole, and what follows it by its place alone."""
        if self.scaling["rope_type"] == "dynamic":
            return max(length, self.max_position)
        if self.scaling["rope_type"] == "longrope":
            return int(length > self.original_max_position)
        return 0

    def switch_at(self, length: int) -> int | None:
        """The length beyond which a text that begins with so many tokens is computed anew"""
        if not self.is_renewed or self.is_fixed or self.regime(length) != self.regime(1):
            return None
        return self.original_max_position

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """(radians a position for each pair, factor of sin and cos) for a sequence of this length"""
        return FREQUENCIES[self.scaling["rope_type"]](self, length)

    def tables(self, length: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """sin and cos [N, D/2] of positions [N] with the frequencies of a sequence of this length"""
        frequency, factor = self.frequencies(length)
        angle = torch.outer(positions.to("cpu", torch.float32), frequency)
        sin, cos = sin_and_cos(angle, factor)
        unmoved = (0, (self.head_dim - self.rotary_dim) // 2)
        return pad(sin, unmoved), pad(cos, unmoved, value=1.0)


class LlamaRoPE(nn.RoPE):
    """nn.RoPE whose tables follow rope_scaling. One that reaches further takes its place: none ever changes,
    so that threads may rotate by other tables, each by its own.

    Longrope's tables are two, one below the other: of short sequences, then of long ones.
    """

    def __init__(self, parameters: RopeParameters) -> None:
        # Models are made without memory, on "meta", from where torch would not move these to the weights.
        super().__init__(parameters.head_dim, 1, parameters.theta, RopeAlgo.GPT_NEOX, device="cpu")
        self.rope_parameters = parameters
        self.num_positions = 0

    def anew(self) -> LlamaRoPE:
        """One of this kind, without tables"""
        return LlamaRoPE(self.rope_parameters)

    def reaching(self, num_positions: int, like: Tensor) -> LlamaRoPE:
        """This one, or one for positions below num_positions, with the dtype and device of `like`."""
        has_place = self.sin_cache.device == like.device and self.sin_cache.dtype == like.dtype
        if has_place and num_positions <= self.num_positions:
            return self
        num_rows = max(INITIAL_LENGTH, 1 << (num_positions - 1).bit_length())
        lengths = [1] if self.rope_parameters.scaling["rope_type"] != "longrope" else [1, MAX_POSITION]
        positions = torch.arange(num_rows, device="cpu")
        return self._of([(length, positions) for length in lengths], num_rows, like)

    def placed(self, slots: Tensor, spans: Tensor) -> tuple[LlamaRoPE, Tensor]:
        """What rotates tokens at these slots [N], and the row of each: span is the length of the sequence
        whose frequencies a token has."""
        parameters = self.rope_parameters
        if parameters.is_fixed or parameters.regime(int(spans.max())) == parameters.regime(1):
            return self, slots
        if parameters.scaling["rope_type"] == "longrope":
            return self, slots + (spans > parameters.original_max_position) * self.num_positions
        lengths, counts = (t.tolist() for t in torch.unique_consecutive(spans, return_counts=True))
        parts = list(zip(lengths, torch.split(slots, counts), strict=True))
        return self._of(parts, 0, self.sin_cache), torch.arange(len(slots), device=slots.device)

    def _of(self, parts: list[tuple[int, Tensor]], num_positions: int, like: Tensor) -> LlamaRoPE:
        """With rows for the positions of each part, at the frequencies of its length"""
        tables = [self.rope_parameters.tables(length, positions) for length, positions in parts]
        sin, cos = (torch.cat(part) for part in zip(*tables, strict=True))
        rope = self.anew()
        rope.set_tables(sin, cos, like.dtype, like.device)
        rope.max_seq_len, rope.num_positions = len(sin), num_positions
        return rope


# ---- frequencies, as the models were trained with them: float32 throughout ----


def powers(theta: float, rotary_dim: int) -> Tensor:
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return theta**exponent


def default_frequencies(rope: RopeParameters, _: int) -> tuple[Tensor, float]:
    return 1.0 / powers(rope.theta, rope.rotary_dim), 1.0


def linear_frequencies(rope: RopeParameters, _: int) -> tuple[Tensor, float]:
    return 1.0 / powers(rope.theta, rope.rotary_dim) / rope.scaling["factor"], 1.0


def dynamic_frequencies(rope: RopeParameters, length: int) -> tuple[Tensor, float]:
    """NTK scaling: the base grows with the sequence, once it is longer than the model was trained for."""
    factor, dim = rope.scaling["factor"], rope.rotary_dim
    stretch = factor * max(length, rope.max_position) / rope.max_position - (factor - 1)
    return 1.0 / powers(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def yarn_frequencies(rope: RopeParameters, _: int) -> tuple[Tensor, float]:
    """Fast rotations stay, slow ones are stretched by factor, a ramp lies between (Peng et al., 2023)."""
    factor = rope.scaling["factor"]
    spread = powers(rope.theta, rope.rotary_dim)
    low, high = yarn_ramp(rope)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    stretched = ramp.clamp(0, 1)
    frequency = 1.0 / (factor * spread) * stretched + 1.0 / spread * (1 - stretched)
    return frequency, yarn_attention_factor(rope.scaling)


def yarn_ramp(rope: RopeParameters) -> tuple[float, float]:
    """The pairs at which beta_fast and beta_slow turns fit into the trained length"""

    def pair_of(num_turns: float) -> float:
        ratio = rope.original_max_position / (num_turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = pair_of(rope.scaling.get("beta_fast") or 32)
    high = pair_of(rope.scaling.get("beta_slow") or 1)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = scaling["factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_growth(factor, scaling["mscale"]) / yarn_growth(factor, scaling["mscale_all_dim"])
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_frequencies(rope: RopeParameters, length: int) -> tuple[Tensor, float]:
    """A factor for each pair: one list up to the trained length, another beyond it."""
    name = "long_factor" if length > rope.original_max_position else "short_factor"
    factors = torch.tensor(rope.scaling[name], dtype=torch.float32, device="cpu")
    return 1.0 / (factors * powers(rope.theta, rope.rotary_dim)), longrope_attention_factor(rope)


def longrope_attention_factor(rope: RopeParameters) -> float:
    if rope.scaling.get("attention_factor") is not None:
        return float(rope.scaling["attention_factor"])
    factor = rope.scaling.get("factor") or rope.max_position / rope.original_max_position
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original_max_position))


def llama3_frequencies(rope: RopeParameters, _: int) -> tuple[Tensor, float]:
    """Long waves are stretched by factor, short ones stay, those between are blended."""
    factor, low, high = (rope.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequency = 1.0 / powers(rope.theta, rope.rotary_dim)
    wavelength = 2 * math.pi / frequency
    blend = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - blend) * frequency / factor + blend * frequency
    stretched = torch.where(wavelength > rope.original_max_position / low, frequency / factor, blended)
    return torch.where(wavelength < rope.original_max_position / high, frequency, stretched), 1.0


FREQUENCIES: dict[str, Callable[[RopeParameters, int], tuple[Tensor, float]]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
    "llama3": llama3_frequencies,
}


# ---- checks ----

MAX_THETA = 1e15
MAX_FACTOR = 1e6


def checked_scaling(scaling: Mapping[str, Any] | None, rotary_dim: int) -> dict[str, Any]:
    """rope_scaling with its type under `rope_type`; every rule that is broken is a ValueError."""
    if scaling is None:
        return {"rope_type": "default"}
    rope_type = rope_type_of(scaling)
    aside = COMMON_KEYS | FOREIGN_KEYS
    given = {key: value for key, value in scaling.items() if key not in aside and value is not None}
    check_keys(rope_type, set(given))
    checked = {
        key: checked_value(f"rope_scaling: {key}", key, value, rotary_dim) for key, value in given.items()
    }
    if rope_type == "llama3" and not checked["low_freq_factor"] < checked["high_freq_factor"]:
        raise ValueError("rope_scaling: low_freq_factor must be below high_freq_factor")
    return {"rope_type": rope_type, **checked}


def rope_type_of(scaling: Mapping[str, Any]) -> str:
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling must be a mapping, but is {short(scaling)}")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in KEYS:
        raise ValueError(f"rope_scaling: type {short(rope_type)} is unknown; expected one of {sorted(KEYS)}")
    return rope_type


def check_keys(rope_type: str, given: set[str]) -> None:
    required, optional = KEYS[rope_type]
    if missing := required - given:
        raise ValueError(f"rope_scaling: type {rope_type!r} needs {sorted(missing)}")
    # Keys of other types do nothing beside "default"; others would, such as a scaling for each type of layer.
    known = EVERY_KEY if rope_type == "default" else required | optional
    if unknown := given - known:
        names = [key[:99] for key in sorted(unknown)[:9]]
        raise ValueError(f"rope_scaling: type {rope_type!r} does not know {names}")


def checked_value(name: str, key: str, value: Any, rotary_dim: int) -> Any:
    if key == "truncate":
        return check_flag(name, value)
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple) or len(value) != rotary_dim // 2:
            raise ValueError(f"{name} must be {rotary_dim // 2} positive numbers, but is {short(value)}")
        return [check_number(f"{name}[{i}]", factor, MAX_FACTOR) for i, factor in enumerate(value)]
    if key == TRAINED:
        is_whole_float = isinstance(value, float) and value.is_integer()
        return check_whole(name, int(value) if is_whole_float else value, 2, MAX_POSITION)
    return check_number(name, value, MAX_FACTOR, 1.0 if key == "factor" else 0.0)


def check_frequencies(rope: RopeParameters) -> None:
    """Numbers that are each in range may still have no angle together, such as yarn's of a theta of 1."""
    try:
        found = [rope.frequencies(length) for length in (1, rope.max_position + 1, MAX_POSITION)]
        is_finite = all(math.isfinite(factor) and bool(turns.isfinite().all()) for turns, factor in found)
    except (ArithmeticError, ValueError):
        is_finite = False
    if not is_finite:
        together = f"rope_theta {rope.theta}, head_dim {rope.head_dim}, rope_scaling {short(rope.scaling)}"
        raise ValueError(f"{together}: these give no frequencies")
