"""The ladder, and latency against load, as pictures. matplotlib is imported when a plot is asked
for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pico_vllm.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, a plot that could not be drawn.

    Raises:
        ConfigError: matplotlib is missing, or the name ends in something that is no picture.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path} must end in {', '.join(SUFFIXES)}", param="plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install matplotlib", param="plot") from None


def plot_ladder(path: Path, lines: Sequence[Mapping[str, Any]], title: str) -> None:
    """Milliseconds a step over the context, a curve a stage; points that were skipped are left
    out."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    figure = _figure()
    axes = figure.add_subplot(xscale="log", yscale="log")
    for stage in dict.fromkeys(line["stage"] for line in lines):
        points = [
            (line["context"], line["ms_per_step"])
            for line in lines
            if line["stage"] == stage and line["ms_per_step"] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=stage)
    axes.set_xticks(sorted({line["context"] for line in lines}))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("time of a decode step at batch 1 (ms)")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    _save(figure, path)


def plot_load(path: Path, lines: Sequence[Mapping[str, Any]], title: str) -> None:
    """TTFT and ITL, p50 and p99, over the requests a second that arrived; what was not measured is
    left out."""
    figure = _figure()
    all_axes = figure.subplots(2, sharex=True)
    for axes, key, label in zip(all_axes, ("ttft", "itl"), ("TTFT", "ITL"), strict=True):
        for of in ("p50", "p99"):
            points = sorted(
                (line["offered_req_s"], line[f"{key}_ms_{of}"])
                for line in lines
                if line["offered_req_s"] is not None and line[f"{key}_ms_{of}"] is not None
            )
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{label} {of}")
        axes.set_ylabel(f"{label} (ms)")
        # From 0: drawn from its minimum on, noise looks like a slope.
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if axes.lines:
            axes.legend()
    all_axes[-1].set_xlabel("load (requests/s)")
    all_axes[0].set_title(title)
    _save(figure, path)


def _figure() -> Any:
    # Without pyplot: it would keep figures in module state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
