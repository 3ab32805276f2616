"""Decode with attention and experts in two processes (docs/afd.md): an experimental worked example."""

from ling3export.foundation.phases import PHASES

FFN = tuple(name for name, phase in PHASES.items() if phase.sizes == "pairs")  # the phases of a worker's programs
ATTENTION = tuple(name for name in PHASES if name not in FFN)  # those of an attention process
WHOLE = tuple(name for name, phase in PHASES.items() if "split" not in phase.needs)  # those of one that needs none
FFN_ALONE = "--ffn: expected none on several hosts, found some", "run one process a session"
WAIT = 60.0  # seconds that one side waits for the other before it calls that a fault
