"""`docs/errors.md` says of every error what the code does: reason, class, gRPC and HTTP code; `docs/grpc.md` leaves no
method out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline.errors
from orchestrator.http_errors import problem_of
from paceline.client import ClientClosed, IncompleteAnswer, ServerUnavailable
from paceline.errors import InvalidRequest, PacelineError
from paceline.rpc import STATUS_CODES, status_code, to_status
from paceline.v1 import generation_service_pb2

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "errors.md"
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| `[A-Z_]+` \|", line)
]
KINDS: list[type[PacelineError]] = [
    kind for kind in vars(paceline.errors).values() if isinstance(kind, type) and issubclass(kind, PacelineError)
]
OF_THE_CLIENT: tuple[type[PacelineError], ...] = (ServerUnavailable, IncompleteAnswer, ClientClosed)


def example(kind: type[PacelineError]) -> PacelineError:
    return InvalidRequest("No.", parameter="n") if kind is InvalidRequest else kind("No.")


def test_every_error_has_its_row_and_every_row_its_error() -> None:
    """By reason and class, each once; so no two classes share a reason."""
    stated = [(row[0], row[1]) for row in ROWS]
    assert sorted(stated) == sorted((kind.reason, kind.__name__) for kind in (*KINDS, *OF_THE_CLIENT))
    assert len({reason for reason, _ in stated}) == len(stated)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.reason)
def test_codes_on_the_page_are_those_of_the_code(kind: type[PacelineError]) -> None:
    """gRPC's and HTTP's; and that trying again may help is said where the error itself says when."""
    (row,) = (row for row in ROWS if row[1] == kind.__name__)
    error = example(kind)
    assert row[2:4] == [status_code(error).name, str(problem_of(error).status)]
    if error.retry_after_s is not None and row[2] == "RESOURCE_EXHAUSTED":
        assert "after the pause" in row[6]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.reason)
def test_details_are_those_that_the_page_promises(kind: type[PacelineError]) -> None:
    """`ErrorInfo` always; a time to wait, and what was wrong, with the codes that call for them; each detail once."""
    status = to_status(example(kind))
    names = [detail.type_url.rpartition(".")[2] for detail in status.details]
    code = status_code(example(kind)).name
    assert names[0] == "ErrorInfo"
    assert ("RetryInfo" in names) == (code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"))
    assert ("BadRequest" in names) == (code == "INVALID_ARGUMENT")
    assert len(set(names)) == len(names)


def test_every_class_has_a_code_of_its_own_or_its_parents() -> None:
    """None falls through to INTERNAL but the root."""
    assert [kind.__name__ for kind in KINDS if status_code(example(kind)).name == "INTERNAL"] == ["PacelineError"]
    assert set(STATUS_CODES) <= set(KINDS)


def test_every_method_stands_on_the_page_of_the_service() -> None:
    """`docs/grpc.md` lists them, each once."""
    listed = re.findall(r"^\| `(\w+)` \|", (DOCS / "grpc.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    service = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert sorted(listed) == sorted(method.name for method in service.methods)
