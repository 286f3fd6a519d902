"""The ladder as a picture. matplotlib is imported when a plot is asked for."""

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
        raise ConfigError(
            "--plot needs matplotlib; pip install 'pico-vllm[plot]'", param="plot"
        ) from None


def plot_ladder(path: Path, lines: Sequence[Mapping[str, Any]], title: str) -> None:
    """Milliseconds a step over the context, a curve a stage; points that were skipped are left
    out."""
    # Without pyplot: it would keep figures in module state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, ScalarFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
