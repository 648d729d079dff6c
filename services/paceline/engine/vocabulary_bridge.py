"""A draft model whose tokenizer is not the target's: it reads and proposes the target's ids all the same.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202, algorithm "TLI"): the model proposes only tokens that both
vocabularies have, under the target's ids, so its drafts are judged like any others and the law of the output stays the
target's. Tokens are the same if they stand for the same bytes (`vocabulary`).

What the model reads is spelled token by token. A token of the target that the drafter lacks is spelled by several of
its own, so a session's cache is longer in the drafter's tokens than in the target's, by a share that is bounded; what
feeds each token depends on the tokens before it alone. Nothing is ever decoded to text and encoded again, so no start
token is added twice. (Feeding the unknown token instead, as TLI has it, is one-to-one, but costs more: where the drafter
lacked 5 % of the tokens of English text and code, and was the same model otherwise, its arg max was the target's in 0.47
of the rows; 0.80 with the one of its own tokens that comes nearest, and 0.86 with several.) Knows nothing of sampling.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import structlog
import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.engine.checkpoint import resolve_checkpoint, vocabulary_of_checkpoint
from paceline.engine.interface import CacheT, Extension, Memory, Model
from paceline.engine.vocabulary import Vocabulary
from paceline.errors import StartupFailed

logger = structlog.get_logger(__name__)

LEAST_SHARED = 0.2  # of the smaller vocabulary; real pairs share half of it and more
_MOST_PIECES = 8  # tokens of the drafter for one of the target
_EXTRA_TOKENS = 8  # that a session may have in the drafter beyond the target's, and one more for each
_EXTRA_INTERVAL = 4  # tokens of the target


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """How a drafter reads the target's tokens, and which of them it can propose.

    `pieces`: for each id of the target, the drafter's ids that spell it, at least one. `start`: what the drafter has
    before every text, if anything; it takes the place of the target's `start_id`, which is read as `start_pieces`.
    `proposed_by`: for each id of the target the drafter's id of the same token, none twice, or `draft_vocab_size`, past
    the last, where there is none.
    """

    pieces: Sequence[tuple[int, ...]]
    unknown: tuple[int, ...]  # for ids that the target's tokenizer lacks
    start: tuple[int, ...]
    start_id: int | None
    start_pieces: tuple[int, ...]
    proposed_by: Tensor  # [target_size] int64
    draft_vocab_size: int

    @classmethod
    def between(cls, drafter: Vocabulary, target: Vocabulary, *, draft_vocab_size: int) -> VocabularyMap:
        """`draft_vocab_size` is that of the drafter's network, which may know fewer tokens than its tokenizer."""
        drafter = drafter.below(draft_vocab_size)
        ids_by_spelling = _ids_by_spelling(drafter)
        shared = _shared_ids(drafter, target)
        texts = {text: token_id for text, token_id in ids_by_spelling.items() if token_id not in drafter.markers}
        unknown = (_first_known(drafter.unknown_id, drafter.end_id, 0),)

        def pieces_of(token_id: int) -> tuple[int, ...]:
            spelling = target.spellings.get(token_id, b"")
            same = shared.get(token_id, ids_by_spelling.get(spelling))
            return (same,) if same is not None else tuple(_segments(spelling, texts)) or unknown

        pieces = [pieces_of(token_id) for token_id in range(target.size)]
        start_pieces: tuple[int, ...] = ()
        if target.start_id is not None:
            # A drafter without a start token knows the end of a text before every text but the first.
            same = shared.get(target.start_id)
            start_pieces = (_first_known(drafter.start_id, same, drafter.end_id, pieces[target.start_id][0]),)
        proposed_by = [shared.get(token_id, draft_vocab_size) for token_id in range(target.size)]
        return cls(
            pieces=pieces,
            unknown=unknown,
            start=() if drafter.start_id is None else (drafter.start_id,),
            start_id=target.start_id,
            start_pieces=start_pieces,
            proposed_by=torch.tensor(proposed_by, dtype=torch.int64),
            draft_vocab_size=draft_vocab_size,
        )

    @property
    def target_size(self) -> int:
        return len(self.pieces)

    @property
    def shared_count(self) -> int:
        """How many tokens can be proposed."""
        return int((self.proposed_by < self.draft_vocab_size).sum())

    def spell(self, ids: Iterable[int], *, position: int, extra: int) -> Iterator[tuple[int, ...]]:
        """What the drafter is fed for each of the target's `ids`, the first of which stands at `position`.

        `extra` tokens more than the target's were fed before. Where they would become too many, a token is fed as the
        first of its pieces alone, the longest of the drafter's tokens that it begins with.
        """
        for place, token_id in enumerate(ids, start=position):
            pieces = self._pieces_at(place, token_id)
            if extra + len(pieces) - 1 > _EXTRA_TOKENS + place // _EXTRA_INTERVAL:
                pieces = pieces[:1]
            extra += len(pieces) - 1
            yield pieces

    def spread(
        self,
        rows: Tensor,  # [rows, draft_vocab_size]
    ) -> Tensor:  # [rows, target_size]
        """The drafter's logits at the target's ids; -inf where it cannot propose the token."""
        return pad(rows, (0, 1), value=-torch.inf).index_select(1, self.proposed_by)

    def _pieces_at(self, position: int, token_id: int) -> tuple[int, ...]:
        if position == 0 and token_id == self.start_id:
            return self.start_pieces
        pieces = self.pieces[token_id] if token_id < len(self.pieces) else self.unknown
        return (*self.start, *pieces) if position == 0 else pieces


