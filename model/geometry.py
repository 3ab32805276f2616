"""What a program is compiled for besides the model: parallelism, pools, dtype and the form of each loop."""

from dataclasses import dataclass

CHUNK = 16  # tokens of a prefill chunk; the gate's lower bound of -5 keeps factored exponents in fp32 over 16 tokens

AXIS = "tp"  # the one mesh axis


@dataclass(frozen=True)
class Geometry:
    """Sizes and forms of one target's programs.

    Attributes:
        tp: Devices that share the model.
        dtype: ``"bfloat16"`` or ``"float32"``; the latter also means highest matmul precision.
        slots: Sequences that can hold state at once; the pools have one more, slot 0, the dummy.
        pages: Usable latent pages; the pool has one more, page 0, the dummy.
        page_size: Tokens a page.
        max_pages: Pages a sequence can have, ``ceil(context / page_size)``.
        latent_row: Stored width of a latent row, at least ``kv_lora_rank + qk_rope_head_dim``.
        layer_loop: ``"scan"`` (one loop over layer groups) or ``"unroll"``.
        placement: Of the latent pool: ``"replicated"`` (every device holds all pages); ``"striped"`` (page number n
            lies on device ``(n - 1) % tp``, so that pages handed out in order spread over the devices); or
            ``"by_sequence"`` (each device holds a range of page numbers, and row r of a decode batch of B must have its
            pages on device ``r * tp // B``, which attends for all heads; the MLA weights are whole on every device).
        attention: Of decode: ``"sequences"`` (one after the other, a loop over its pages) or ``"pages"`` (tiles of
            pages of all sequences).
        recurrence: ``"rows"`` (a sequence of decode, a chunk of prefill after the other) or ``"together"`` (all at
            once).
        experts: ``"chosen"`` (a loop over those that have rows) or ``"local"`` (all of this device, as one product, up
            to a number of rows).
    """

    tp: int
    dtype: str
    slots: int
    pages: int
    page_size: int
    max_pages: int
    latent_row: int
    layer_loop: str = "scan"
    placement: str = "replicated"
    attention: str = "sequences"
    experts: str = "chosen"
    recurrence: str = "rows"

    @property
    def cut_pages(self) -> bool:
        """Whether each device has pages of its own, and a dummy page of its own."""
        return self.placement != "replicated"

    @property
    def matrix_units(self) -> bool:
        """Whether small things are done as products: KDA's form ``together`` is for machines where that is best."""
        return self.recurrence == "together"

    @property
    def fewest_rows(self) -> int:
        """Rows that a decode step is filled up to: XLA:TPU keeps products of one row from its matrix units."""
        return 8 if self.matrix_units else 1

    @property
    def layered_weights(self) -> bool:
        """Whether each layer of the largest stacked weights is an argument of its own.

        Where layers are unrolled, XLA:TPU would copy every layer's part out of those stacks in each step.
        """
        return self.layer_loop == "unroll" and self.experts == "local"
