"""`paceline generate`: one answer streamed or several, or a file of prompts answered line by line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.answers import answer_as_json, error_as_json, stream_choices
from paceline.cli.batch import Outcome, complete_all, read_requests
from paceline.cli.connecting import Connecting
from paceline.cli.request_fields import RequestFields
from paceline.cli.serving import running_stack
from paceline.cli.show import answer_table, choices_table, legend, logprobs_table
from paceline.cli.terminal import EXIT_FAILED, Terminal, with_plain_errors
from paceline.client import DEFAULT_TIMEOUT_S, GenerationClient, GenerationRequest
from paceline.errors import InvalidRequest, PacelineError
from paceline.local_stack import NGRAM_DRAFTER, LocalStackSettings


@with_plain_errors
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to answer; - reads it from standard input.")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="HOST:PORT", help="A running server; without it all services are started."),
    ] = None,
    token: options.Token = None,
    tls: options.Tls = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_name: options.TlsName = None,
    trust_network: options.TrustNetwork = False,
    model: options.ModelName = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    dtype: options.Dtype = None,
    schedule: options.ScheduleOption = None,
    rule: options.Rule = None,
    draft_length: options.DraftLength = None,
    fan_out: options.FanOut = None,
    tenant: options.Tenant = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    n: options.Choices = None,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = None,
    raw: options.Raw = None,
    logprobs: options.Logprobs = None,
    as_json: options.AsJson = False,
    show_drafts: options.ShowDrafts = False,
    prompts: options.Prompts = None,
    concurrency: options.Concurrency = 4,
    timeout_s: options.Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Stream an answer, or several, from a running server or from one started for the occasion."""
    _refuse_contradictions(
        prompt=prompt, prompts=prompts, endpoint=endpoint, own_server=(target, drafter, dtype),
        as_json=as_json, show_drafts=show_drafts,
    )  # fmt: skip
    connecting = Connecting.of(
        token=token, tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key, name=tls_name, trust_network=trust_network
    )
    if endpoint is None and connecting.tls is not None:
        raise typer.BadParameter("certificates are for a running server; name it by --endpoint.")
    fields = RequestFields.of(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        n=n,
        logprobs=logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=None if stop is None else tuple(stop),
        ignore_eos=ignore_eos,
        raw=raw,
        rule=rule,
        schedule=schedule,
        draft_length=draft_length,
        fan_out=fan_out,
        tenant=tenant,
        model=model,
    )
    stack_settings = LocalStackSettings(
        target=target,
        drafter=drafter or NGRAM_DRAFTER,
        dtype=dtype or options.DtypeChoice.AUTO,
        schedule=schedule,
        rule=rule,
        draft_length=draft_length,
    )
    terminal = Terminal.open()
    # Every request is checked before a server is looked for or started.
    if prompts is not None:
        requests = read_requests(prompts, fields)
        with _server(endpoint, stack_settings, terminal) as address:
            _answer_all(connecting.client(address), requests, terminal, concurrency=concurrency, timeout_s=timeout_s)
    else:
        request = fields.overridden_by(RequestFields.of(prompt=_read_prompt(prompt))).to_request()
        with _server(endpoint, stack_settings, terminal) as address:
            _answer(
                connecting.client(address),
                request,
                terminal,
                as_json=as_json,
                show_drafts=show_drafts,
                timeout_s=timeout_s,
            )


def _refuse_contradictions(
    *,
    prompt: str | None,
    prompts: Path | None,
    endpoint: str | None,
    own_server: Sequence[object],
    as_json: bool,
    show_drafts: bool,
) -> None:
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either PROMPT or --prompts FILE.")
    if endpoint is not None and any(value is not None for value in own_server):
        raise typer.BadParameter("--target, --drafter and --dtype choose what to start; --endpoint names what runs.")
    if show_drafts and (as_json or prompts is not None):
        raise typer.BadParameter("--show-drafts is for people; with --json or --prompts there is nobody to see it.")


def _read_prompt(prompt: str | None) -> str:
    """The argument, or for `-` standard input without its last line end."""
    if prompt != "-":
        return prompt or ""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("Standard input is no UTF-8 text.", parameter="prompt") from error


@contextmanager
def _server(endpoint: str | None, settings: LocalStackSettings, terminal: Terminal) -> Iterator[str]:
    """The endpoint to ask: the one given, or that of a stack which lives as long as this command."""
    if endpoint is not None:
        yield endpoint
        return
    with running_stack(settings, terminal) as stack:
        yield stack.endpoint


def _answer(
    server: GenerationClient,
    request: GenerationRequest,
    terminal: Terminal,
    *,
    as_json: bool,
    show_drafts: bool,
    timeout_s: float,
) -> None:
    async def run() -> None:
        async with server as client:
            if as_json:
                terminal.write_line(answer_as_json(await client.complete_choices(request, timeout_s=timeout_s)))
                return
            choices = await stream_choices(client, request, terminal, show_drafts=show_drafts, timeout_s=timeout_s)
            if show_drafts:
                terminal.err.print(legend(origin for choice in choices for origin in choice.origins), soft_wrap=True)
            for choice in choices:
                if choice.logprobs:
                    terminal.err.print(logprobs_table(choice, of_several=len(choices) > 1))
            terminal.err.print(answer_table(choices[0]) if len(choices) == 1 else choices_table(choices))

    asyncio.run(run())


def _answer_all(
    server: GenerationClient,
    requests: Sequence[GenerationRequest],
    terminal: Terminal,
    *,
    concurrency: int,
    timeout_s: float,
) -> None:
    """One line an outcome; raises `typer.Exit` at the end if any request failed."""

    def report(outcome: Outcome) -> None:
        line = error_as_json(outcome) if isinstance(outcome, PacelineError) else answer_as_json(outcome)
        terminal.write_line(line)

    async def run() -> int:
        async with server as client:
            return await complete_all(client, requests, concurrency=concurrency, timeout_s=timeout_s, report=report)

    failures = asyncio.run(run())
    if failures:
        terminal.say(f"{failures} of {len(requests)} requests failed; their lines say why.", "bold red")
        raise typer.Exit(EXIT_FAILED)