class BridgedCache(Generic[CacheT]):
    """A session's cache at the drafter, its length counted in the target's tokens.

    Invariant: `inner` holds `fed`, the first `ends[n]` of which spell the target's first n + 1 tokens.
    """

    __slots__ = ("ends", "fed", "inner")

    def __init__(self, inner: CacheT) -> None:
        self.inner = inner
        self.fed: list[int] = []
        self.ends: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ends)

    def end_of(self, length: int) -> int:
        """How many of the drafter's tokens spell the first `length` of the target's."""
        return self.ends[length - 1] if length else 0


class IntersectedModel(Generic[CacheT]):
    """A model of another tokenizer, behind the narrow interface, with the target's ids (`interface.Model`).

    `vocab_size` is the size of the target's tokenizer, and `tokenizer_sha256` its fingerprint. Its `max_context` is
    shorter than the model's own, so that what spells it always fits; `memory` counts the drafter's tokens.
    """

    def __init__(self, model: Model[CacheT], shared: VocabularyMap, *, tokenizer_sha256: str = "") -> None:
        self._model, self._map = model, shared
        self.tokenizer_sha256 = tokenizer_sha256
        self.vocab_size = shared.target_size
        self.max_context = max(0, model.max_context - _EXTRA_TOKENS) * _EXTRA_INTERVAL // (_EXTRA_INTERVAL + 1)

    @property
    def memory(self) -> Memory:
        return self._model.memory

    def new_cache(self) -> BridgedCache[CacheT]:
        return BridgedCache(self._model.new_cache())

    def fork(self, cache: BridgedCache[CacheT], length: int) -> BridgedCache[CacheT]:
        assert 0 <= length <= cache.length, f"cannot fork {length} of {cache.length} cached tokens"
        end = cache.end_of(length)
        fork = BridgedCache(self._model.fork(cache.inner, end))
        fork.fed, fork.ends = cache.fed[:end], cache.ends[:length]
        return fork

    def adopt(self, cache: BridgedCache[CacheT]) -> None:
        self._model.adopt(cache.inner)

    def reserve(self, cache: BridgedCache[CacheT], length: int) -> bool:
        """Room for the most that `length` tokens can be spelled with."""
        most_new = (length - cache.length) * _MOST_PIECES + len(self._map.start)
        most_in_all = length + _EXTRA_TOKENS + length // _EXTRA_INTERVAL
        return self._model.reserve(cache.inner, min(cache.inner.length + most_new, most_in_all))

    def truncate(self, cache: BridgedCache[CacheT], length: int) -> None:
        assert 0 <= length <= cache.length, f"cannot truncate {cache.length} cached tokens to {length}"
        end = cache.end_of(length)
        self._model.truncate(cache.inner, end)
        del cache.fed[end:], cache.ends[length:]

    def release(self, cache: BridgedCache[CacheT]) -> None:
        self._model.release(cache.inner)
        cache.fed, cache.ends = [], []

    def reuse_prefix(self, cache: BridgedCache[CacheT], ids: Sequence[int]) -> int:
        """As `interface.Model.reuse_prefix`; a token of which only some pieces were shared is not reused."""
        fed, ends = self._spelled(cache, ids[cache.length :])
        reused_length = self._model.reuse_prefix(cache.inner, [*cache.fed, *fed])
        cache.ends += ends[: bisect_right(ends, reused_length)]
        end = cache.end_of(cache.length)
        cache.fed += fed[: end - len(cache.fed)]
        self._model.truncate(cache.inner, end)
        return cache.length

    def share_prefix(self, cache: BridgedCache[CacheT], ids: Sequence[int]) -> None:
        end = cache.end_of(min(len(ids), cache.length))
        self._model.share_prefix(cache.inner, cache.fed[:end])

    def step(self, batch: Sequence[Extension[BridgedCache[CacheT]]]) -> list[Tensor]:
        spelled = [self._spelled(extension.cache, extension.ids) for extension in batch]
        steps = [
            Extension(extension.cache.inner, fed, _rows_from_first_wanted(ends, extension.rows))
            for extension, (fed, ends) in zip(batch, spelled, strict=True)
        ]
        all_rows = self._model.step(steps)
        wanted = []
        for extension, (fed, ends), rows in zip(batch, spelled, all_rows, strict=True):
            extension.cache.fed += fed
            extension.cache.ends += ends
            # A token's row is that of its last piece.
            last_pieces = [end - 1 - ends[-1] for end in ends[len(ends) - extension.rows :]]
            wanted.append(self._map.spread(rows[last_pieces]))
        return wanted

    def _spelled(self, cache: BridgedCache[CacheT], ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """What is to be fed for the ids behind the cached ones, and where each then ends."""
        fed: list[int] = []
        ends: list[int] = []
        for pieces in self._map.spell(ids, position=cache.length, extra=len(cache.fed) - cache.length):
            fed += pieces
            ends.append(len(cache.fed) + len(fed))
        return fed, ends


def intersected(
    model: Model[CacheT], *, drafter: str, target: str, cache_dir: Path | None = None
) -> IntersectedModel[CacheT]:
    """The model with the tokenizer of the checkpoint `drafter`, made to speak that of `target`; both by name.

    Only the tokenizer of `target` is read. Raises `ModelUnavailable`, and `StartupFailed` where one of them has no
    tokenizer or too few tokens are shared for drafting to be worth it.
    """
    ours, theirs = (_vocabulary(name, cache_dir) for name in (drafter, target))
    shared = VocabularyMap.between(ours, theirs, draft_vocab_size=model.vocab_size)
    count = shared.shared_count
    figures = f"{count} of the drafter's {len(ours.spellings)} and the target's {len(theirs.spellings)} tokens"
    if count < LEAST_SHARED * min(len(ours.spellings), len(theirs.spellings)):
        raise StartupFailed(
            f"The tokenizers of '{drafter}' and '{target}' share only {figures}; choose a drafter whose tokenizer is "
            "closer to the target's, or --method ngram, which needs none."
        )
    logger.info(
        "drafting with another tokenizer, as far as the two share tokens",
        shared=count,
        of_drafter=round(count / len(ours.spellings), 3),
        of_target=round(count / len(theirs.spellings), 3),
        drafter_tokenizer=ours.tokenizer_sha256[:16],
        target_tokenizer=theirs.tokenizer_sha256[:16],
    )
    return IntersectedModel(model, shared, tokenizer_sha256=theirs.tokenizer_sha256)


def _vocabulary(name: str, cache_dir: Path | None) -> Vocabulary:
    vocabulary = vocabulary_of_checkpoint(resolve_checkpoint(name, cache_dir=cache_dir))
    if vocabulary is None or not vocabulary.spellings:
        raise StartupFailed(f"'{name}' has no tokenizer, which --use-heterogeneous-vocab compares; name one that has.")
    return vocabulary


def _ids_by_spelling(vocabulary: Vocabulary) -> dict[bytes, int]:
    """The ids by what they stand for, of several for the same the last; those that stand for nothing are left out.

    Vocabularies begin with the single bytes for what has no token, and what was added in the end goes first.
    """
    return {spelling: token_id for token_id, spelling in sorted(vocabulary.spellings.items()) if spelling}


def _shared_ids(drafter: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """The drafter's ids by the target's, each once: equal spellings, and the end of a text whatever it is called."""
    ours, theirs = _ids_by_spelling(drafter), _ids_by_spelling(target)
    pairs = {token_id: ours[spelling] for spelling, token_id in theirs.items() if spelling in ours}
    if drafter.end_id is None or target.end_id is None:
        return pairs
    if target.end_id not in pairs and drafter.end_id not in pairs.values():
        pairs[target.end_id] = drafter.end_id
    return pairs


def _first_known(*ids: int | None) -> int:
    return next(token_id for token_id in ids if token_id is not None)


def _segments(spelling: bytes, text_ids: Mapping[bytes, int]) -> Iterator[int]:
    """The longest of the tokens that the spelling begins with, and so on; what has no token is left out."""
    start = count = 0
    while start < len(spelling) and count < _MOST_PIECES:
        ends = range(len(spelling), start, -1)
        end = next((end for end in ends if spelling[start:end] in text_ids), None)
        if end is not None:
            yield text_ids[spelling[start:end]]
            count += 1
        start = end if end is not None else start + 1


def _rows_from_first_wanted(ends: Sequence[int], rows: int) -> int:
    """From the last piece of the first token whose row is wanted to the last piece of all."""
    return ends[-1] - ends[-rows] + 1 if rows else 0
