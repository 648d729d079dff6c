"""The blocking client, for callers without an event loop: the asynchronous one on a thread, and nothing of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Self

from paceline.client.asynchronous import (
    DEFAULT_RESUMPTIONS,
    DEFAULT_TIMEOUT_S,
    FIRST_PAUSE_S,
    INFO_TIMEOUT_S,
    GenerationClient,
)
from paceline.client.background_loop import BackgroundLoop
from paceline.client.failures import ClientClosed
from paceline.generation import Completion, DeploymentStatus, Event, GenerationRequest, ServedModel, ServerInfo
from paceline.rounds import TracedRounds
from paceline.tls import ClientTls


class SyncGenerationClient:
    """`GenerationClient` for callers that block; a context manager, which any number of threads may share.

    Every method says and raises what its namesake there does. An iterator of `generate` is for one thread at a time. After
    a fork the child makes a client of its own.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        trust_network: bool = False,
        max_resumptions: int = DEFAULT_RESUMPTIONS,
        max_queue_retries: int = 0,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """As `GenerationClient`."""
        self._client = GenerationClient(
            endpoint,
            token=token,
            tls=tls,
            trust_network=trust_network,
            max_resumptions=max_resumptions,
            max_queue_retries=max_queue_retries,
            first_pause_s=first_pause_s,
        )
        self._background: BackgroundLoop | None = None

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    def __enter__(self) -> Self:
        self._background = BackgroundLoop(self._client)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends what other threads still wait for, with `ClientClosed`."""
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def generate(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Generator[Event, None, None]:
        """Stream one answer. Closing the iterator, or leaving it to the garbage collector, cancels it at the server."""
        loop = self._loop()
        stream = _Stream(self._client.generate(request, timeout_s=timeout_s))
        try:
            while (event := loop.run(stream.next())) is not None:
                yield event
        finally:
            loop.clean_up(stream.close())

    def complete(self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Completion:
        """The whole answer at once."""
        return self._loop().run(self._client.complete(request, timeout_s=timeout_s))

    def complete_choices(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[Completion, ...]:
        """The whole answers to one prompt at once, in the order of their numbers."""
        return self._loop().run(self._client.complete_choices(request, timeout_s=timeout_s))

    def cancel(self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S) -> bool:
        """End an answer by its id, whoever reads it; whether it was running or waiting."""
        return self._loop().run(self._client.cancel(request_id, timeout_s=timeout_s))

    def list_models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> tuple[ServedModel, ...]:
        """The models that requests can be for."""
        return self._loop().run(self._client.list_models(timeout_s=timeout_s))

    def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServerInfo:
        return self._loop().run(self._client.server_info(timeout_s=timeout_s))

    def pool_status(self, *, timeout_s: float = INFO_TIMEOUT_S) -> DeploymentStatus:
        """The pools as one orchestrator sees them, and how busy it is."""
        return self._loop().run(self._client.pool_status(timeout_s=timeout_s))

    def round_trace(self, *, request_id: str = "", limit: int = 0, timeout_s: float = INFO_TIMEOUT_S) -> TracedRounds:
        """The last rounds that one orchestrator remembers."""
        return self._loop().run(self._client.round_trace(request_id=request_id, limit=limit, timeout_s=timeout_s))

    def _loop(self) -> BackgroundLoop:
        if self._background is None:
            raise ClientClosed
        return self._background


class _Stream:
    """Events taken one by one, in a task each; one at a time, also where a caller has stopped waiting for the last."""

    def __init__(self, events: AsyncGenerator[Event]) -> None:
        self._events = events
        self._turn = asyncio.Lock()

    async def next(self) -> Event | None:
        """None at the end."""
        async with self._turn:
            async for event in self._events:
                return event
            return None

    async def close(self) -> None:
        async with self._turn:
            await self._events.aclose()


def complete(
    endpoint: str,
    request: GenerationRequest,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    token: str | None = None,
    tls: ClientTls | None = None,
    trust_network: bool = False,
) -> Completion:
    """The whole answer, over a connection for it alone; blocks. Raises what `GenerationClient.complete` raises."""
    with SyncGenerationClient(endpoint, token=token, tls=tls, trust_network=trust_network) as client:
        return client.complete(request, timeout_s=timeout_s)
