"""What backend services import: a typed client of `GenerationService`, asynchronous and blocking.

Light on purpose: importing it loads gRPC and the generated code, but no torch, no Ray and no engine.

    async with GenerationClient("127.0.0.1:9000") as client:
        async for event in client.generate(GenerationRequest(text="Once upon a time")):
            ...

    with SyncGenerationClient("127.0.0.1:9000") as client:
        for event in client.generate(GenerationRequest(text="Once upon a time")):
            ...
"""

from paceline.client.asynchronous import (
    DEFAULT_RESUMPTIONS,
    DEFAULT_TIMEOUT_S,
    INFO_TIMEOUT_S,
    GenerationClient,
)
from paceline.client.failures import ClientClosed, ServerUnavailable, reported_error
from paceline.client.synchronous import SyncGenerationClient, complete
from paceline.generation import (
    ChatMessage,
    Completion,
    Delta,
    DeploymentStatus,
    Event,
    Finished,
    GenerationRequest,
    IncompleteAnswer,
    OrchestratorStatus,
    OutputOptions,
    PoolStatus,
    ReplicaStatus,
    Schedule,
    ServedModel,
    ServerInfo,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    StopConditions,
    Usage,
)
from paceline.rounds import RoundRecord, TracedRounds
from paceline.tls import ClientTls
from paceline.types import DraftOrigin, FinishReason, Origin, SamplingParams, TokenLogprobs, VerificationRule

__all__ = [
    "DEFAULT_RESUMPTIONS",
    "DEFAULT_TIMEOUT_S",
    "INFO_TIMEOUT_S",
    "ChatMessage",
    "ClientClosed",
    "ClientTls",
    "Completion",
    "Delta",
    "DeploymentStatus",
    "DraftOrigin",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationClient",
    "GenerationRequest",
    "IncompleteAnswer",
    "OrchestratorStatus",
    "Origin",
    "OutputOptions",
    "PoolStatus",
    "ReplicaStatus",
    "RoundRecord",
    "SamplingParams",
    "Schedule",
    "ServedModel",
    "ServerInfo",
    "ServerUnavailable",
    "SpeculationOptions",
    "SpeculationUsage",
    "Started",
    "StopConditions",
    "SyncGenerationClient",
    "TokenLogprobs",
    "TracedRounds",
    "Usage",
    "VerificationRule",
    "complete",
    "reported_error",
]
