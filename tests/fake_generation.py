"""A `GenerationService` without models: it records what it is asked and streams canned events over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_status import rpc_status

from paceline.errors import PacelineError
from paceline.rpc import to_status
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

DRAFT = pb.TOKEN_ORIGIN_DRAFT
CORRECTION = pb.TOKEN_ORIGIN_CORRECTION
BONUS = pb.TOKEN_ORIGIN_BONUS
PLAIN = pb.TOKEN_ORIGIN_PLAIN

ROUNDS: Sequence[Sequence[tuple[str, pb.TokenOrigin]]] = (
    (("The", PLAIN),),
    ((" sky", DRAFT), (" is", DRAFT), (" blue", BONUS)),
    ((" to", DRAFT), ("day", CORRECTION)),
)
TEXT = "The sky is blue today."
"""What the canned answer says: the pieces of its rounds, and a full stop held back until the end."""

FIRST_ID = 100
"""The id of the first token; the others count up from it."""
SEED = 2**64 - 1

POOL_STATUS = pb.GetPoolStatusResponse(
    pools=[
        pb.PoolStatus(
            name="target",
            desired_replicas=2,
            replicas=[
                pb.ReplicaStatus(
                    replica_id="target#1",
                    address="10.0.0.1:7001",
                    node_id="node-a",
                    model_id="fake-target",
                    sessions=3,
                    max_sessions=32,
                    queued=1,
                    kv_used_tokens=1200,
                    kv_capacity_tokens=40_000,
                    acceptance_rate=0.75,
                    is_connected=True,
                ),
                pb.ReplicaStatus(replica_id="target#2", address="10.0.0.2:7001", is_draining=True),
            ],
        ),
        pb.PoolStatus(name="drafter"),
    ],
    orchestrator=pb.OrchestratorStatus(running_answers=3, max_answers=256, stall_fraction=0.0),
)
"""What the canned deployment looks like: all fields set, and fields that are absent or zero."""

MODELS = pb.ListModelsResponse(
    models=[
        pb.ServedModel(
            name="fake-target",
            target=session_pb.ModelInfo(model_id="fake-target", vocab_size=1000, max_context=2048, dtype="float32"),
            drafter=session_pb.ModelInfo(model_id="ngram", method="ngram"),
            speculation=pb.SpeculationOptions(
                rule=session_pb.VERIFICATION_RULE_COUPLED, draft_length=4, schedule=pb.SCHEDULE_PIPELINED
            ),
            default_max_tokens=256,
            max_prompt_tokens=2047,
            max_choices=16,
        )
    ]
)
"""What is served, with all fields set."""

Answer = Callable[[pb.GenerateRequest], Iterator[pb.GenerateResponse]]


def canned_answer(request: pb.GenerateRequest, *, elapsed_s: float = 0.5) -> Iterator[pb.GenerateResponse]:
    """The whole canned answer, or what is missing behind `output_ids`; a request that names a seed gets it echoed.

    Choices say the same, an event of each in turn; their seeds count up. Log-probabilities are `canned_logprobs`.
    """
    seed = request.seed if request.HasField("seed") else SEED
    choices = range(request.n or 1)
    seeds = [(seed + choice) % 2**64 for choice in choices]
    request_id = request.request_id or "r1"
    yield pb.GenerateResponse(started=pb.Started(request_id=request_id, seed=seed, prompt_tokens=3, seeds=seeds))
    for events in zip(*(_canned_choice(request, choice, elapsed_s=elapsed_s) for choice in choices), strict=True):
        yield from events


def _canned_choice(request: pb.GenerateRequest, choice: int, *, elapsed_s: float) -> Iterator[pb.GenerateResponse]:
    next_id = FIRST_ID
    for tokens in ROUNDS:
        had_already = min(len(tokens), max(0, FIRST_ID + len(request.output_ids) - next_id))
        ids = range(next_id + had_already, next_id + len(tokens))
        next_id += len(tokens)
        pieces = [piece for piece, _ in tokens[had_already:]]
        origins = [origin for _, origin in tokens[had_already:]]
        if ids:
            delta = pb.Delta(text="".join(pieces), token_ids=ids, origins=origins, pieces=pieces, choice=choice)
            if request.HasField("logprobs"):
                delta.logprobs.extend([canned_logprobs(top=request.logprobs)] * len(ids))
            yield pb.GenerateResponse(delta=delta)
    ending = finished(
        elapsed_s=elapsed_s, schedule=request.speculation.schedule, resumed_tokens=len(request.output_ids)
    )
    ending.choice = choice
    yield pb.GenerateResponse(finished=ending)


def canned_logprobs(*, top: int) -> pb.TokenLogprobs:
    """-0.25, and tokens from id 0 on, each by 0.5 less probable than the one before."""
    return pb.TokenLogprobs(
        logprob=-0.25,
        top_ids=range(top),
        top_logprobs=[-0.5 * (rank + 1) for rank in range(top)],
        top_pieces=[f" t{rank}" for rank in range(top)],
    )


def finished(*, elapsed_s: float, schedule: pb.Schedule, resumed_tokens: int = 0) -> pb.Finished:
    speculation = pb.SpeculationUsage(
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=3,
        num_accepted_tokens_per_pos=[2, 1],
        num_draft_tokens_per_pos=[2, 2],
        acceptance_rate=0.75,
        mean_acceptance_length=2.5,
        per_token_acceptance=0.75,
        rounds=3,
        plain_rounds=1,
        target_busy_s=elapsed_s * 0.8,
        draft_wait_s=elapsed_s * 0.1,
        elapsed_s=elapsed_s,
        rule=session_pb.VERIFICATION_RULE_COUPLED,
        schedule=schedule or pb.SCHEDULE_PIPELINED,
    )
    return pb.Finished(
        finish_reason=pb.FINISH_REASON_STOP,
        text=".",
        usage=pb.Usage(prompt_tokens=3, completion_tokens=6),
        speculation=speculation,
        resumed_tokens=resumed_tokens,
    )


def prompt_of(request: pb.GenerateRequest) -> str:
    """What was asked: the text, or the last message."""
    return request.text or request.chat.messages[-1].content


class BareStatus(Exception):
    """Raised in an answer: the call ends with a status without details, as a proxy or a dying server gives it."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


