"""Ask a service for its health by the standard gRPC protocol: `python health.py HOST:PORT`.

Exits with 0 if the service at that address serves, with 1 if it drains, is not up, or does not answer in time. Part of
the image, for health checks that run inside a container.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def is_serving(address: str) -> bool:
    """Whether the server as a whole says SERVING within `TIMEOUT_S`."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
