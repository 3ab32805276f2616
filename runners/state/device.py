"""Objects from device to device by ``jax.experimental.transfer``; what ``tcp`` says of them goes beside.

Who may take which transfer, once and for how long, and that all has arrived, is said on the holder's port as in
:mod:`ling3export.runners.transfer.tcp`. Instead of an object's bytes the holder sends where jax's own server offers
them, as one array [bytes] uint8 on one device, and keeps that until the puller says that it is there.

jax's server asks nobody for a secret: the numbers under which arrays are offered are drawn from 63 bits. A pull of a
number that nobody offers, or from a process that is gone, never returns, and its ``timeout`` has no effect (measured).
So each pull has a thread that is left behind at the deadline, and after STUCK of them nothing is pulled any more.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ling3export.foundation.strict_json import parse_json
from ling3export.runners.hosts.rendezvous import REFUSED, receive, tell
from ling3export.runners.transfer.backend import TransferError
from ling3export.runners.transfer.objects import HEADER, Key, Layout
from ling3export.runners.transfer.tcp import ARRAY, OBJECT, RefusedError, Tcp

LARGEST_HEAD = 4096  # bytes of what is said of an array
SAID = {"number": int, "address": str}
STREAMS = 2  # connections to each process
STUCK = 8  # pulls that never returned


class Device(Tcp):
    """Objects from device to device. The arguments and errors are those of ``Tcp``.

    Raises:
        TransferError: Also where jax has no transfers, or not on this platform.
    """

    def __init__(
        self,
        layout: Layout,
        limit: int,
        deadline: float,
        address: tuple[str, int],
        secret: str,
        lease: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = jax.local_devices()[0]
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        try:
            from jax.experimental import transfer  # where this jaxlib has it

            self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"] * STREAMS)
        except Exception as error:
            raise TransferError(
                f"jax: expected jax.experimental.transfer on {self._device.platform} with jax {jax.__version__}, found "
                f"{type(error).__name__}: {error}",
                "take another carrier: --transfer tcp",
            ) from error
        self._connections: dict[str, Any] = {}
        self._stuck = 0
        super().__init__(layout, limit, deadline, address, secret, lease, clock)

    def _hand(self, caller: socket.socket, memory: np.ndarray) -> object:
        array, number = jax.device_put(memory, self._device), secrets.randbits(63)
        self._server.await_pull(number, [array])
        tell(caller, ARRAY, number=number, address=self._server.address())
        return array

    def _arrived(self, peer: socket.socket, key: Key, until: float) -> np.ndarray | None:
        kind, payload = receive(peer, LARGEST_HEAD, until)
        if kind == REFUSED:
            raise RefusedError
        if (kind, payload) == (OBJECT, b""):
            return None
        said = parse_json(payload, LARGEST_HEAD) if kind == ARRAY else None
        if not isinstance(said, dict) or {name: type(each) for name, each in said.items()} != SAID:
            raise ConnectionError("another message than where an array is")
        wanted = jax.ShapeDtypeStruct(
            (HEADER.size + self._layout.nbytes(key),), np.uint8, sharding=SingleDeviceSharding(self._device)
        )
        return self._pulled(said["address"], said["number"], wanted, until)

    def _pulled(self, address: str, number: int, wanted: jax.ShapeDtypeStruct, until: float) -> np.ndarray:
        found: list[np.ndarray | Exception] = []

        def pull() -> None:
            try:
                if address not in self._connections:
                    self._connections[address] = self._server.connect(address)
                (array,) = self._connections[address].pull(number, [wanted])
                found.append(np.asarray(array))
            except Exception as error:
                self._connections.pop(address, None)
                found.append(error)

        if self._stuck >= STUCK:
            raise TimeoutError(f"{STUCK} pulls never returned")
        thread = threading.Thread(target=pull, name="ling3-pull", daemon=True)
        thread.start()
        thread.join(max(0.0, until - time.monotonic()))
        if not found:
            self._connections.pop(address, None)
            self._stuck += 1
            raise TimeoutError("a pull that does not return")
        if isinstance(found[0], Exception):
            raise ConnectionError(str(found[0])) from found[0]
        return found[0]
