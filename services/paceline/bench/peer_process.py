"""The peer's process: transformers' own `generate`, plain, assisted by a drafter, or by prompt lookup.

The drafter is the very network that our drafter service runs: a trained one is a network of transformers with logits
over the whole vocabulary, and so an assistant like any other. Nothing of ours takes part between the prompt's token ids
and the last token, apart from a clock. Knows nothing of who asks, or of what is measured.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from paceline.bench.peers import (
    ASSISTED,
    KINDS,
    PLAIN,
    PROMPT_LOOKUP,
    AssistantSettings,
    PeerAnswer,
    PeerFailure,
    PeerModels,
    PeerQuestion,
    PeerReady,
)
from paceline.engine.checkpoint import fingerprint_of_checkpoint, load_network, load_tokenizer, resolve_checkpoint
from paceline.engine.drafter_folder import is_drafter_folder
from paceline.engine.drafter_network import load_drafter
from paceline.engine.precision import choose_dtype
from paceline.engine.shallow import Network
from paceline.errors import InvalidRequest, ModelMismatch, ModelUnavailable, PacelineError

_CPU = torch.device("cpu")
_LOOKUP_LENGTH = 10  # tokens of one draft looked up, as transformers' documentation has it


class PeerPair:
    """A target, and a drafter if there is one, that answer by transformers' generation.

    Alters nothing but the networks' generation settings, which are those of the last question.
    """

    def __init__(self, models: PeerModels) -> None:
        """Load them. Raises `ModelUnavailable`, `StartupFailed` for the dtype, or `ModelMismatch` for the pair."""
        self.dtype = choose_dtype(models.dtype, _CPU)
        checkpoint = resolve_checkpoint(models.target)
        if is_drafter_folder(checkpoint):
            raise ModelUnavailable(f"'{models.target}' is a drafter and answers nothing by itself; name its target.")
        self._tokenizer = load_tokenizer(checkpoint)
        self._target = load_network(checkpoint, dtype=self.dtype)
        self._end_ids = _end_ids(self._target)
        self._drafter = self._load_drafter(models.drafter, checkpoint) if models.drafter else None
        self._assistant: AssistantSettings | None = None
        for network in (self._target, self._drafter):
            if network is not None:
                # What a checkpoint recommends, such as a penalty on repetition, is not part of the comparison.
                network.generation_config = type(network.generation_config)(pad_token_id=min(self._end_ids, default=0))

    def _load_drafter(self, name: str, target: Path | str) -> Network:
        checkpoint = resolve_checkpoint(name)
        if isinstance(checkpoint, Path) and is_drafter_folder(checkpoint):
            return load_drafter(checkpoint, verifier=str(target), dtype=self.dtype, device=_CPU, cache_dir=None).network
        drafter = load_network(checkpoint, dtype=self.dtype)
        if fingerprint_of_checkpoint(checkpoint) != fingerprint_of_checkpoint(target):
            raise ModelMismatch(f"'{name}' and '{target}' number their tokens differently; choose another drafter.")
        if _vocab_size(drafter) != _vocab_size(self._target):
            raise ModelMismatch(
                f"'{name}' has logits for {_vocab_size(drafter)} tokens and '{target}' for {_vocab_size(self._target)}, "
                "which assisted generation does not take; choose another drafter."
            )
        return drafter

    def answer(self, question: PeerQuestion) -> PeerAnswer:
        """The answer and its times. Raises `InvalidRequest`, and `PacelineError` for what transformers cannot do."""
        options = self._options(question)
        prompt = torch.tensor([self._prompt_ids(question)])
        torch.manual_seed(question.seed)
        watch, target = _Stopwatch(), cast(Any, self._target)  # its `generate` has no types of its own
        hook = self._target.register_forward_pre_hook(watch.on_pass, with_kwargs=True)
        try:
            with torch.inference_mode():
                target.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=watch, **options)
        except (ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0].strip(" .")
            raise PacelineError(
                f"transformers cannot answer by {question.kind} generation here: {reason}; leave this kind out, or choose "
                "other models."
            ) from error
        finally:
            hook.remove()
        return watch.answer(question.kind)

    def _options(self, question: PeerQuestion) -> dict[str, Any]:
        """What `generate` is told."""
        options: dict[str, Any] = {"max_new_tokens": question.max_tokens, "do_sample": question.temperature > 0}
        if question.temperature > 0:
            options |= {"temperature": question.temperature, "top_k": 0, "top_p": 1.0}
        if self._end_ids and not question.ignore_eos:
            options["eos_token_id"] = list(self._end_ids)
        if question.kind == ASSISTED:
            options["assistant_model"] = self._assistant_model(question.assistant)
        elif question.kind == PROMPT_LOOKUP:
            options["prompt_lookup_num_tokens"] = _LOOKUP_LENGTH
        elif question.kind != PLAIN:
            raise InvalidRequest(f"There is no kind '{question.kind}'; use {', '.join(KINDS)}.", parameter="kind")
        return options

    def _assistant_model(self, settings: AssistantSettings) -> Network:
        """The drafter, to draft so. What "heuristic" has learned lasts while the settings stay."""
        if self._drafter is None:
            raise InvalidRequest("Assisted generation needs a drafter; name one.", parameter="drafter")
        if settings != self._assistant:
            config: Any = self._drafter.generation_config
            config.num_assistant_tokens = settings.num_assistant_tokens
            config.num_assistant_tokens_schedule = settings.schedule
            config.assistant_confidence_threshold = settings.confidence_threshold
            self._assistant = settings
        return self._drafter

    def _prompt_ids(self, question: PeerQuestion) -> list[int]:
        """Those of the conversation up to where the answer begins, as our own requests have them."""
        conversation = [{"role": message.role, "content": message.content} for message in question.messages]
        return list(self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))


class _Stopwatch:
    """When which tokens were there, and how many the target was fed: a streamer (`generate` calls `put` with the prompt,
    then with the tokens of each round) and a hook on its passes."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._times_s: list[float] = []
        self._rounds: list[list[int]] = []
        self._fed = 0

    def put(self, token_ids: Tensor) -> None:
        self._times_s.append(time.perf_counter())
        self._rounds.append(token_ids.flatten().tolist())

    def end(self) -> None:
        return None

    def on_pass(self, network: Any, arguments: Any, named: dict[str, Any]) -> None:
        self._fed += named["input_ids"].shape[1]

    def answer(self, kind: str) -> PeerAnswer:
        prompt_ids, *rounds = self._rounds
        _, first_s, *_ = times_s = self._times_s
        token_ids = [token_id for tokens in rounds for token_id in tokens]
        # Besides drafts, the target is fed the prompt in its first pass and one committed token in each later one.
        committed = len(prompt_ids) + len(rounds) - 1
        return PeerAnswer(
            kind=kind,
            token_ids=tuple(token_ids),
            first_length=len(rounds[0]),
            first_token_s=first_s - self._started_s,
            decode_s=times_s[-1] - first_s,
            rounds=len(rounds),
            drafted=self._fed - committed,
            kept=len(token_ids) - len(rounds),
        )


