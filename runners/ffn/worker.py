"""An FFN worker: computes the experts of one attention process's micro batches until that process leaves."""

from collections.abc import Callable
from pathlib import Path

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.ffn import FFN
from ling3export.runners.ffn.link import FfnLink, address_of, layout
from ling3export.runners.ffn.split import ExpertPrograms, Sizes
from ling3export.runners.load.loader import load, say


class FfnWorker:
    """A worker with its programs loaded, to which one attention process can connect."""

    def __init__(
        self,
        artifact: str | Path,
        context: str,
        *,
        target: str | None = None,
        programs: str = "prebuilt-only",
        check: str = "all",
        report: Callable[[str], None] = say,
    ) -> None:
        address_of(context)  # refuses a wrong name before anything is loaded
        loaded = load(artifact, target=target, programs=programs, check=check, report=report, phases=FFN)
        sizes, pairs = Sizes(loaded.manifest, loaded.record), loaded.record.paddings("dispatch")
        tokens = max(size for size in loaded.record.paddings("attend") if size * sizes.chosen <= pairs[-1])
        self._programs = ExpertPrograms(loaded.runner, sizes, pairs)
        self._link = FfnLink(
            context,
            layout(tokens, sizes.chosen, sizes.experts, sizes.sent, sizes.returned),
            artifact=loaded.manifest.sha256 or "",
            layers=sizes.layers - sizes.dense,
            sent=sizes.sent,
            returned=sizes.returned,
        )
        report(f"{context}: micro batches of {tokens} tokens, {sizes.experts} experts a layer")

    def run(self) -> None:
        """Waits for an attention process, and works until it leaves."""
        try:
            self._link.accept()
            while (published := self._link.recv_attn_output()) is not None:
                ids, data = published.expert_ids, published.data
                results = self._programs(data.reshape(ids.size, -1), ids.reshape(-1), published.layer)
                self._link.send_ffn_output(published, results.reshape(*ids.shape, -1))
            self._link.close()
        except BaseException as error:
            reason = error.message if isinstance(error, Ling3Error) else type(error).__name__
            self._link.close(f"it ended: {reason}")
            raise
