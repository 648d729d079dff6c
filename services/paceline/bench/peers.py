"""A peer to be measured beside: transformers' own generation with the same pair, in a process of its own.

The process stays between answers, so that its answers can alternate with ours, and waits without computing in between.
Knows nothing of how models are loaded or answers made (`peer_process.py`), nor of what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Self

from paceline.bench.cores import allowed_cores, pinned
from paceline.errors import PacelineError, StartupFailed
from paceline.generation import ChatMessage

PLAIN = "plain"
ASSISTED = "assisted"  # drafted by the drafter
PROMPT_LOOKUP = "prompt_lookup"  # drafted by n-gram lookup in the tokens so far
KINDS = (PLAIN, ASSISTED, PROMPT_LOOKUP)

Schedule = Literal["constant", "heuristic", "heuristic_transient"]

_PROCESS_MODULE = "paceline.bench.peer_process"
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSettings:
    """How assisted generation drafts, in transformers' own terms; the defaults are transformers'.

    "heuristic" drafts two tokens more after a draft that was kept whole and one less after another, and goes on from
    there in the next answer, "heuristic_transient" starts each answer anew.
    """

    num_assistant_tokens: int = 20  # tokens of a draft, at most or at first
    schedule: Schedule = "constant"
    confidence_threshold: float = 0.4  # a draft ends at a token that the drafter finds less probable; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModels:
    """What the peer's process loads."""

    target: str
    drafter: str | None = None
    dtype: str = "auto"
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerQuestion:
    """One answer that is wanted of the peer."""

    kind: str
    messages: tuple[ChatMessage, ...]
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0: the most probable token
    seed: int = 0
    assistant: AssistantSettings = AssistantSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """One answer, and when its tokens were there; all times by the clock of the peer's process."""

    kind: str
    token_ids: tuple[int, ...]  # the end token included where one ended the answer
    first_length: int  # tokens that were there together with the first one
    first_token_s: float  # from the prompt's token ids to the first token
    decode_s: float  # from the first token to the last
    rounds: int  # passes of the target, that over the prompt included
    drafted: int  # tokens
    kept: int  # of the drafted tokens

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens behind those that came with the first one; 0 where there are none."""
        return (len(self.token_ids) - self.first_length) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The models are loaded, and compute in this dtype."""

    dtype: str


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """Why there is no answer, as a sentence."""

    message: str
    reason: str


class Peer:
    """transformers in a process of its own, from `with` to its end. One answer at a time; no thread safety."""

    def __init__(
        self,
        target: str,
        drafter: str | None = None,
        *,
        dtype: str = "auto",
        cores: Sequence[int] = (),
        threads: int | None = None,
        start_timeout_s: float = 600.0,
        answer_timeout_s: float = 600.0,
    ) -> None:
        """`cores` are those the process may use (none: as this one), `threads` how many compute (None: one a core).

        `target` and `drafter` are named as everywhere (`resolve_checkpoint`), a trained drafter included. Starting takes
        longest where a checkpoint has to be fetched or converted first.
        """
        count = threads or len(cores or allowed_cores()) or os.cpu_count() or 1
        self._models = PeerModels(target=target, drafter=drafter, dtype=dtype, threads=count)
        self._cores = tuple(cores)
        self._start_timeout_s, self._answer_timeout_s = start_timeout_s, answer_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self.dtype = ""
        """What the models compute in, once they are loaded."""

    def __enter__(self) -> Self:
        """Start the process and wait until its models are loaded. Raises `StartupFailed` or what loading raised."""
        try:
            self._start()
            ready = self._ask(self._models, timeout_s=self._start_timeout_s)
        except BaseException:
            self.stop()
            raise
        assert isinstance(ready, PeerReady)
        self.dtype = ready.dtype
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def answer(
        self,
        kind: str,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int = 128,
        ignore_eos: bool = False,
        temperature: float = 0.0,
        seed: int = 0,
        assistant: AssistantSettings | None = None,
    ) -> PeerAnswer:
        """Answer a conversation by "plain", "assisted" or "prompt_lookup" generation; blocks meanwhile.

        Sampling, at a `temperature` above 0, is from the whole distribution. Raises `PacelineError`, after which the peer
        still answers, unless its process has ended or was too slow.
        """
        answer = self._ask(
            PeerQuestion(
                kind=kind,
                messages=tuple(messages),
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                temperature=temperature,
                seed=seed,
                assistant=assistant or AssistantSettings(),
            ),
            timeout_s=self._answer_timeout_s,
        )
        assert isinstance(answer, PeerAnswer)
        return answer

    def stop(self) -> None:
        """End the process; nothing happens without one."""
        if self._connection is not None:
            self._connection.close()  # which the process takes as its end
            self._connection = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs, pinned(self._cores):
            self._connection = ours
            self._process = subprocess.Popen(
                # -P: a file in the current folder must not stand in for one of our modules.
                [sys.executable, "-P", "-m", _PROCESS_MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=_environment(self._models.threads),
                start_new_session=True,  # Ctrl-C reaches this process alone
            )

    def _ask(self, message: PeerModels | PeerQuestion, *, timeout_s: float) -> PeerReady | PeerAnswer:
        if self._connection is None:
            raise StartupFailed(
                "The peer is not running; ask it between the beginning and the end of its `with` block."
            )
        try:
            self._connection.send(message)
            reply = self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, OSError) as error:
            raise StartupFailed(f"The peer's process is gone ({self._ending()}); start it anew.") from error
        if isinstance(reply, PeerFailure):
            raise PacelineError(reply.message, reason=reply.reason)
        if reply is None:
            self.stop()  # its late reply would be taken for that of the next question
            raise StartupFailed(f"The peer took longer than {timeout_s:g} s; allow it more, or a smaller model.")
        assert isinstance(reply, PeerReady | PeerAnswer)
        return reply

    def _ending(self) -> str:
        assert self._process is not None, "a connection belongs to a process"
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        status = self._process.poll()
        return "its connection is closed" if status is None else f"it ended with status {status}"


def _environment(threads: int) -> dict[str, str]:
    """Ours, with as many OpenMP threads and without transformers' advice on the terminal."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
