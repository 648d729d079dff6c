"""Settings of the model services: how they are written, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from paceline.model_service import memory_limits
from paceline.settings import MIN_STEP_TOKENS, DrafterSettings, TargetSettings
from paceline.types import MAX_DRAFT_LENGTH

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("torchao", {"quant_method": "torchao"}),
        ("bitsandbytes_8bit", BITSANDBYTES),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ('{"quant_method": "bitsandbytes", "load_in_8bit": true}', BITSANDBYTES),
        ("", {}),
    ],
)
def test_a_quantization_is_a_name_or_a_whole_configuration(
    written: str, meant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on the command line, in the environment, and in a configuration file, where it may also be a mapping."""
    assert CliApp.run(TargetSettings, cli_args=["--quantization", written]).quantization == meant
    assert DrafterSettings.model_validate({"quantization": written}).quantization == meant
    assert DrafterSettings.model_validate({"quantization": meant}).quantization == meant
    monkeypatch.setenv("PACELINE_TARGET_QUANTIZATION", written)
    assert TargetSettings.model_validate({}).quantization == meant


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--quantization", '{"quant_method"', "quantization"),
        ("--max-num-batched-tokens", str(MIN_STEP_TOKENS - 1), f"0 or at least {MIN_STEP_TOKENS}"),
        ("--memory-fraction", "1.1", "less than or equal to 1"),
        ("--block-size", "-1", "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(option: str, value: str, words: str) -> None:
    """A step must hold a whole draft and the token before it."""
    with pytest.raises(ValidationError, match=words):
        CliApp.run(TargetSettings, cli_args=[option, value])


def test_the_smallest_step_holds_the_longest_draft() -> None:
    """With the committed token that is fed again before it."""
    assert MIN_STEP_TOKENS == MAX_DRAFT_LENGTH + 1
    options = ["--max-num-batched-tokens", str(MIN_STEP_TOKENS), "--no-enable-prefix-caching"]
    settings = CliApp.run(TargetSettings, cli_args=options)
    assert (settings.max_num_batched_tokens, settings.enable_prefix_caching) == (MIN_STEP_TOKENS, False)


def test_the_limits_of_memory_are_those_of_the_settings() -> None:
    """None is mixed up or left out."""
    options = {
        "memory_fraction": 0.5,
        "kv_budget_tokens": 1000,
        "max_context": 300,
        "max_sessions": 20,
        "block_size": 8,
    }
    limits = memory_limits(TargetSettings.model_validate(options))
    assert {name: getattr(limits, name) for name in options} == options
