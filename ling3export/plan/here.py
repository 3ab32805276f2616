"""Sizes for a build for this machine's processor: the most and longest sequences that fit its memory.

They follow from all memory of the machine, not from the free part: a second build has the same programs, and finds them
in the cache.
"""

from collections.abc import Collection
from dataclasses import replace

from ling3export.model.config import Config
from ling3export.model.state import snapshot_bytes, state_bytes
from ling3export.plan.memory import in_words, on_machine, weight_bytes
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

SIZES = frozenset(("tp", "max_running", "context", "page_size", "pages", "snapshots", "state_memory"))
SHARE = 0.8  # of the machine's memory, for weights and states; the rest is for temporaries, Python and the system
LEAST = 1 / 16  # of the memory that states may take where weights already take that share: mapped weights can be paged
MOST_SEQUENCES = 64
MOST_CONTEXT = 32768  # longer ones need --context: on a processor, such a prompt takes minutes


def fitted(
    config: Config, options: Options, named: Collection[str], total: int
) -> tuple[Options, tuple[str, str] | None]:
    """The options of a build for the processor of this machine, with sizes for those that the user did not give.

    Half of the memory that weights leave is for sequences' slots and snapshots, one snapshot for each two slots, and
    half for latent pages; one sequence can have all of them.

    Args:
        options: The user's. Targets other than ``cpu`` are left as they are.
        named: Names of the options that the user gave. TP is 1 unless it is among them; sizes are chosen if none is.
        total: Bytes of memory of the machine; 0 chooses no sizes.

    Returns:
        The options, and for the user the chosen sizes and the sum; None if nothing but TP was chosen.

    Raises:
        PlanError: See :func:`ling3export.plan.plan.make_plan`.
    """
    if options.targets != ("cpu",):
        return options, None
    options = options if "tp" in named else replace(options, tp=1)
    if not total or SIZES & set(named):
        return options, None
    # The plan of one sequence of two tokens: what everything has besides.
    least = make_plan(config, replace(options, max_running=1, context=2, pages=1), "cpu").geometry
    weights = weight_bytes(config, least)
    room = int(max(SHARE * total - weights, LEAST * total))
    empty = state_bytes(config, replace(least, pages=0))
    slot = state_bytes(config, replace(least, pages=0, slots=2)) - empty
    page = state_bytes(config, least) - empty
    pair = 2 * slot + snapshot_bytes(config, least)
    pairs = min(MOST_SEQUENCES // 2, int(room / 2 / pair))
    sequences, snapshots = (2 * pairs, pairs) if pairs else (1, 0)
    fixed = state_bytes(config, replace(least, pages=0, slots=sequences, snapshots=snapshots))
    pages = max(1, (room - fixed) // page)
    context = min(config.context, MOST_CONTEXT, pages * options.page_size)
    chosen = replace(options, max_running=sequences, snapshots=snapshots, context=context, state_memory=room)
    plan = make_plan(config, chosen, "cpu")
    sizes = f"--tp 1 --max-running {sequences} --context {context} --snapshots {snapshots}"
    return chosen, (f"for this machine, {sizes}", in_words(on_machine(config, plan.target, plan.geometry, (total, 0))))
