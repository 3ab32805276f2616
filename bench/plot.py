"""Bars for the pages: speed next to llama.cpp, and memory of each form of the weights."""

import json
from pathlib import Path
from typing import Any

from ling3export.checkpoint.synth import config_fields
from ling3export.model.config import Config
from ling3export.plan.memory import state_of_device, weight_bytes
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

STEPS = {"prefill 512": "prefill, 512 tokens", "decode 1": "decode, 1 sequence", "decode 4": "4", "decode 16": "16"}
FASTER, SLOWER, TEXT = "#3f7cac", "#c8553d", "#808080"  # readable on white and on black
FORMS, MACHINES = ("bf16", "int8", "int4", "int4-small"), (8, 16, 32)


def ratios(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By our arm and step: its tokens/s divided by those of its fastest peer, a file of llama.cpp."""
    speeds = record["tokens_per_second"]
    rows = {}
    for arm, likes in record["like"].items():
        peers = [speeds[name] for name in likes if name in speeds and name.startswith("llama.cpp")]
        rows[arm] = {step: speeds[arm][step] / max(peer[step] for peer in peers) for step in STEPS if peers}
    return {arm: row for arm, row in rows.items() if row}


def label(arm: str, record: dict[str, Any]) -> str:
    """The form of the weights, and the peer that it is compared with."""
    form = arm.removeprefix("ling3export ").partition(",")[0]
    names = [name.removeprefix("llama.cpp ") for name in record["like"][arm] if name.startswith("llama.cpp")]
    return f"{form} over {' or '.join(names)}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ling3export", "font.size": 9}
    matplotlib.rcParams |= {"text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT}
    from matplotlib import pyplot

    return pyplot


def _bare(panel: Any) -> None:
    """Leaves only the bars and their names."""
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
    panel.set_xticks([])


def _save(figure: Any, output: Path) -> None:
    figure.tight_layout()
    figure.savefig(output, transparent=True, metadata={"Date": None})


def memory(output: Path) -> None:
    """Draws weights and the state of one conversation, in GB, next to machines of 8, 16 and 32 GB."""
    pyplot, config = _pyplot(), Config.from_dict(config_fields("full", {}), where="preset full")
    geometries = [make_plan(config, Options(tp=1, weights=form, max_running=1), "cpu").geometry for form in FORMS]
    weights = [weight_bytes(config, geometry) / 1e9 for geometry in geometries]
    states = [state_of_device(config, geometry) / 1e9 for geometry in geometries]
    figure, panel = pyplot.subplots(figsize=(8, 2.2))
    panel.barh(FORMS, weights, color=FASTER)
    bars = panel.barh(FORMS, states, left=weights, color=SLOWER)
    panel.bar_label(bars, [f"{sum(parts):.1f} GB" for parts in zip(weights, states, strict=True)], padding=3)
    for size in MACHINES:
        panel.axvline(size, color=TEXT, linewidth=1, linestyle="--")
        panel.text(size, -0.75, f"{size} GB machine", ha="center", va="bottom")
    panel.invert_yaxis()
    panel.set_xlim(0, 36)
    _bare(panel)
    _save(figure, output)


def speed(records: Path, output: Path) -> None:
    """Draws the bars of all lines of ``records`` into ``output``, an SVG file."""
    pyplot = _pyplot()
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    rows = {label(arm, record): row for record in lines for arm, row in ratios(record).items()}
    figure, panels = pyplot.subplots(1, len(STEPS), figsize=(8, 0.42 * len(rows) + 0.9), sharey=True)
    for panel, (step, title) in zip(panels, STEPS.items(), strict=True):
        values = [row[step] for row in reversed(rows.values())]
        bars = panel.barh(list(reversed(rows)), values, color=[FASTER if value >= 1 else SLOWER for value in values])
        panel.bar_label(bars, [f"{value:.2g}" if value >= 1 else f"{value:.2f}" for value in values], padding=3)
        panel.axvline(1, color=TEXT, linewidth=1)
        panel.set_title(title, fontsize=9)
        panel.set_xlim(0, 3.4)
        _bare(panel)
    days = " and ".join(dict.fromkeys(record["machine"]["date"] for record in lines))
    conditions = f"{lines[0]['threads']} cores, {lines[0]['checkpoint']}, {days}"
    figure.suptitle(f"times as fast as llama.cpp: {conditions}", fontsize=9)
    _save(figure, output)