class FakeGenerationService(GenerationServiceServicer):
    """Answers by `answer`; a `PacelineError` that it raises goes out as the rich status a real server would send."""

    def __init__(self, answer: Answer = canned_answer) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.deadlines_s: list[float] = []
        self.metadata: list[dict[str, str | bytes]] = []  # of every call, whatever its method
        self.cancelled: list[str] = []  # the ids that Cancel was called with
        self.ended = threading.Event()  # a call is over, whichever side ended it
        self.answer = answer

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining() or 0.0)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self.ended.set)
        try:
            yield from self.answer(request)
        except PacelineError as error:
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        except BareStatus as status:
            context.abort(status.code, "bare words")

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        self.cancelled.append(request.request_id)
        return pb.CancelResponse(was_running=request.request_id == "r1")

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        return MODELS

    def GetPoolStatus(  # noqa: N802
        self, request: pb.GetPoolStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetPoolStatusResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        return POOL_STATUS

    def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetServerInfoResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.GetServerInfoResponse(
            target=session_pb.ModelInfo(model_id="fake-target", vocab_size=1000, dtype="float32", eos_token_ids=[2]),
            drafter=session_pb.ModelInfo(model_id="ngram", method="ngram"),
            speculation=pb.SpeculationOptions(
                rule=session_pb.VERIFICATION_RULE_COUPLED, draft_length=4, schedule=pb.SCHEDULE_PIPELINED
            ),
        )


@contextmanager
def serving(
    service: GenerationServiceServicer, *, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """The HOST:PORT at which the service answers, over TLS with `credentials`, until the end of the block."""
    server = grpc.server(ThreadPoolExecutor(max_workers=16), options=[("grpc.so_reuseport", 0)])
    add_GenerationServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{port}"
    bound_port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{bound_port}"
    finally:
        server.stop(grace=None).wait()
