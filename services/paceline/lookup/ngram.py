"""Drafting by prompt lookup: what followed the last few tokens where they occurred before.

Saxena 2023, "Prompt Lookup Decoding". Deterministic, model-free and pure; shared by the n-gram drafter and, as the
fallback, by the orchestrator. Knows nothing of sessions, rounds or text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.errors import InvalidRequest

_NOWHERE = 0  # no n-gram ends at length 0


class NgramIndex:
    """The committed tokens of one session, and where each of their n-grams occurred before.

    n runs from `prompt_lookup_min` to `prompt_lookup_max` (the field's names). An occurrence is named by its end: the
    length of the prefix that it closes. Extending, truncating and proposing cost a few dictionary operations a token
    and n, whatever the history.

    Invariant: `_latest_end` holds the last occurrence of every n-gram of the tokens, and `_earlier_ends[i]`, one for
    each n, the occurrence before the one that ends with token i. So the tokens alone decide what is proposed, not the
    order of calls that led to them.
    """

    def __init__(self, *, prompt_lookup_min: int = 2, prompt_lookup_max: int = 4) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise InvalidRequest(
                f"prompt_lookup_min must be at least 1 and at most prompt_lookup_max, but they are {prompt_lookup_min} "
                f"and {prompt_lookup_max}.",
                parameter="prompt_lookup_min",
            )
        self._sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)  # longest first
        self._ids: list[int] = []
        self._latest_end: dict[tuple[int, ...], int] = {}
        self._earlier_ends: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Append committed tokens."""
        for token_id in ids:
            self._ids.append(token_id)
            end = len(self._ids)
            ngrams = self._closing_ngrams()
            self._earlier_ends.append(tuple(self._latest_end.get(ngram, _NOWHERE) for ngram in ngrams))
            self._latest_end.update(dict.fromkeys(ngrams, end))

    def truncate(self, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        assert 0 <= length <= len(self._ids)
        while len(self._ids) > length:
            for ngram, earlier_end in zip(self._closing_ngrams(), self._earlier_ends.pop(), strict=True):
                if earlier_end == _NOWHERE:
                    del self._latest_end[ngram]
                else:
                    self._latest_end[ngram] = earlier_end
            self._ids.pop()

    def propose(self, tail: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens to follow the committed ones and `tail`, tokens already drafted behind them.

        They are copied from behind the latest earlier occurrence of the longest n-gram that ends the context. The copy
        may run into what it has just written, as in Lempel and Ziv 1977, so that a period goes on. Empty if no n-gram
        occurred before. Leaves the index as it was.
        """
        committed_length = len(self._ids)
        self.extend(tail)
        proposal = self._continue_context(max_tokens)
        self.truncate(committed_length)
        return proposal

    def _closing_ngrams(self) -> list[tuple[int, ...]]:
        """The n-grams that end with the last token, longest first."""
        length = len(self._ids)
        return [tuple(self._ids[length - size :]) for size in self._sizes if size <= length]

    def _continue_context(self, max_tokens: int) -> tuple[int, ...]:
        earlier_ends = self._earlier_ends[-1] if self._earlier_ends else ()
        end = next((end for end in earlier_ends if end != _NOWHERE), None)
        if end is None or max_tokens <= 0:
            return ()
        period = self._ids[end : end + max_tokens]
        repeats = -(-max_tokens // len(period))  # rounded up
        return tuple((period * repeats)[:max_tokens])
