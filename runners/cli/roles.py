"""Options of commands whose engines exchange states with others."""

from collections.abc import Mapping
from typing import Any

import click

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.cli.options import PATH, section
from ling3export.runners.hosts.hosts import read_secret
from ling3export.runners.transfer.options import CARRIERS, ROLES, Transfer

SECONDS = click.FloatRange(0, min_open=True)
transfer_options = section(
    "Prefill and decode apart",
    click.option("--transfer", type=click.Choice(CARRIERS), help="How states leave and come.  [default: none does]"),
    click.option("--role", type=click.Choice(ROLES), default=Transfer.role, help="prefill gives states, decode takes."),
    click.option("--transfer-host", default=Transfer.host, help="With tcp: where other servers reach this one."),
    click.option(
        "--transfer-port",
        type=click.IntRange(0, 65535),
        default=Transfer.port,
        help="With tcp: its port; 0 takes a free one.",
    ),
    click.option("--transfer-folder", type=PATH, help="With file: the folder that all servers see."),
    click.option(
        "--shm-bytes", type=click.IntRange(1), default=Transfer.limit, help="Bytes of states that wait for others."
    ),
    click.option("--lease", type=SECONDS, default=Transfer.lease, help="Seconds that a state waits for its taker."),
    click.option("--transfer-timeout", type=SECONDS, default=Transfer.deadline, help="Seconds to take one."),
)


def exchanging(carrier: str | None, place: Mapping[str, Any], given: Mapping[str, Any]) -> Transfer | None:
    """What ``transfer_options`` and ``host_options`` say; None without ``--transfer``.

    Raises:
        Ling3Error: A role without a carrier; the carrier lacks its folder; the secret cannot be read.
    """
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
        read_secret(place["secret_file"]) if carrier == "tcp" else "",
    )
