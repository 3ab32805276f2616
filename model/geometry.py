"""The geometry that the programs of a target are compiled for: parallelism, pool sizes, dtype and form."""

from dataclasses import dataclass
from typing import Literal

CHUNK = 16  # tokens of a prefill chunk; the gate's lower bound of -5 keeps factored exponents in fp32 over 16 tokens

AXIS = "tp"  # the one mesh axis

Form = Literal["loops", "tiles", "card"]


@dataclass(frozen=True)
class Geometry:
    """Sizes of one target's pools, and the form of its programs. The numbers that a step computes are the same in all
    forms; docs/log/ has the measurements that chose one for each platform.

    ``loops`` is the form for cpu. One loop runs over groups of layers, and inside it one sequence, chunk or expert is
    worked on after the other. Every device holds the whole latent pool.

    ``tiles`` is the form for TPUs. Layers are unrolled, and matrix units take tiles of chunks, pages and
    experts of all sequences at once. Over several devices the latent pool is striped. Small sums, turns and choices are
    written so that XLA:TPU fuses them into one operation.

    ``card`` is the form for one NVIDIA card: ``tiles``, but sums are sums, a decode step has no rows of padding and
    multiplies only by the chosen experts where few are chosen. Loops and conditions, for which the host waits, are
    avoided where that costs little.

    Attributes:
        tp: Devices that share the model.
        dtype: ``"bfloat16"`` or ``"float32"``; the latter also means highest matmul precision.
        slots: Sequences that can hold state at once; the pools have one more, slot 0, the dummy.
        pages: Usable latent pages; the pool has one more on each device that has pages of its own, the dummy.
        page_size: Tokens a page.
        max_pages: Pages a sequence can have, ``ceil(context / page_size)``.
        latent_row: Stored width of a latent row, at least ``kv_lora_rank + qk_rope_head_dim``.
        form: ``"loops"``, ``"tiles"`` or ``"card"``.
        snapshots: Slots after the sequences' own that hold copies of their state.
        kernels: The end of the names of the native kernels that executables for cpu call, ``LEVEL-DIGEST``; empty
            where they call none. Portable programs are lowered without.
        token_dtype: Tokens that travel to the experts of a split decode step: ``"model"``, in the model's dtype, or
            ``"int8"``, of 8 bits with an fp32 scale each.
        weights: The forms of the parameters, a key of ``artifacts/parameters.py``'s WEIGHTS.
        activations: Activations that multiply weights quantized by group: ``"bf16"``, in the model's dtype, or
            ``"int8"``, rounded to 8 bits by group.
    """

    tp: int
    dtype: str
    slots: int
    pages: int
    page_size: int
    max_pages: int
    latent_row: int
    form: Form = "loops"
    snapshots: int = 0
    kernels: str = ""
    token_dtype: str = "model"
    weights: str = "bf16"
    activations: str = "bf16"

    @property
    def tiled(self) -> bool:
        """Whether the programs have a form for accelerators."""
        return self.form != "loops"

    @property
    def sum_by_matmul(self) -> bool:
        """Whether small sums are written as products with ones, which XLA:TPU fuses with what follows."""
        return self.form == "tiles"

    @property
    def sums(self) -> Literal["high", "highest"] | None:
        """The precision of products that stand for sums of squares, where small sums are products; three passes, good
        to some 2^-16, where what is scaled by their roots is rounded to bf16."""
        return ("highest" if self.dtype == "float32" else "high") if self.sum_by_matmul else None

    @property
    def unrolled(self) -> bool:
        """Whether small loops are unrolled and both sides of small conditions computed: on a card the host waits for
        each, and launches nothing meanwhile."""
        return self.form == "card"

    @property
    def striped(self) -> bool:
        """Whether each device has latent pages of its own, and a dummy page of its own.

        Page number n lies on device ``(n - 1) % tp``, so pages that are handed out in order spread over the devices.
        Else every device holds all pages.
        """
        return self.tiled and self.tp > 1

    @property
    def placement(self) -> str:
        """The manifest's word for where the latent pages are."""
        return "striped" if self.striped else "replicated"

    @property
    def fewest_rows(self) -> int:
        """Rows that a decode step is filled up to: XLA:TPU keeps products of one row from its matrix units."""
        return 4 if self.sum_by_matmul else 1
