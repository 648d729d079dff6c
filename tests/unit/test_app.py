"""What Ray Serve is told of our deployments."""

from __future__ import annotations

from orchestrator.app import build


def test_serves_own_line_stays_empty() -> None:
    """Whoever is not answered waits in the orchestrator's line, which is bounded, fair and measured, or is refused by it:
    Serve lets in as many as may run and wait, and some to be refused, and asks for no more patience of its own."""
    application = build(
        {
            "target": {"service": {"model": "m"}},
            "orchestrator": {"service": {"max_sessions": 8, "max_queued_requests": 20}},
        }
    )
    orchestrator = application._bound_deployment
    assert orchestrator.max_ongoing_requests > 8 + 20 + 8
    assert orchestrator.max_queued_requests == -1


def test_other_pools_have_no_line() -> None:
    """Sessions are spread by their load, and one too many is refused at once."""
    application = build({"target": {"service": {"model": "m", "max_sessions": 4}}})
    (target,) = (bound for bound in application._bound_deployment.init_args if hasattr(bound, "_bound_deployment"))
    assert target._bound_deployment.max_ongoing_requests == 4
