"""Bars of `python -m bench peers`: how many times as fast as the best peer each form of the weights is."""

import json
from pathlib import Path
from typing import Any

STEPS = {"prefill 512": "prefill, 512 tokens", "decode 1": "decode, 1 sequence", "decode 4": "4", "decode 16": "16"}
FASTER, SLOWER, TEXT = "#3f7cac", "#c8553d", "#808080"  # readable on white and on black


def ratios(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By arm of ours and step: its tokens a second over those of its fastest peer, llama.cpp's files."""
    speeds = record["tokens_per_second"]
    rows = {}
    for arm, likes in record["like"].items():
        peers = [speeds[name] for name in likes if name in speeds and name.startswith("llama.cpp")]
        rows[arm] = {step: speeds[arm][step] / max(peer[step] for peer in peers) for step in STEPS if peers}
    return {arm: row for arm, row in rows.items() if row}


def label(arm: str, record: dict[str, Any]) -> str:
    """The form of the weights, and what it is compared with."""
    form = arm.removeprefix("ling3export ").partition(",")[0]
    names = [name.removeprefix("llama.cpp ") for name in record["like"][arm] if name.startswith("llama.cpp")]
    return f"{form} over {' or '.join(names)}"


def main(records: Path, output: Path) -> None:
    """Draws the bars of all lines of ``records`` into ``output``, an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ling3export", "font.size": 9}
    matplotlib.rcParams |= {"text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT}
    from matplotlib import pyplot

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
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)
        panel.set_xticks([])
    days = " and ".join(dict.fromkeys(record["machine"]["date"] for record in lines))
    conditions = f"{lines[0]['threads']} cores, {lines[0]['checkpoint']}, {days}"
    figure.suptitle(f"times as fast as llama.cpp: {conditions}", fontsize=9)
    figure.tight_layout()
    figure.savefig(output, transparent=True, metadata={"Date": None})
