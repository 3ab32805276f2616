"""The link between one attention process and one FFN worker: shared memory for tokens, a socket for turns.

The worker listens at an abstract Unix socket and gives the process that connects a segment of anonymous memory. A side
writes its rows, then sends the number of their micro batch. The kernel closes the socket of a process that ends, so the
other side sees it at once, and no file is left. The names are those of vLLM's AFD connector: ``send_attn_output``
→ ``recv_attn_output`` → the experts → ``send_ffn_output`` → ``recv_ffn_output``.
"""

import errno
import mmap
import os
import re
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ling3export.foundation.dtypes import MASK
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.ffn import WAIT
from ling3export.runners.ffn.context import ALIGNMENT, HEAD, SIZE, ContextError, ScheduleContext

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MICRO_BATCHES = 2  # in flight: one is computed on each side
FLAG, LAYER = 0, 1  # places in a row of the token info
LEFT, REFUSED = b"leave", b"!"  # the attention process leaves; before the reason why the worker ends or refuses
LARGEST = 4096  # bytes of a message
PAUSE = 0.05  # seconds between two attempts to connect


class FfnGone(Ling3Error):
    """The FFN worker or the attention process ended while the other side needed it."""


class ScheduleTimeout(Ling3Error):
    """The worker did not answer in time."""


def address_of(name: str) -> str:
    """The socket of a worker's name; only this user's processes use it."""
    if NAME.fullmatch(name) is None:
        raise ContextError(f"--context: expected a name of letters, digits, `.`, `_` and `-`, found `{name[:40]}`")
    return f"\0ling3-ffn-{os.geteuid()}-{name}"


