"""Options that several commands share, each described once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.request_fields import RuleChoice
from paceline.client import Schedule

SERVER = "Server"
MODELS = "Models"
SPECULATION = "Speculation"
SAMPLING = "Sampling"
ENDING = "Ending"
OUTPUT = "Output"


class DtypeChoice(StrEnum):
    """Arithmetic of the models."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        envvar="PACELINE_TOKEN",
        help="Who asks, where the server wants to know. Other users of this machine can see what stands here.",
        rich_help_panel=SERVER,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls", help="Reach the server over TLS; the options about certificates say so too.", rich_help_panel=SERVER
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", metavar="FILE", help="Authorities whose servers are believed (PEM).", rich_help_panel=SERVER
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="FILE", help="Our own certificate (PEM).", rich_help_panel=SERVER),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key (PEM).", rich_help_panel=SERVER)
]
TlsName = Annotated[
    str | None,
    typer.Option(
        "--tls-name",
        metavar="NAME",
        help="The name in the server's certificate, if not the host of its address.",
        rich_help_panel=SERVER,
    ),
]
TrustNetwork = Annotated[
    bool,
    typer.Option(
        "--trust-network", help="Show the token without TLS, for nobody listens on the way.", rich_help_panel=SERVER
    ),
]

Target = Annotated[
    str | None,
    typer.Option("--target", metavar="MODEL", help="Hugging Face model id or local folder.", rich_help_panel=MODELS),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="MODEL|hybrid:MODEL|suffix|ngram|none",
        help="A model with the target's tokenizer, also combined with suffix decoding (hybrid), suffix decoding alone, "
        "prompt lookup (ngram, the default), or no drafter.",
        rich_help_panel=MODELS,
    ),
]
Dtype = Annotated[
    DtypeChoice | None,
    typer.Option("--dtype", help="Arithmetic; auto measures which is faster here.", rich_help_panel=MODELS),
]
ScheduleOption = Annotated[
    Schedule | None,
    typer.Option("--schedule", help="Whether drafting waits for each verdict.", rich_help_panel=SPECULATION),
]
Rule = Annotated[
    RuleChoice | None,
    typer.Option("--rule", help="How drafts are judged above temperature 0.", rich_help_panel=SPECULATION),
]
DraftLength = Annotated[
    int | None,
    typer.Option(
        "--draft-length",
        min=0,
        max=64,
        help="Tokens of one draft; decided round by round if left out.",
        rich_help_panel=SPECULATION,
    ),
]
FanOut = Annotated[
    int | None,
    typer.Option(
        "--fan-out",
        min=0,
        max=16,
        help="Guesses at one position that branches are drafted for; 0: no branches.",
        rich_help_panel=SPECULATION,
    ),
]

Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="0 takes the most probable token; 1 if left out.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the most probable tokens up to this share.", rich_help_panel=SAMPLING),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Keep the K most probable tokens; 0: all.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Drop tokens below this share of the most probable one.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1: against tokens seen so far.", rich_help_panel=SAMPLING),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Against tokens of the answer so far.", rich_help_panel=SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="Against tokens of the answer, for each time.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Repeats an answer; if left out one is drawn and shown.", rich_help_panel=SAMPLING),
]

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Most tokens of the answer.", rich_help_panel=ENDING)
]
MinTokens = Annotated[
    int | None, typer.Option("--min-tokens", help="Fewest tokens before a stop token.", rich_help_panel=ENDING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Cut in front of this text; repeatable.", rich_help_panel=ENDING),
]
IgnoreEos = Annotated[
    bool | None, typer.Option("--ignore-eos", help="Go on past the model's end tokens.", rich_help_panel=ENDING)
]

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The model that must answer, by the name that the server gives it.",
        rich_help_panel=SERVER,
    ),
]
Raw = Annotated[bool | None, typer.Option("--raw", help="Continue the prompt as it stands, without the chat template.")]
Choices = Annotated[
    int | None,
    typer.Option(
        "--n", metavar="COUNT", help="Answers to the prompt, side by side, 1 to 16.", rich_help_panel=SAMPLING
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        help="Whose request it is: drafts may come from earlier answers to the same tenant alone.",
        rich_help_panel=SPECULATION,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="COUNT",
        help="Show the log-probability of each token, and so many of the most probable ones; 0 to 20.",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write one JSON object instead of the text.", rich_help_panel=OUTPUT)
]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Colour the tokens by their origin.", rich_help_panel=OUTPUT)
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Answer each line, a JSON object such as {"prompt": "Hi", "seed": 1}, with one JSON object; - reads '
        "standard input.",
        rich_help_panel=OUTPUT,
    ),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", min=1, help="Requests of --prompts that run at once.", rich_help_panel=OUTPUT)
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest wait for one whole answer.")
]
