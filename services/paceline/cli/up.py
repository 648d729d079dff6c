"""`paceline up`: the three services on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from enum import StrEnum
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from paceline.cli import options
from paceline.cli.serving import running_stack
from paceline.cli.terminal import Terminal, with_plain_errors
from paceline.client import GenerationClient, ServerInfo, ServerUnavailable
from paceline.errors import StartupFailed, TargetUnavailable
from paceline.local_stack import NGRAM_DRAFTER, LocalStack, LocalStackSettings, refuse_taken_port

_WATCH_INTERVAL_S = 0.2
_GRPC_PORT = 9000
_HTTP_PORT = 8000  # as OpenAI-compatible servers usually have
_LOG_FRAME = {"event", "level", "service", "timestamp"}


class LogLevel(StrEnum):
    """Least important line of the services' logs that is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@with_plain_errors
def up(
    *,
    target: options.Target = None,
    drafter: options.Drafter = None,
    dtype: options.Dtype = None,
    logit_noise: Annotated[
        float,
        typer.Option(
            "--logit-noise",
            min=0.0,
            help="Standard deviation of noise on the drafter's logits, to try a lower acceptance.",
            rich_help_panel=options.MODELS,
        ),
    ] = 0.0,
    schedule: options.ScheduleOption = None,
    rule: options.Rule = None,
    draft_length: options.DraftLength = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help=f"Port of the endpoint; 0 takes any free one. By default {_GRPC_PORT}, where the other commands look, or a "
            "free one if that is taken.",
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port",
            min=0,
            max=65535,
            help=f"Port of the OpenAI-compatible HTTP API; 0 takes any free one. By default {_HTTP_PORT}, or a free one if "
            "that is taken.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="Which log lines are shown.")] = LogLevel.WARNING,
) -> None:
    """Start target, drafter and orchestrator on this machine and print the endpoint."""
    terminal = Terminal.open()
    settings = LocalStackSettings(
        target=target,
        drafter=drafter or NGRAM_DRAFTER,
        schedule=schedule,
        rule=rule,
        draft_length=draft_length,
        dtype=dtype or options.DtypeChoice.AUTO,
        logit_noise=logit_noise,
        port=_usual_port(_GRPC_PORT, option="--port") if port is None else port,
        http_port=_usual_port(_HTTP_PORT, option="--http-port") if http_port is None else http_port,
        reflection=True,  # here is where things are tried out
        log_level=log_level,
    )
    with running_stack(
        settings, terminal, on_log=lambda service, line: terminal.say(f"{service}: {readable(line)}")
    ) as stack:
        info = asyncio.run(_server_info(stack.endpoint))
        terminal.write_line(stack.endpoint)
        terminal.err.print(_services_table(stack, info))
        terminal.say(f'Try: paceline generate --endpoint {stack.endpoint} "Why is the sky blue?"')
        terminal.say(f"     {_curl_line(stack.http_url, info)}")
        terminal.say(f"OpenAI-compatible HTTP at {stack.http_url}/v1    Ctrl-C stops.")
        _watch(stack, terminal)


def _usual_port(port: int, *, option: str) -> int:
    """That port, or 0 for any other if it is taken."""
    try:
        refuse_taken_port(port, option=option)
    except StartupFailed:
        return 0
    return port


def _curl_line(url: str, info: ServerInfo) -> str:
    body = {"model": info.target.model_id, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def readable(line: str) -> str:
    """A structured log line in words: level, event, then what else it says; any other line as it is."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    if not isinstance(fields, dict) or "event" not in fields:
        return line
    rest = [f"{name} {value}" for name, value in fields.items() if name not in _LOG_FRAME]
    return f"{fields.get('level', '')} {fields['event']}".strip() + (f" ({', '.join(rest)})" if rest else "")


async def _server_info(endpoint: str) -> ServerInfo:
    async with GenerationClient(endpoint) as client:
        return await client.server_info()


def _services_table(stack: LocalStack, info: ServerInfo) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("service", "model", "threads", "process"):
        table.add_column(column)
    models = {
        "target": (f"{info.target.model_id} ({info.target.dtype})", str(stack.threads.target)),
        "drafter": (_drafter_name(info), str(stack.threads.drafter)),
        "orchestrator": ("", ""),
    }
    for process in reversed(stack.processes):
        table.add_row(process.name, *models[process.name], str(process.pid))
    return table


def _drafter_name(info: ServerInfo) -> str:
    if info.drafter is None:
        return ""
    model_id, method = info.drafter.model_id, info.drafter.method
    return model_id if method in ("draft_model", model_id) else f"{model_id}, {method}"


def _watch(stack: LocalStack, terminal: Terminal) -> None:
    """Wait for ever; a lost drafter costs only speed, any other lost service ends the waiting with an error."""
    reported: set[str] = set()
    while True:
        time.sleep(_WATCH_INTERVAL_S)
        for process in stack.processes:
            if process.is_running or process.name in reported:
                continue
            reported.add(process.name)
            ending = f"The {process.name} has ended: {process.explain_end()}"
            if process.name == "target":
                raise TargetUnavailable(ending)
            if process.name == "orchestrator":
                raise ServerUnavailable(ending)
            terminal.say(f"{ending} Answers go on without it.", "yellow")
