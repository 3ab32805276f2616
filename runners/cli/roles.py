"""Options of commands whose engines exchange states with others."""

from collections.abc import Mapping
from typing import Any

import click

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.cli.options import PATH, section
from ling3export.runners.hosts.hosts import read_secret
from ling3export.runners.transfer.options import CARRIERS, LISTENING, ROLES, Prefillers, Transfer, takes_none

SECONDS = click.FloatRange(0, min_open=True)
transfer_options = section(
    "Prefill and decode apart",
    click.option("--transfer", type=click.Choice(CARRIERS), help="How states leave and come.  [default: none does]"),
    click.option("--role", type=click.Choice(ROLES), default=Transfer.role, help="prefill gives states, decode takes."),
    click.option("--transfer-host", default=Transfer.host, help="With tcp, jax: where other servers reach this one."),
    click.option(
        "--transfer-port",
        type=click.IntRange(0, 65534),
        default=Transfer.port,
        help="With tcp, jax: the base port, the next one listens; 0 takes a free one.",
    ),
    click.option("--transfer-folder", type=PATH, help="With file: the folder that all servers see."),
    click.option(
        "--shm-bytes", type=click.IntRange(1), default=Transfer.limit, help="Bytes of states that wait for others."
    ),
    click.option("--lease", type=SECONDS, default=Transfer.lease, help="Seconds that a state waits for its taker."),
    click.option("--transfer-timeout", type=SECONDS, default=Transfer.deadline, help="Seconds to take one."),
    click.option(
        "--prefill",
        multiple=True,
        metavar="URL",
        help="Where no router does: ask this server, with --role prefill, to prefill long prompts; again for more.",
    ),
    click.option(
        "--max-local-prefill",
        type=click.IntRange(0),
        metavar="TOKENS",
        help="With --prefill: prompts that lack no more than these are prefilled here.  "
        f"[default: {Prefillers.most_local}]",
    ),
    click.option(
        "--max-queue",
        type=click.IntRange(1),
        metavar="PROMPTS",
        help=f"With --prefill: where so many wait to be asked for, more run here.  [default: {Prefillers.most_queued}]",
    ),
    click.option(
        "--prefill-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help=f"With --prefill: then a prompt is prefilled here.  [default: {Prefillers.deadline:g}]",
    ),
)
NUMBERS = {"max_local_prefill": "most_local", "max_queue": "most_queued", "prefill_timeout": "deadline"}


def exchanging(carrier: str | None, place: Mapping[str, Any], given: Mapping[str, Any]) -> Transfer | None:
    """What ``transfer_options`` and ``host_options`` say; None without ``--transfer``.

    Raises:
        Ling3Error: A role without a carrier; the carrier lacks its folder; the secret cannot be read; servers that
            prefill for one that takes no states; a number that belongs to such servers without one.
    """
    if not given["prefill"]:
        for name in NUMBERS:
            if given[name] is not None:
                option = f"--{name.replace('_', '-')}"
                hint = "name the servers that prefill: --prefill http://HOST:PORT"
                raise Ling3Error(f"{option} {given[name]:g}: expected --prefill with it, found none", hint)
    elif carrier is None or given["role"] == "prefill":
        raise Ling3Error(*takes_none(None if carrier is None else given["role"]))
    if carrier is None:
        if given["role"] != Transfer.role:
            raise Ling3Error(f"--role {given['role']}: expected --transfer with it, found none")
        return None
    return Transfer(
        carrier,
        given["role"],
        given["transfer_host"],
        given["transfer_port"],
        given["transfer_folder"],
        given["shm_bytes"],
        given["lease"],
        given["transfer_timeout"],
        read_secret(place["secret_file"]) if carrier in LISTENING else "",
    )


def prefillers(given: Mapping[str, Any], model: str, key: str | None) -> Prefillers | None:
    """The servers of ``--prefill``, which serve ``model`` and want ``key``; None where none is named.

    Raises:
        Ling3Error: An address is none.
    """
    numbers = {field: given[name] for name, field in NUMBERS.items() if given[name] is not None}
    return Prefillers(given["prefill"], model, key, **numbers) if given["prefill"] else None
