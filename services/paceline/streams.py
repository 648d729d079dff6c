"""Pair streams: one bidirectional gRPC stream for each pair of orchestrator and model service.

Every message carries items of many sessions. The server side (`PeerStreams`) numbers its peers, sends a sign of life
once a second and answers a bad item to its own session alone. The client side (`PairStream`) has one reader and one
writer, and reports the end of the stream once. Neither knows what the items mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from paceline.errors import PacelineError, PayloadInvalid, QueueFull
from paceline.rpc import Outbox
from paceline.sessions import Address
from paceline.types import MAX_SESSION_ID_LENGTH

ItemT = TypeVar("ItemT", bound=Message)
EventT = TypeVar("EventT", bound=Message)
AddressedT = TypeVar("AddressedT", bound="AddressedItem")


class AddressedItem(Protocol):
    """What every item on a stream says first."""

    session_id: str
    epoch: int


class PeerStreams(Generic[AddressedT, EventT]):
    """The streams a model service is serving. Invariant: one outbox, and one writer, a peer."""

    def __init__(
        self,
        *,
        on_item: Callable[[int, AddressedT], None],
        failed: Callable[[Address, PacelineError], EventT],
        heartbeat: Callable[[], EventT],
        heartbeat_s: float,
        on_peer_gone: Callable[[int], None],
        orphan_grace_s: float,
    ) -> None:
        """`on_item(peer, item)` raises `PacelineError` for a bad item; `failed` makes the event that tells its peer.

        `on_peer_gone(peer)` is called `orphan_grace_s` behind the end of a peer's stream.
        """
        self._on_item, self._failed = on_item, failed
        self._heartbeat, self._heartbeat_s = heartbeat, heartbeat_s
        self._on_peer_gone, self._orphan_grace_s = on_peer_gone, orphan_grace_s
        self._outboxes: dict[int, Outbox[EventT]] = {}
        self._next_peer = 0

    def send(self, peer: int, event: EventT) -> None:
        """Queue an event for a peer; a peer that is gone or does not read is none of the caller's business."""
        outbox = self._outboxes.get(peer)
        if outbox is not None:
            with suppress(QueueFull):
                outbox.put(event)

    def announce(self) -> None:
        """Send a heartbeat to every peer now."""
        for peer in self._outboxes:
            self.send(peer, self._heartbeat())

    async def serve(
        self,
        batches: AsyncIterable[Iterable[AddressedT]],
        write: Callable[[list[EventT]], Awaitable[object]],
    ) -> None:
        """Serve one peer until its stream ends; a bad item fails its own session only."""
        peer = self._next_peer
        self._next_peer += 1
        outbox = Outbox[EventT](write)
        self._outboxes[peer] = outbox
        outbox.put(self._heartbeat())
        writer = asyncio.ensure_future(outbox.run())
        beat = asyncio.ensure_future(self._beat(peer))
        try:
            async for items in batches:
                for item in items:
                    self._accept(peer, item)
        finally:
            # An ended stream means that the peer is gone, not that its sessions are: it may come back for them.
            del self._outboxes[peer]
            asyncio.get_running_loop().call_later(self._orphan_grace_s, self._forget_peer, peer)
            beat.cancel()
            outbox.close()
            with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await writer

    def _forget_peer(self, peer: int) -> None:
        # A service too busy to hear of it lets the sessions idle out.
        with suppress(QueueFull):
            self._on_peer_gone(peer)

    def _accept(self, peer: int, item: AddressedT) -> None:
        try:
            _require_name(item.session_id)
            self._on_item(peer, item)
        except PacelineError as error:
            self.send(peer, self._failed(Address(peer, item.session_id, item.epoch), error))

    async def _beat(self, peer: int) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.send(peer, self._heartbeat())


def _require_name(session_id: str) -> None:
    if not 0 < len(session_id) <= MAX_SESSION_ID_LENGTH:
        raise PayloadInvalid(
            f"A session's id has 1 to {MAX_SESSION_ID_LENGTH} characters, not {len(session_id)}; choose another."
        )


class PairStream(Generic[ItemT, EventT]):
    """The client side of one stream, from `run` to its end."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Any, Any],
        *,
        wrap: Callable[[list[ItemT]], Message],
        events_of: Callable[[Any], Iterable[EventT]],
        on_events: Callable[[Sequence[EventT]], None],
        silence_limit_s: float,
    ) -> None:
        self._call, self._events_of, self._on_events = call, events_of, on_events
        self._silence_limit_s = silence_limit_s
        self._outbox = Outbox[ItemT](lambda items: call.write(wrap(items)))
        self._heard_s = time.monotonic()

    def send(self, item: ItemT) -> None:
        self._outbox.put(item)

    async def run(self) -> str:
        """Read and write until the peer goes away or falls silent; says in a few words how it ended."""
        writer = asyncio.ensure_future(self._outbox.run())
        reader = asyncio.ensure_future(self._read())
        try:
            while True:
                done, _ = await asyncio.wait(
                    {reader, writer}, timeout=self._silence_limit_s / 2, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    return self._ending(reader, writer)
                if time.monotonic() - self._heard_s > self._silence_limit_s:
                    return f"silent for {self._silence_limit_s:g} s"
        finally:
            # The peer is gone, or we are: there is no status left to lose.
            self._call.cancel()
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._call:
            self._heard_s = time.monotonic()
            self._on_events(list(self._events_of(message)))

    @staticmethod
    def _ending(*tasks: asyncio.Future[None]) -> str:
        for task in tasks:
            error = task.exception() if task.done() else None
            if isinstance(error, grpc.aio.AioRpcError):
                return f"{error.code().name}: {error.details()}"
            if error is not None:
                return repr(error)
        return "the stream was closed"
