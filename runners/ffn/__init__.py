"""The FFN side of a split model: what attention sessions publish in shared memory, and what is ready to be computed."""


class _All:
    """All phases except those given."""

    def __init__(self, *left_out: str) -> None:
        self._left_out = left_out

    def __contains__(self, phase: object) -> bool:
        return phase not in self._left_out


FFN = ("dispatch", "experts")  # the phases of a worker's programs
ATTENTION = _All(*FFN)  # those of an attention process
WHOLE = _All(*FFN, "attend", "combine", "head")  # those of a process that computes its own experts
FFN_ALONE = "--ffn: expected none on several hosts, found some", "run one process a session"
WAIT = 60.0  # seconds that one side waits for the other before it calls that a fault
