"""Configurations that are measured one after the other, each in a process of its own: jax takes its devices once."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from ling3export.errors import RequestError
from ling3export.runners.bench.measure import Measurement, Settings, measure, target_of


def measured_apart(how: Settings, configs: Sequence[str]) -> list[Measurement]:
    """Measures configurations with one workload.

    Args:
        how: The settings that they share.
        configs: Each ``1xTP``, an engine on that target of the artifact, or ``NAME=URL``, a server.

    Raises:
        RequestError: A configuration is neither, or the artifact has no such target for this machine.
        Ling3Error: One cannot be measured.
    """
    if how.artifact is None or len(configs) < 2:
        raise RequestError(f"compare: expected an artifact and two configurations or more, found {len(configs)}")
    each = []
    for config in configs:
        name, _, url = config.partition("=")
        each.append(replace(how, url=url) if url else replace(how, target=target_of(how.artifact, name)))
    apart = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=apart, max_tasks_per_child=1) as processes:
        return list(processes.map(measure, each))
