"""Whether a model still computes: a fault that one session's work met leaves it well, a lost device does not."""

from __future__ import annotations

import structlog

from paceline.engine.interface import CacheT, Extension, Model
from paceline.errors import MemoryFull

logger = structlog.get_logger(__name__)


def can_step(model: Model[CacheT]) -> bool:
    """To be asked when a step has failed: feeds one token to a cache of its own. Full memory is no illness."""
    cache = model.new_cache()
    try:
        if not model.reserve(cache, 1):
            return True
        model.step([Extension(cache, [0], 1)])
    except MemoryFull:
        return True
    except Exception:
        logger.exception("the model computes nothing any more")
        return False
    finally:
        model.release(cache)
    return True
