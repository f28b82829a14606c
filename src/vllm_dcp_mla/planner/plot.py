"""Plans as stacked bars: one bar a plan, one GPU tall, so that what does not fit stands out."""

from __future__ import annotations

from typing import Any

from . import picture
from .request import IMPOSSIBLE, RequestError

GIB = 1 << 30
#: Segments from the bottom up: key, what the legend says, colour.
_SEGMENTS = (
    ("weights", "weights", "#355070"),
    ("non_kv", "counted by profiling", "#355070"),
    ("buffers", "buffers and workspace", "#6d597a"),
    ("peak", "profiled step (estimate)", "#b56576"),
    ("graphs", "CUDA graphs (estimate)", "#e88c7d"),
    ("kv", "KV cache", "#43aa8b"),
    ("outside", "beside the requested share", "#a08f8a"),
    ("free", "free", "#ececec"),
)
_EDGE = "#222222"
_WRONG = "#b00020"
_BAR_WIDTH = 0.76
_ROOM = 0.035  # of the GPU: a line of text needs as much height


def segments(plan: dict[str, Any]) -> dict[str, float]:
    """GiB of each segment of a plan's bar; a negative ``kv`` or ``free`` is what is missing."""
    counted: dict[str, int] = dict.fromkeys((key for key, _, _ in _SEGMENTS), 0)
    for line in plan["lines"]:
        if not line["profiled"]:
            continue
        key = line.get("key", "")
        group = "weights" if key.startswith("weights_") else key
        counted[group if group in counted else "buffers"] += line["bytes"]
    memory = plan["memory"]
    counted["kv"] = memory["kv_bytes"]
    counted["outside"] = min(memory["outside_bytes"], memory["total_bytes"])
    # What is missing for a cache is taken from what would have stayed free.
    counted["free"] = memory["free_bytes"] + min(memory["kv_bytes"], 0)
    return {key: size / GIB for key, size in counted.items()}


def draw(
    plans: list[tuple[str, dict[str, Any]]], title: str, axis: str, file: str, inches: float = 9.0
) -> None:
    """Draws plans.

    Args:
        plans: (what to write below the bar, its JSON); those without figures are left out.
        title: what is drawn.
        axis: what varies.
        file: where to; its ending names the format.
        inches: width of the picture.

    Raises:
        RequestError: an ending that is not known, matplotlib is missing, nothing to draw, or the
            file cannot be written.
    """
    picture.check_name(file)
    drawn = [(label, plan) for label, plan in plans if plan["memory"] is not None]
    if not drawn:
        raise RequestError(
            ["--plot has nothing to draw: no plan has figures; see why, above or in problems."],
            IMPOSSIBLE,
        )
    picture.check_library()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches, 5.2), layout="constrained")
    _fill(figure.add_subplot(), drawn, title, axis)
    picture.save(figure, file, dpi=130)


def _fill(axes: Any, drawn: list[tuple[str, dict[str, Any]]], title: str, axis: str) -> None:
    total = max(plan["memory"]["total_bytes"] for _, plan in drawn) / GIB
    bars = [segments(plan) for _, plan in drawn]
    places = range(len(bars))
    bottoms = [0.0] * len(bars)
    for key, label, colour in _SEGMENTS:
        heights = [max(bar[key], 0.0) for bar in bars]
        if not any(heights):
            continue
        axes.bar(
            *(places, heights, _BAR_WIDTH, bottoms),
            color=colour, label=label, edgecolor="white", linewidth=0.6,
        )  # fmt: skip
        for place, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
            said = _said(key, height, total, drawn[place][1])
            axes.text(
                *(place, bottom + height / 2, said),
                ha="center", va="center", color="white", fontsize=9, linespacing=1.0,
                fontweight="bold" if key == "kv" else "normal",
            )  # fmt: skip
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    highest = max(total, *bottoms)
    axes.axhline(total, color=_EDGE, linewidth=1.4)
    beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(
        f"GPU, {total:.0f} GiB", (1, total), (5, 0), va="center", fontsize=9, color=_EDGE, **beside
    )
    for place, (_, plan) in enumerate(drawn):
        if not plan["ok"]:
            top = max(bottoms[place], total)
            why = "does not fit" if plan["memory"]["kv_bytes"] > 0 else "no KV cache"
            axes.text(
                *(place, top + highest * 0.012, why),
                ha="center", va="bottom", color=_WRONG, fontweight="bold", fontsize=10,
            )  # fmt: skip
    axes.set_xticks(list(places), [label for label, _ in drawn])
    margin = 0.6 if len(bars) > 1 else 1.2  # a single bar is no wall
    axes.set_xlim(-margin, len(bars) - 1 + margin)
    axes.set_ylim(0, highest * 1.08)
    axes.set_xlabel(axis)
    axes.set_ylabel("GiB of one GPU")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        *(handles[::-1], labels[::-1]),
        loc="upper left", bbox_to_anchor=(1.0, 0.8), frameon=False, fontsize=9,
    )  # fmt: skip


def _said(key: str, height: float, total: float, plan: dict[str, Any]) -> str:
    """What stands inside a segment that has room for it."""
    if key in ("outside", "free") or height < _ROOM * total:
        return ""
    tokens = plan["kv"].get("tokens_logical") if key == "kv" else None
    gib = f"{height:.0f} GiB"
    if not tokens:
        return gib
    return f"{gib}\n{_short(tokens)} tokens" if height > 2 * _ROOM * total else _short(tokens)


def _short(tokens: int) -> str:
    return f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens / 1e3:.0f} k"