def serve(connection: Connection[Any, Any]) -> None:
    """Load what the first message names, then answer one question after another until the other end closes."""
    with connection:
        try:
            pair = _load(connection.recv())
            connection.send(PeerReady(str(pair.dtype).removeprefix("torch.")))
            while True:
                connection.send(_reply(pair, connection.recv()))
        except PacelineError as error:
            connection.send(PeerFailure(error.message, error.reason))
        except (EOFError, BrokenPipeError):
            return  # nobody is interested any more


def _load(models: PeerModels) -> PeerPair:
    torch.set_num_threads(models.threads)
    return PeerPair(models)


def _reply(pair: PeerPair, question: PeerQuestion) -> PeerAnswer | PeerFailure:
    try:
        return pair.answer(question)
    except PacelineError as error:
        return PeerFailure(error.message, error.reason)


def _vocab_size(network: Network) -> int:
    size: int = network.config.get_text_config(decoder=True).vocab_size
    return size


def _end_ids(network: Network) -> tuple[int, ...]:
    """The tokens that end an answer: of the generation configuration, else of the model's."""
    stated = getattr(network.generation_config, "eos_token_id", None)
    if stated is None:
        stated = getattr(network.config, "eos_token_id", None)
    return tuple(stated) if isinstance(stated, list) else () if stated is None else (stated,)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
