"""The one msgpack payload: the sparse row that a draft token was drawn from.

It travels from drafter to target as opaque bytes, which the orchestrator relays unread. Unpacking checks everything
that a peer could get wrong and raises `PayloadInvalid` with a sentence.
"""

from __future__ import annotations

import msgpack
import numpy as np
import torch

from paceline.errors import PayloadInvalid
from paceline.sampling import SparseDistribution

MAX_DISTRIBUTION_ENTRIES = 4096


def pack_distribution(distribution: SparseDistribution, *, vocab_size: int) -> bytes:
    """Pack one sparse row: ids as little-endian uint32, probabilities as little-endian float16.

    `sampling.truncate_to_top` has rounded the probabilities to float16 already, so the row that travels is exactly the
    row that was sampled from.
    """
    payload = {
        "v": 1,
        "n": vocab_size,
        "ids": distribution.ids.cpu().numpy().astype("<u4").tobytes(),
        "probs": distribution.probs.cpu().numpy().astype("<f2").tobytes(),
    }
    packed: bytes = msgpack.packb(payload)
    return packed


def unpack_distribution(payload: bytes, *, vocab_size: int) -> SparseDistribution:
    """Unpack and check one sparse row; raises `PayloadInvalid` for anything that is not a distribution."""
    fields = _unpack_map(payload)
    if set(fields) != {"v", "n", "ids", "probs"} or fields["v"] != 1:
        raise PayloadInvalid("The draft distribution must be a version 1 map with the keys v, n, ids and probs.")
    if fields["n"] != vocab_size:
        raise PayloadInvalid(
            f"The draft distribution is over another vocabulary than the target's {vocab_size} tokens; pair other models."
        )
    raw_ids, raw_probs = fields["ids"], fields["probs"]
    if not isinstance(raw_ids, bytes) or not isinstance(raw_probs, bytes):
        raise PayloadInvalid("The draft distribution's ids and probs must be binary.")
    entries = len(raw_probs) // 2
    if not 1 <= entries <= MAX_DISTRIBUTION_ENTRIES or len(raw_probs) != 2 * entries or len(raw_ids) != 4 * entries:
        raise PayloadInvalid(
            f"The draft distribution needs 4 bytes of id and 2 of probability for each of 1 to "
            f"{MAX_DISTRIBUTION_ENTRIES} entries, not {len(raw_ids)} and {len(raw_probs)} bytes."
        )
    ids = np.frombuffer(raw_ids, dtype="<u4").astype(np.int64)
    probs = np.frombuffer(raw_probs, dtype="<f2").astype(np.float32)
    if int(ids.max()) >= vocab_size or len(np.unique(ids)) != entries:
        raise PayloadInvalid(f"The draft distribution's ids must be distinct and below {vocab_size}.")
    if not bool(np.isfinite(probs).all()) or float(probs.min()) <= 0.0 or abs(float(probs.sum()) - 1.0) > 0.02:
        raise PayloadInvalid("The draft distribution's probabilities must be positive and sum to 1.")
    return SparseDistribution(ids=torch.from_numpy(ids), probs=torch.from_numpy(probs))


def _unpack_map(payload: bytes) -> dict[str, object]:
    limit = 4 * MAX_DISTRIBUTION_ENTRIES
    try:
        fields = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            max_str_len=8,
            max_bin_len=limit,
            max_array_len=0,
            max_map_len=4,
            max_ext_len=0,
        )
    except ValueError as error:
        raise PayloadInvalid(f"The draft distribution cannot be unpacked ({error}).") from error
    if not isinstance(fields, dict):
        raise PayloadInvalid("The draft distribution must be a msgpack map.")
    return fields