def layout(tokens: int, experts_a_token: int, experts: int, sent: np.dtype, returned: np.dtype) -> ScheduleContext:
    """The context of one session whose pairs have rows of these dtypes on their way to the experts, and back."""
    pairs, strides = MICRO_BATCHES * tokens * experts_a_token, [_aligned(row.itemsize) for row in (sent, returned)]
    info = 4 * MICRO_BATCHES * (HEAD + tokens * experts_a_token)
    sizes = [info, pairs * strides[0], 4 * MICRO_BATCHES * HEAD, pairs * strides[1]]
    places = [SIZE]
    for size in sizes:
        places.append(places[-1] + _aligned(size))
    return ScheduleContext(
        session_num=1,
        micro_batch_num=MICRO_BATCHES,
        micro_batch_size=tokens,
        selected_expert_num=experts_a_token,
        expert_num=experts,
        attn_to_ffn_token_size=strides[0],
        ffn_to_attn_token_size=strides[1],
        run_flag=1,
        attention_micro_batch_id=MICRO_BATCHES - 1,
        ffn_token_info_buf=places[0],
        ffn_token_info_size=sizes[0],
        ffn_token_data_buf=places[1],
        ffn_token_data_size=sizes[1],
        attention_token_info_buf=places[2],
        attention_token_info_size=sizes[2],
        attention_token_data_buf=places[3],
        attention_token_data_size=sizes[3],
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Segment:
    """The shared memory: the context, and the buffers both ways. ContextError if they do not fit.

    Attributes:
        info: int32 ``[M, 2 + BS * K1]``: flag, layer and expert ids of each micro batch.
        data: uint8 ``[M, BS, K1, HS]``: rows on their way to the experts.
        results_info: int32 ``[M, 2]``: flag and layer.
        results: uint8 ``[M, BS, K1, HS]``: rows on their way back.
    """

    def __init__(self, descriptor: int, sent: np.dtype, returned: np.dtype) -> None:
        memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        self.context = context = ScheduleContext.parse(memory)
        context.check(sent.itemsize, len(memory))
        (_, count, row), shape, stride = context.info_shape, context.data_shape[1:], context.ffn_to_attn_token_size
        if stride < returned.itemsize:
            raise ContextError(
                f"context `ffn_to_attn_token_size`: expected at least {returned.itemsize} bytes, found {stride}"
            )

        def view(start: int, dtype: type, *shape: int) -> np.ndarray:
            return np.ndarray(shape, dtype, memory, start)

        try:
            self.info = view(context.ffn_token_info_buf, np.int32, count, row)
            self.data = view(context.ffn_token_data_buf, np.uint8, *shape)
            self.results_info = view(context.attention_token_info_buf, np.int32, count, HEAD)
            self.results = view(context.attention_token_data_buf, np.uint8, *shape[:3], stride)
        except (TypeError, ValueError, OverflowError) as error:  # numpy's, for a buffer that is too small
            raise ContextError(f"segment: its {len(memory)} bytes have no room for its buffers") from error


class AttentionLink:
    """The attention process's end.

    Args:
        sent: A pair's row on its way to the experts: a dtype with a shape.
        returned: A pair's row on its way back.
        wait: Seconds to wait for the worker to be there, and for each answer.

    Attributes:
        micro_batches: How many may be in flight.

    Raises:
        FfnGone: The worker is not there.
        ContextError: The worker runs another artifact, or serves another process.
    """

    micro_batches = MICRO_BATCHES

    def __init__(self, name: str, *, artifact: str, sent: np.dtype, returned: np.dtype, wait: float = WAIT) -> None:
        self._name, self._wait, self._returned = name, wait, returned
        self._socket = self._connected(time.monotonic() + wait)
        try:
            self._socket.settimeout(wait)
            self._socket.send(artifact.encode())
            self._segment = self._received(sent)
        except OSError as error:
            self._socket.close()
            reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror
            raise FfnGone(f"--ffn `{name}`: expected a worker that answers, found {reason}") from error
        except BaseException:
            self._socket.close()
            raise
        self.tokens = self._segment.context.micro_batch_size
        self._layers: dict[int, tuple[int, np.ndarray]] = {}  # of micro batches in flight: layer, live pairs

    def _connected(self, until: float) -> socket.socket:
        while True:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                peer.connect(address_of(self._name))
                _check_user(peer, self._name)
                return peer
            except ConnectionRefusedError:
                peer.close()
            except BaseException:
                peer.close()
                raise
            if time.monotonic() > until:
                raise FfnGone(
                    f"--ffn `{self._name}`: no FFN worker within {self._wait:g} s",
                    f"start it: ling3-runner ffn-worker ARTIFACT --context {self._name}",
                )
            time.sleep(PAUSE)

    def _received(self, sent: np.dtype) -> Segment:
        message, descriptors, _, _ = socket.recv_fds(self._socket, LARGEST, 1)
        try:
            if not descriptors:
                raise ContextError(
                    f"--ffn `{self._name}`: expected a worker of this artifact, found {_reason(message)}"
                )
            return Segment(descriptors[0], sent, self._returned)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def send_attn_output(self, micro_batch: int, layer: int, tokens: np.ndarray, expert_ids: np.ndarray) -> None:
        """Publishes a micro batch: ``tokens [BS, width]``, ``expert_ids`` int32 ``[BS, K1]``, MASK for no expert.

        ``layer`` counts the layers that have experts.
        """
        live = expert_ids < MASK
        _fill(self._segment.data[micro_batch], live, np.asarray(tokens)[np.nonzero(live)[0]])
        info = self._segment.info[micro_batch]
        info[LAYER], info[HEAD:] = layer, expert_ids.reshape(-1)
        info[FLAG] = 1
        self._layers[micro_batch] = layer, live
        with suppress(OSError):  # recv_ffn_output says why the worker is gone
            self._socket.send(bytes([micro_batch]))

    def recv_ffn_output(self, micro_batch: int) -> np.ndarray:
        """The experts' results of each pair: ``[BS, K1, width]``, zeros where there is no expert.

        Raises:
            FfnGone: The worker has ended.
            ScheduleTimeout: It lives and does not answer.
        """
        layer, live = self._layers.pop(micro_batch)
        try:
            message = self._socket.recv(LARGEST)
        except TimeoutError:
            raise ScheduleTimeout(
                f"ffn worker `{self._name}`: no answer within {self._wait:g} s",
                "its process lives: see whether it is stopped, or far too slow",
            ) from None
        except OSError:
            message = b""
        if message[:1] in (b"", REFUSED):
            raise FfnGone(f"ffn worker `{self._name}`: expected it to answer, found {_reason(message)}")
        info = self._segment.results_info[micro_batch]
        if message != bytes([micro_batch]) or info[LAYER] != layer:
            expected, answer = f"micro batch {micro_batch} of layer {layer}", f"{message[0]} of layer {info[LAYER]}"
            raise ContextError(f"ffn worker `{self._name}`: expected {expected}, found {answer}")
        info[FLAG] = 0
        results = np.zeros(live.shape, self._returned)
        rows = self._segment.results[micro_batch][live]
        results[live] = rows[:, : self._returned.itemsize].view(self._returned.base)
        return results

    def close(self) -> None:
        """Leaves the worker in order; may be called again."""
        with suppress(OSError):
            self._socket.send(LEFT)
        self._socket.close()


@dataclass(frozen=True)
class Published:
    """A micro batch to be computed."""

    number: int  # among those in flight
    layer: int  # among those that have experts
    expert_ids: np.ndarray  # int32 [BS, K1], MASK for no expert
    data: np.ndarray  # [BS, K1, width]


class FfnLink:
    """The worker's end. It has its name once this is made. Raises ContextError: another worker has the name."""

    def __init__(
        self, name: str, context: ScheduleContext, *, artifact: str, layers: int, sent: np.dtype, returned: np.dtype
    ) -> None:
        self._name, self._artifact, self._layers, self._sent = name, artifact, layers, sent
        self._peer: socket.socket | None = None
        self._descriptor = os.memfd_create("ling3-ffn")
        os.ftruncate(self._descriptor, context.attention_token_data_buf + context.attention_token_data_size)
        os.pwrite(self._descriptor, context.build(), 0)
        self._segment = Segment(self._descriptor, sent, returned)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(address_of(name))
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise ContextError(f"--context: the name `{name}` is taken", "choose another") from error
            raise
        self._listener.listen()

    def accept(self) -> None:
        """Waits for an attention process of this artifact; others are refused."""
        while self._peer is None:
            peer, _ = self._listener.accept()
            try:
                _check_user(peer, self._name)
                peer.settimeout(WAIT)
                if peer.recv(LARGEST).decode(errors="replace") == self._artifact:
                    socket.send_fds(peer, [b"segment"], [self._descriptor])
                    peer.settimeout(None)
                    self._peer = peer
                    self._listener.close()
                else:
                    peer.send(REFUSED + b"one of another")
            except (OSError, ContextError):
                pass  # it ended, or is another user's
            if self._peer is None:
                peer.close()

    def recv_attn_output(self) -> Published | None:
        """Waits for the next micro batch; None once the attention process has left.

        Raises:
            FfnGone: The attention process died.
            ContextError: It published a micro batch, a layer or an expert that does not exist.
        """
        assert self._peer is not None
        try:
            message = self._peer.recv(LARGEST)
        except OSError:
            message = b""
        if message == LEFT:
            return None
        if not message:
            raise FfnGone(f"attention process of `{self._name}`: it ended without a word")
        context, number = self._segment.context, message[0]
        if len(message) != 1 or number >= context.micro_batch_num:
            raise ContextError(f"micro batch: expected one below {context.micro_batch_num}, found {message[:8]!r}")
        info = self._segment.info[number]
        layer, ids = int(info[LAYER]), info[HEAD:].reshape(context.data_shape[2:4]).copy()
        info[FLAG], info[HEAD:] = 0, MASK
        if not 0 <= layer < self._layers:
            raise ContextError(f"layer: expected one below {self._layers}, found {layer}")
        if (wrong := ids[(ids < 0) | ((ids >= context.expert_num) & (ids < MASK))]).size:
            raise ContextError(f"expert ids: expected them below {context.expert_num}, found {wrong[0]}")
        rows = self._segment.data[number, ..., : self._sent.itemsize]
        return Published(number, layer, ids, rows.view(self._sent.base))

    def send_ffn_output(self, published: Published, results: np.ndarray) -> None:
        """Gives the results back: ``[BS, K1, width]``; rows of pairs without an expert do not count."""
        assert self._peer is not None
        live = published.expert_ids < MASK
        _fill(self._segment.results[published.number], live, results[live])
        info = self._segment.results_info[published.number]
        info[LAYER], info[FLAG] = published.layer, 1
        with suppress(OSError):  # recv_attn_output says that the process is gone
            self._peer.send(bytes([published.number]))

    def close(self, reason: str = "") -> None:
        """Ends the link; ``reason`` says the attention process why, unless that has left."""
        if self._peer is not None:
            with suppress(OSError):
                if reason:
                    self._peer.send(REFUSED + reason.encode()[: LARGEST - 1])
            self._peer.close()
        self._listener.close()
        os.close(self._descriptor)


def _fill(data: np.ndarray, live: np.ndarray, rows: np.ndarray) -> None:
    """Writes the rows of live pairs into ``data [BS, K1, HS]``."""
    token, place = np.nonzero(live)
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(token), rows.shape[-1] * rows.itemsize)
    data[token, place, : raw.shape[1]] = raw


def _check_user(peer: socket.socket, name: str) -> None:
    """Refuses another user's process, which would read the tokens or make up answers."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise ContextError(f"ffn worker `{name}`: expected a process of user {os.geteuid()}, found user {user}")


def _reason(message: bytes) -> str:
    return message.removeprefix(REFUSED).decode(errors="replace") or "its process gone"
