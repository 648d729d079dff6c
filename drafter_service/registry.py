"""Drafting methods by name: the built-in ones, and those that other packages register.

A method is one function, `build(settings) -> BuiltMethod`. The built-in ones stand in `drafter_service.methods`, one module
each; another package offers its own under the entry point group `paceline.draft_methods`. A module is imported only when
its method is chosen.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

import structlog

from drafter_service.method import DraftMethod
from paceline.engine.memory import Allocation
from paceline.errors import PacelineError, StartupFailed
from paceline.settings import DrafterSettings
from paceline.types import ModelInfo

logger = structlog.get_logger(__name__)

ENTRY_POINT_GROUP = "paceline.draft_methods"
BUILT_IN_METHODS = ("draft_model", "hybrid", "ngram", "suffix")  # modules of `drafter_service.methods`


@dataclass(frozen=True, slots=True)
class BuiltMethod:
    """A method that is ready to draft, who it is, and how its model came to have as much memory as it has, if any."""

    method: DraftMethod[Any]
    info: ModelInfo
    allocation: Allocation | None = None


Build = Callable[[DrafterSettings], BuiltMethod]


def build_method(settings: DrafterSettings) -> BuiltMethod:
    """The method that the settings name, loaded and ready; its `info.method` is that name.

    Raises `StartupFailed`, in a sentence, where there is no such method, two claim the name, or a setting cannot be
    honoured; and what the method itself raises on purpose.
    """
    name = settings.method
    offers = entry_points(group=ENTRY_POINT_GROUP)
    _refuse_unless_unique(name, offers)
    built = _build_plug_in(offers[name], settings) if name in offers.names else _build_built_in(settings)
    if settings.is_emulated and not built.info.emulated:
        raise StartupFailed(
            f"--emulated-step-ms holds the steps of a model, and --method {name} has none that it could hold; drop it."
        )
    return replace(built, info=replace(built.info, method=name))


def info_without_model(name: str, *, max_context: int) -> ModelInfo:
    """What a method without a model says of itself: it takes the ids of any tokenizer."""
    return ModelInfo(
        model_id=name,
        vocab_size=0,
        max_context=max_context,
        tokenizer_sha256="",
        incarnation=uuid.uuid4().hex,
        method=name,
    )


def _refuse_unless_unique(name: str, offers: EntryPoints) -> None:
    origins = [_origin(offer) for offer in offers.select(name=name)]
    if name in BUILT_IN_METHODS:
        origins.insert(0, "Paceline")
    if not origins:
        known = ", ".join(sorted({*BUILT_IN_METHODS, *offers.names}))
        raise StartupFailed(f"There is no drafting method {name!r}; known are {known}.")
    if len(origins) > 1:
        raise StartupFailed(
            f"The drafting method {name!r} is offered by {' and by '.join(origins)}; remove a package, or give its "
            "method another name."
        )


def _build_built_in(settings: DrafterSettings) -> BuiltMethod:
    if settings.method_options:
        raise StartupFailed(f"--method {settings.method} takes no --method-options; use the drafter's own settings.")
    build: Build = import_module(f"drafter_service.methods.{settings.method}").build
    return build(settings)


def _build_plug_in(offer: EntryPoint, settings: DrafterSettings) -> BuiltMethod:
    """Code that nobody here has seen: whatever it raises becomes a sentence, with the traceback in the log."""
    try:
        built = offer.load()(settings)
    except PacelineError:
        raise
    except Exception as error:
        logger.exception("a drafting method of another package cannot be built", method=offer.name, value=offer.value)
        raise StartupFailed(
            f"The drafting method {offer.name!r} of {_origin(offer)} cannot be built: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(built, BuiltMethod):
        raise StartupFailed(
            f"The drafting method {offer.name!r} of {_origin(offer)} gives a {type(built).__name__}; {offer.value} must "
            "return a drafter_service.registry.BuiltMethod."
        )
    return built


def _origin(offer: EntryPoint) -> str:
    return f"the package {offer.dist.name}" if offer.dist is not None else repr(offer.value)
