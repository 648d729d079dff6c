"""Log lines: JSON each, whoever writes them, and with the ids of what they are about."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.types import request_id_of

SCRIPT = """
import asyncio, logging, warnings
import structlog
from paceline.logs import bind_request, bind_session, configure_logging

configure_logging("info", service="target", takes_libraries=True)
logger = structlog.get_logger("test")
logger.debug("left out")
logger.info("alone")
logger.info("of a session", session_id="r1-2")

async def request(request_id):
    bind_request(request_id)
    await asyncio.sleep(0)
    logger.info("of a request")
    await asyncio.create_task(choice(f"{request_id}-1"))
    bind_request("")
    logger.info("of nobody")

async def choice(session_id):
    bind_session(session_id)
    await asyncio.sleep(0)
    logger.info("of a choice")

async def main():
    await asyncio.gather(request("r1"), request("r2"))

asyncio.run(main())
logging.getLogger("library").info("left out")
logging.getLogger("library").warning("as libraries log: %s", "words")
warnings.warn("as libraries warn")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("of an error")
    logging.getLogger("library").exception("of a library's error")
"""


@pytest.fixture(scope="module")
def lines() -> list[dict[str, str]]:
    """What a process of ours writes on standard error: every line of it."""
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout == ""
    return [json.loads(line) for line in process.stderr.splitlines()]


def events(lines: list[dict[str, str]], event: str) -> list[dict[str, str]]:
    return [line for line in lines if line["event"] == event]


def test_every_line_says_whose_when_and_how_grave(lines: list[dict[str, str]]) -> None:
    assert len(lines) == 12
    for line in lines:
        assert line.keys() >= {"event", "level", "timestamp", "service"}, line
        assert line["service"] == "target"
    assert not events(lines, "left out")


def test_ids_are_those_of_the_task(lines: list[dict[str, str]]) -> None:
    """Of two requests side by side each keeps its own; a choice's lines are its request's too, the others' not the choice's."""
    assert {line["request_id"] for line in events(lines, "of a request")} == {"r1", "r2"}
    assert all("session_id" not in line for line in events(lines, "of a request"))
    choices = events(lines, "of a choice")
    assert {(line["request_id"], line["session_id"]) for line in choices} == {("r1", "r1-1"), ("r2", "r2-1")}
    for line in [*events(lines, "alone"), *events(lines, "of nobody")]:
        assert "request_id" not in line


def test_session_alone_says_its_request(lines: list[dict[str, str]]) -> None:
    [line] = events(lines, "of a session")
    assert line["request_id"] == "r1"


def test_libraries_write_the_same_form(lines: list[dict[str, str]]) -> None:
    [line] = events(lines, "as libraries log: words")
    assert (line["level"], line["logger"]) == ("warning", "library")
    [warned] = [line for line in lines if "as libraries warn" in line["event"]]
    assert warned["logger"] == "py.warnings"


@pytest.mark.parametrize("event", ["of an error", "of a library's error"])
def test_error_is_within_its_line(lines: list[dict[str, str]], event: str) -> None:
    [line] = events(lines, event)
    assert "ZeroDivisionError" in line["exception"]


@pytest.mark.parametrize(
    ("session_id", "request_id"), [("r1", "r1"), ("r1-3", "r1"), ("a-b~1f", "a-b"), ("a-b~1f-2", "a-b"), ("", "")]
)
def test_request_of_a_session(session_id: str, request_id: str) -> None:
    """Whether its id was drawn or chosen, which may hold hyphens."""
    assert request_id_of(session_id) == request_id
