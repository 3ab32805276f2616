"""Attention and FFN apart: tokens of several attention sessions, ordered by expert for one FFN worker, and back."""

from ling3export.model.ffn.dispatch import FfnBatch, combine, ffn_worker_batching, group_sizes

__all__ = ["FfnBatch", "combine", "ffn_worker_batching", "group_sizes"]
