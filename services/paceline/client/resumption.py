"""What has come of an answer, over all calls for it, and what the next call must ask for: no token is lost or repeated.

The counting is our own: a retry library's begins with a call and ends with its result, this one begins again with each
token that comes. Knows nothing of gRPC.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from paceline.errors import ModelMismatch, PacelineError, PayloadInvalid
from paceline.generation import Delta, Event, Finished, GenerationRequest, Started

_LATEST_DEADLINE_S = 1e12  # since 1970: for ever, for all purposes


class Interrupted(Exception):
    """A call has ended before its answer, in a way that another call may mend."""

    def __init__(self, failure: PacelineError) -> None:
        super().__init__(failure.message)
        self.failure = failure  # what the caller is told if no other call is made


class TimeLimit:
    """Until when the caller waits, over all calls."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.deadline_unix_ms = int(min(time.time() + timeout_s, _LATEST_DEADLINE_S) * 1000)
        self._deadline_s = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        return self._deadline_s - time.monotonic()


class Asked(Protocol):
    """What one call asks for: an answer, or all choices of a request together."""

    limit: TimeLimit
    failures: int  # calls in a row that brought no token

    @property
    def has_started(self) -> bool: ...

    @property
    def has_tokens(self) -> bool: ...

    @property
    def can_go_on(self) -> bool:
        """Whether the next call can ask for what is missing, and for nothing else."""

    @property
    def is_finished(self) -> bool: ...

    def next_request(self) -> GenerationRequest: ...

    def take(self, event: Event) -> Event | None: ...


class Answer:
    """What has come of one answer, over all calls for it. Invariant: `take` has let each token through once."""

    def __init__(self, request: GenerationRequest, limit: TimeLimit, *, choice: int = 0) -> None:
        self.limit, self.failures = limit, 0
        self.is_finished = False
        self._request, self._choice = request, choice
        self._started: Started | None = None
        self._token_ids: list[int] = []
        self._has_delivered = False
        self._resumptions = 0

    @property
    def has_started(self) -> bool:
        return self._started is not None

    @property
    def has_tokens(self) -> bool:
        return bool(self._token_ids)

    @property
    def can_go_on(self) -> bool:
        return self._request.output.token_ids or not self._has_delivered

    def next_request(self) -> GenerationRequest:
        """Asks for what is missing."""
        if self._started is None:
            return self._request
        output_ids = (*self._request.output_ids, *self._token_ids)
        return replace(self._request, n=1, seed=self._started.seed, output_ids=output_ids, request_id=self._request_id)

    @property
    def _request_id(self) -> str:
        """The answer's own, where the caller has chosen one."""
        chosen = self._request.request_id
        return f"{chosen}-{self._choice}" if chosen and self._choice else chosen

    def take(self, event: Event) -> Event | None:
        """What of an event the caller gets, under the number that the answer has for the caller.

        Raises `ModelMismatch` if another model has taken the answer up, and `PayloadInvalid` if the server leaves out
        what was asked for.
        """
        match event:
            case Started():
                return self._take_started(event)
            case Delta():
                self._check_logprobs(event)
                self._has_delivered = True
                self._token_ids += event.token_ids
                self.failures = 0 if event.token_ids else self.failures
                return replace(event, choice=self._choice)
            case Finished():
                self.is_finished = True
                return replace(event, resumptions=self._resumptions, choice=self._choice)

    def _take_started(self, event: Started) -> Started | None:
        if self._started is None:
            if self._request.request_id not in ("", event.request_id):
                raise PayloadInvalid("The server takes no request_id; it is older than this client.")
            self._started = event
            return event
        if event.prompt_tokens != self._started.prompt_tokens:
            raise ModelMismatch(
                f"The prompt was {self._started.prompt_tokens} tokens long and is {event.prompt_tokens} where the answer "
                "was to go on, so another model answers now; ask again."
            )
        self._resumptions += 1
        return None

    def _check_logprobs(self, event: Delta) -> None:
        if self._request.logprobs is not None and len(event.logprobs) != len(event.token_ids):
            raise PayloadInvalid("The server gives no log-probabilities; it is older than this client.")


class Choices:
    """All choices of one request, as long as one call brings them. They start together; then each goes its own way."""

    def __init__(self, request: GenerationRequest, limit: TimeLimit) -> None:
        self.limit, self.failures = limit, 0
        self._request = request
        self._answers = [Answer(request, limit, choice=choice) for choice in range(request.n)]

    @property
    def unfinished(self) -> list[Answer]:
        return [answer for answer in self._answers if not answer.is_finished]

    @property
    def has_started(self) -> bool:
        return self._answers[0].has_started

    @property
    def has_tokens(self) -> bool:
        return any(answer.has_tokens for answer in self._answers)

    @property
    def can_go_on(self) -> bool:
        return not self.has_started  # from then on each answer is asked for by itself

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    def next_request(self) -> GenerationRequest:
        return self._request

    def take(self, event: Event) -> Event | None:
        """As `Answer.take`; raises `PayloadInvalid` if the server gives another number of answers."""
        if isinstance(event, Started):
            if len(event.seeds) != len(self._answers):
                raise PayloadInvalid(
                    f"The server gives {len(event.seeds)} answers, not {len(self._answers)}; it is older than this client."
                )
            for answer, seed in zip(self._answers, event.seeds, strict=True):
                answer.take(replace(event, seeds=(seed,)))
            return event
        if event.choice >= len(self._answers):
            raise PayloadInvalid(
                f"The server sent tokens of answer {event.choice}, of {len(self._answers)}; ask again."
            )
        return self._answers[event.choice].take(event)
