"""Pictures of what was measured; without matplotlib there are none."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import OURS, PEER, ModelResult
from infinilm.bench import Measured

COLORS = {
    OURS: "#1b6ca8",
    "infinilm int16": "#4a90c4",
    "infinilm int8": "#7fb8e0",
    PEER: "#e08a3c",
    "transformers": "#a9a9a9",
}
SERVERS = {OURS: COLORS[OURS], "llama-cpp-python": COLORS[PEER], "xllamacpp": "#5a9e6f"}
BAR = 0.17  # the height of a bar, where tasks are 1 apart


def has_matplotlib() -> bool:
    if importlib.util.find_spec("matplotlib"):
        return True
    print("no charts: `make bench` or `pip install '.[bench]'` brings matplotlib")
    return False


def new_figure(size: tuple[float, float], title: str) -> Any:
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9)
    return figure


def draw_rates(models: list[ModelResult], title: str, path: Path) -> None:
    """A panel a model: bars of speed relative to llama.cpp, each with its tokens a second."""
    if not has_matplotlib():
        return
    sizes = [len(model.rates) for model in models]
    figure = new_figure((9, 1 + 0.5 * len(models) + 0.6 * sum(sizes)), title)
    panels = figure.subplots(len(models), 1, squeeze=False, sharex=True, height_ratios=sizes).flat
    for panel, model in zip(panels, models, strict=True):
        draw_model(panel, model)
    panels[-1].set_xlabel(f"speed, {PEER} = 1 where it was measured; at each bar its tokens a second")
    figure.legend(handles=legend(models), loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(path, dpi=120)


def legend(models: list[ModelResult]) -> list[Any]:
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]

    used = {name for model in models for name in model.load_seconds}
    return [Patch(color=color, label=name) for name, color in COLORS.items() if name in used]


def draw_model(panel: Any, model: ModelResult) -> None:
    for row, rates in enumerate(model.rates.values()):
        unit = rates[PEER if PEER in rates else OURS].median
        for i, (name, rate) in enumerate(rates.items()):
            place, speed = row + (i - (len(rates) - 1) / 2) * BAR, rate.median / unit
            panel.barh(place, speed, 0.9 * BAR, color=COLORS[name])
            panel.text(speed, place, f" {rate.median:.3g}", va="center", fontsize=7)
    panel.set_yticks(range(len(model.rates)), list(model.rates))
    panel.invert_yaxis()
    panel.axvline(1, color="black", linewidth=0.5)
    panel.set_title(model.name, loc="left", fontsize=10)


def draw_curves(curves: Mapping[str, Mapping[int, Measured]], title: str, path: Path) -> None:
    """A panel a curve, both axes from 0: what grows as its work does is a straight line."""
    if not has_matplotlib():
        return
    figure = new_figure((4 * len(curves), 3.6), title)
    panels = figure.subplots(1, len(curves), squeeze=False).flat
    for panel, (name, curve) in zip(panels, curves.items(), strict=True):
        draw_curve(panel, name, curve)
    figure.savefig(path, dpi=120)


def draw_curve(panel: Any, name: str, curve: Mapping[int, Measured]) -> None:
    """`name` is "what by what"."""
    y_name, x_name = name.split(" by ")
    panel.plot(list(curve), [point.median for point in curve.values()], "o-", color=COLORS[OURS])
    panel.set(xlim=0, ylim=0, xlabel=x_name, ylabel=y_name)
    panel.grid(alpha=0.3)


def draw_lines(
    panels: Mapping[str, Mapping[str, Mapping[int, Measured]]], by: str, title: str, path: Path
) -> None:
    """Tokens a second by a number of something, a line a contender."""
    if not has_matplotlib():
        return
    figure = new_figure((5 * len(panels), 3.8), title)
    for panel, (name, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True
    ):
        for contender, curve in curves.items():
            rates = [point.median for point in curve.values()]
            panel.set_xticks(list(curve))
            panel.plot(list(curve), rates, "o-", color=COLORS[contender], label=contender)
        panel.set(xlim=0, ylim=0, xlabel=by, ylabel="tokens a second")
        panel.set_title(name, loc="left", fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def draw_serving(
    clients: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]],
    rates: Mapping[str, Sequence[Mapping[str, Any]]],
    title: str,
    path: Path,
) -> None:
    """Tokens a second by clients; by the requests that arrive, those answered and the wait for a token."""
    if not has_matplotlib():
        return
    figure = new_figure((14, 3.8), title)
    panels = figure.subplots(1, 3)
    for name, points in clients.items():
        medians = [statistics.median(one["output_tokens_per_second"] for one in of) for of in points.values()]
        panels[0].plot(list(points), medians, "o-", color=SERVERS[name], label=name)
    for name, points in rates.items():
        offered = [one["request_rate"] for one in points]
        answered = [one["requests_per_second"] for one in points]
        waits = [one["time_to_first_token_seconds"]["p90"] for one in points]
        panels[1].plot(offered, answered, "o-", color=SERVERS[name], label=name)
        panels[2].plot(offered, waits, "o-", color=SERVERS[name], label=name)
    panels[0].set(xlabel="clients", ylabel="output tokens a second", xlim=0, ylim=0)
    panels[1].set(xlabel="requests a second that arrive", ylabel="answered a second", xlim=0, ylim=0)
    panels[2].set(xlabel="requests a second that arrive", ylabel="seconds to the first token, p90")
    panels[2].set_yscale("log")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
