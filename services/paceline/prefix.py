"""A token prefix and its digest at every length: the name by which drafter and orchestrator mean the same prefix.

A proposal says which prefix it continues by (length, digest). Whatever was delayed, repeated or reordered on the way,
it can only ever be used behind exactly those tokens. The digest is a 64-bit rolling hash, not a security feature: a
collision would cost one rejected draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MASK = 2**64 - 1
EMPTY_DIGEST = 0x9AC3_11E5_0F5E_ED01


def extend_digest(digest: int, token_id: int) -> int:
    """The digest of the prefix one token longer (the multiply-xorshift finaliser of MurmurHash3, keyed by the id)."""
    mixed = (digest ^ (token_id + 1)) * 0xFF51AFD7ED558CCD & _MASK
    mixed = (mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return mixed ^ (mixed >> 29)


class TokenPrefix:
    """Token ids with the digest of each of their prefixes. Invariant: one digest a length, from 0 to `len(self)`."""

    __slots__ = ("_digests", "_ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._digests: list[int] = [EMPTY_DIGEST]
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        """The ids, not to be changed by the caller."""
        return self._ids

    def digest(self, length: int | None = None) -> int:
        """The digest of the first `length` tokens (default: all)."""
        return self._digests[len(self._ids) if length is None else length]

    def extend(self, ids: Iterable[int]) -> None:
        digest = self._digests[-1]
        for token_id in ids:
            digest = extend_digest(digest, token_id)
            self._ids.append(token_id)
            self._digests.append(digest)

    def truncate(self, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        assert 0 <= length <= len(self._ids)
        del self._ids[length:]
        del self._digests[length + 1 :]
