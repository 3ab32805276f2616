"""Attention and FFN on separate chips, by roofline bounds: the batches, expert widths and link speeds that pay."""

from dataclasses import replace
from functools import cache
from typing import Any

from bench.report import show, table
from ling3export.checkpoint.synth import config_fields
from ling3export.cost.chips import CHIPS
from ling3export.cost.roofline import TOKENS, roofline_bound
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

BATCHES, WIDTHS = (16, 64, 256, 1024), (512, 2048, 8192)  # sequences of an attention group, expert widths
LINKS = (25, 100, 400)  # GB/s of a group of 16 chips, each way
MOST = 8  # groups of a kind


def main() -> None:
    """Prints the batches, expert widths and link speeds at which the split would pay on v6e, from roofline bounds only.

    Groups of 16 chips: A for attention, with ``batch`` sequences each, and F that share the experts. Enough micro
    batches are in flight that the slowest of attention, experts and link hides the other two. The split is compared
    with two other forms that have as many chips and sequences: replicas, each with all experts; and experts spread over
    all groups, with a hidden link as well. A and F are the best of 1 to 8.
    """
    full, rows = Config.from_dict(config_fields("full", {}), where="preset full"), []
    for width in WIDTHS:
        for batch in BATCHES:
            for link in LINKS:
                groups = [(a, f) for a in range(1, MOST + 1) for f in range(1, MOST + 1)]
                speeds = [priced(replace(full, moe_intermediate_size=width), batch, link, a, f) for a, f in groups]
                best = max(speeds, key=lambda row: min(row["replicas"], row["spread"]) / row["split"])
                gains = [best[name] / best["split"] for name in ("replicas", "spread")]
                parts = [1e6 * best[name] for name in ("attention", "experts", "link")]
                rows.append([width, batch, link, f"{best['A']}A{best['F']}F", *parts, *gains])
    head = [
        "expert width",
        "sequences",
        "GB/s",
        "best",
        "attention µs",
        "experts µs",
        "link µs",
        "over replicas",
        "over spread experts",
    ]
    show(
        "one layer on v6e by roofline bounds, at equal chips and sequences: how much faster the split is",
        [table(head, rows)],
        {"chip": "v6e", "rows": [dict(zip(head, row, strict=True)) for row in rows]},
    )


def priced(config: Config, batch: int, link: float, attention: int, ffn: int) -> dict[str, Any]:
    """Seconds of one layer, split and in both other forms, and the parts of the split."""
    chip, geometry = CHIPS["tpu", "v6e"], make_plan(config, Options(), "tpu:v6e:4x4").geometry
    total, sequences = attention + ffn, attention * batch

    @cache
    def seconds(phase: str, padding: int) -> float:
        return roofline_bound(config, geometry, phase, padding, chip, TOKENS).seconds

    def experts(tokens: int, groups: int) -> float:
        """Seconds of each of ``groups`` groups that share experts and pairs equally."""
        return seconds("experts", tokens * config.num_experts_per_tok) / groups

    share = -(-sequences // total)  # sequences of a group that attends and has experts
    moved = batch * config.num_experts_per_tok * config.hidden_size * 2 / (link * 1e9)  # bytes of an attention group
    parts = {
        "attention": seconds("attend", batch),
        "experts": experts(sequences, ffn),
        "link": moved * max(1.0, attention / ffn),
    }
    spread = max(seconds("attend", share) + experts(sequences, total), moved * share / batch * (total - 1) / total)
    return {
        "A": attention,
        "F": ffn,
        **parts,
        "split": max(parts.values()),
        "spread": spread,
        "replicas": seconds("attend", share) + experts(share, 1),
    }
