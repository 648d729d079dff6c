"""The configuration of an application on Ray where no file says otherwise: one machine, no GPU, nothing to download.

The same as `deploy/serve/laptop.yaml`, which an installed package does not carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Service = Mapping[str, Any]
"""Settings of one service."""

_LOOPBACK = "127.0.0.1"
_NOTHING: Service = {}
_ONE_REPLICA = {"min": 1, "max": 1}


def laptop_configuration(
    *,
    grpc_port: int = 9000,
    http_port: int = 8000,
    target: Service = _NOTHING,
    drafter: Service = _NOTHING,
    orchestrator: Service = _NOTHING,
) -> dict[str, Any]:
    """What such a file would hold; `target`, `drafter` and `orchestrator` are settings that go before the usual ones."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": _LOOPBACK, "port": http_port},
        "grpc_options": {"port": grpc_port},
        "applications": [
            {
                "import_path": "orchestrator.app:build",
                "args": {
                    "target": {
                        "service": {
                            "host": _LOOPBACK,
                            "model": "smollm2",
                            "device": "cpu",
                            "max_sessions": 16,
                            **target,
                        },
                        "num_cpus": 1,
                        "labels": {},
                        "replicas": _ONE_REPLICA,
                        "drain_s": 20,
                    },
                    "drafter": {
                        "service": {"host": _LOOPBACK, "method": "ngram", "max_sessions": 64, **drafter},
                        "num_cpus": 0.1,
                        "labels": {},
                        "replicas": _ONE_REPLICA,
                        "drain_s": 5,
                    },
                    "orchestrator": {
                        "service": {"rule": "coupled", "schedule": "pipelined", **orchestrator},
                        "num_cpus": 0.1,
                        "replicas": _ONE_REPLICA,
                        "drain_s": 20,
                    },
                },
            }
        ],
    }
