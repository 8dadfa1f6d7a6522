"""What was measured, as a person reads it: a row of a table, a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    f"{'rate':>11} {'requests/s':>11} {'output tok/s':>13} {'total tok/s':>12}  {'first token, s':^20}  "
    f"{'between tokens, s':^20}  {'goodput/s':>9} {'failed':>7}\n"
    f"{'':>50}  {'p50    p90    p99':^20}  {'p50    p90    p99':^20}"
)


def row(found: Mapping[str, Any]) -> str:
    rate = f"{float(found['request_rate']):g}"
    if found["max_concurrency"]:
        rate = f"{'' if rate == 'inf' else f'{rate}, '}{found['max_concurrency']} at once"
    spreads = (
        " ".join(short(found[name][of]) for of in ("p50", "p90", "p99"))
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    )
    return (
        f"{rate:>11} {found['requests_per_second']:11.3g} {found['output_tokens_per_second']:13.4g} "
        f"{short(found['total_tokens_per_second'], 4):>12}  {'  '.join(spreads)}  "
        f"{short(found['good_requests_per_second']):>9} {found['failed']:7}"
    )


def short(value: float | None, num_digits: int = 3) -> str:
    return f"{'–' if value is None else format(value, f'.{num_digits}g'):>6}"


def complaints(found: Mapping[str, Any]) -> list[str]:
    """A line for each kind of error"""
    return [
        f"        {count} failed, {kind}: {found['error_messages'][kind]}"
        for kind, count in found["errors"].items()
    ]


def check_chart(path: Path) -> None:
    """Refuse what `draw` could not write."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        wanted = "--chart needs matplotlib, which is missing; pip install matplotlib installs it"
        raise ImportError(wanted) from error
    if not path.parent.is_dir():
        raise ValueError(f"--chart: there is no folder {str(path.parent)!r}")
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--chart: {path.name!r} must end in one of {', '.join(sorted(kinds))}")


def draw(rates: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens a second, and the times of tokens, by the rate of requests"""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    figure.suptitle(f"{rates[0]['model_id']}; {rates[0]['distribution']}", fontsize=9)
    panels = figure.subplots(1, 3)
    offered, name = offered_by(rates)
    panels[0].plot(offered, [one["output_tokens_per_second"] for one in rates], "o-")
    panels[0].set(ylabel="output tokens a second")
    keys = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    for panel, key in zip(panels[1:], keys, strict=True):
        for of in ("p50", "p90", "p99"):
            panel.plot(offered, [one[key][of] or math.nan for one in rates], "o-", label=of)
        panel.set(ylabel=key.replace("_seconds", ", s").replace("_", " "))
        panel.legend(frameon=False)
    for panel in panels:
        panel.set(xlabel=name, ylim=0)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def offered_by(rates: Sequence[Mapping[str, Any]]) -> tuple[list[float], str]:
    if all(one["request_rate"] == "inf" for one in rates):
        return [one["max_concurrency"] or one["num_prompts"] for one in rates], "requests at once"
    done = [one["requests_per_second"] for one in rates]
    offered = [
        most if one["request_rate"] == "inf" else one["request_rate"]
        for one, most in zip(rates, done, strict=True)
    ]
    return offered, "requests a second that arrive"
