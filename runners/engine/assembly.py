"""The parts of an engine, made from an artifact on every host alike. numpy is imported once the environment is set."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.foundation.errors import ArtifactError
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.request import Limits
from ling3export.runners.ffn import ATTENTION, WHOLE
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.load.loader import Loaded, load
from ling3export.runners.text.grammar import library
from ling3export.runners.text.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from ling3export.runners.engine.core import EngineCore
    from ling3export.runners.engine.counters import Counters
    from ling3export.runners.state.block_manager import BlockManager
    from ling3export.runners.state.prefix_cache import Event, PrefixCache
    from ling3export.runners.transfer.prefix_store import PrefixStore


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine.

    Attributes:
        cache: None where nothing is shared.
        store: None without a folder.
    """

    loaded: Loaded
    files: TokenizerFiles
    limits: Limits
    blocks: "BlockManager"
    counters: "Counters"
    core: "EngineCore"
    cache: "PrefixCache | None"
    store: "PrefixStore | None"


def load_parts(
    artifact: str | Path,
    config: EngineConfig,
    hosts: Hosts | None,
    report: Callable[[str], None],
    tell: "Callable[[Event], None] | None" = None,
) -> EngineParts:
    """Loads an artifact and assembles its engine. The arguments are those of ``Engine``, and equal on all hosts.

    Raises:
        ArtifactError, HostsError, Ling3Error: The artifact cannot be loaded here (``load``).
        RequestError: An engine on several hosts cannot have these settings.
    """
    config.check_hosts(hosts)
    agreed = config.agreed
    if hosts is not None:  # each fills the masks of grammars itself, so all fill the same ones or none fills any
        agreed["llguidance"] = library()
    loaded = load(
        artifact,
        target=config.target,
        programs=config.programs,
        check=config.check,
        report=report,
        hosts=hosts,
        agreed=agreed,
        phases=ATTENTION if config.ffn else WHOLE,
        early=hosts is None,
    )
    with loaded.channel.together() if loaded.channel else nullcontext():
        return _assembled(loaded, config, report, tell)


def _assembled(
    loaded: Loaded, config: EngineConfig, report: Callable[[str], None], tell: "Callable[[Event], None] | None"
) -> EngineParts:
    # numpy comes with these.
    from ling3export.artifacts.paddings import Shapes
    from ling3export.runners.engine.core import EngineCore, SharedCore
    from ling3export.runners.engine.counters import Counters
    from ling3export.runners.engine.executor import Executor, HostsExecutor, ModelExecutor, SplitExecutor
    from ling3export.runners.engine.logits_processor import LogitsProcessorState
    from ling3export.runners.engine.sequence import Sequence
    from ling3export.runners.load.loader import calls_measured
    from ling3export.runners.state.block_manager import BlockManager
    from ling3export.runners.state.layout import root_of
    from ling3export.runners.state.prefix_cache import PrefixCache, snapshot_cost

    manifest, record, channel = loaded.manifest, loaded.record, loaded.channel
    files = TokenizerFiles(loaded.folder, manifest.tokenizer, manifest.eos_token_ids)
    eos, tokenizer = files.eos_token_ids(), files.tokenizer("text out") if files.exist else None
    limits = Limits(manifest.plan.context, manifest.vocab_size, record.state.pages, record.state.page_size)
    measured = calls_measured(loaded.folder, manifest, loaded.target, report, channel)
    blocks, counters, shapes = BlockManager.of(record), Counters(), Shapes.of(record, measured)
    calls = loaded.runner, shapes.chunk, blocks, limits.vocab_size, counters
    executor: Executor
    if config.ffn:
        from ling3export.runners.ffn.split import connected  # with shared memory, which no other start needs

        decode, leave = connected(loaded.runner, manifest, record, config.ffn, config.ffn_timeout)
        executor = SplitExecutor(decode, leave, *calls)
    else:
        executor = HostsExecutor(channel, *calls) if channel else ModelExecutor(*calls)

    copies, shared = bool(record.state.snapshots), None
    if config.prefix_cache and not copies:
        raise ArtifactError(
            f"prefix cache: target `{loaded.target}` has no snapshots, in {loaded.folder}",
            "build the artifact again with --snapshots N, or leave the prefix cache off",
        )
    if copies and config.prefix_cache is not False:
        shared = PrefixCache(
            blocks, record.state.page_size, root_of(manifest, record), cost=snapshot_cost(record, measured), tell=tell
        )

    if tell is not None and shared is None:
        raise ArtifactError(
            f"events of blocks: expected a prefix cache, found it off or without snapshots, in {loaded.folder}",
            "leave the prefix cache on, and build the artifact with --snapshots N",
        )
    store = None
    if config.prefix_store is not None:
        if shared is None:
            raise ArtifactError(
                f"prefix store: expected a prefix cache, found it off or without snapshots, in {loaded.folder}",
                "leave the prefix cache on, and build the artifact with --snapshots N",
            )
        from ling3export.runners.transfer.prefix_store import PrefixStore  # with a carrier, which no other start needs

        store = PrefixStore(manifest, record, config.prefix_store, shared, report)

    # Refers to no engine: the engine's thread keeps none alive.
    def prepare(sequence: Sequence) -> None:
        request = sequence.request
        kept = {"include_stop": request.include_stop_str_in_output, "skip_special": request.skip_special_tokens}
        stream, processor = tokenizer.stream(request.stop, **kept) if tokenizer else None, None
        if request.adjusts:
            matcher = files.grammars(limits.vocab_size).matcher(request.grammar) if request.grammar else None
            ends = {*request.stop_token_ids, *(() if request.ignore_eos else eos)}
            processor = LogitsProcessorState(request, matcher, ends)
        sequence.prepare(limits.answer(request), eos, stream, processor)

    def core() -> EngineCore:
        parts = (executor, shapes, blocks, limits.vocab_size, prepare)
        options: dict[str, Any] = {
            "ahead": 1 if config.overlap else 0,
            "counters": counters,
            "cache": shared,
            "supports_state_copy": copies,
            "store": store,
        }
        return SharedCore(channel, *parts, **options) if channel else EngineCore(*parts, **options)

    if channel and channel.leads:
        channel.parts(b"")  # the others give theirs when they begin to follow
    return EngineParts(loaded, files, limits, blocks, counters, core(), shared, store)
