"""Who is let in on Ray, where Serve's proxy stands between a caller and us: tokens before the application, certificates
between its services."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import grpc
import grpc.aio
import pytest

from paceline.client import ClientTls, GenerationClient, GenerationRequest, SpeculationOptions, StopConditions
from paceline.errors import Unauthenticated
from paceline.generation import ReplicaStatus
from paceline.rpc import open_channel
from paceline.tokens import new_token
from paceline.v1.drafter_service_pb2 import GetDrafterInfoRequest
from paceline.v1.drafter_service_pb2_grpc import DrafterServiceStub
from paceline.v1.target_service_pb2 import GetTargetInfoRequest
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from tests.certificates import DRAFTER, ORCHESTRATOR, TARGET
from tests.cluster.serving import Served

LIMIT_S = 60.0  # far above what a call takes


@pytest.mark.timeout(300)
async def test_only_a_right_token_is_answered(served: Served) -> None:
    """Over gRPC: none, another, and the right one. The answer has drafts in it, so both services let ours in."""
    endpoint = served.running().endpoint
    request = GenerationRequest(
        token_ids=(1, 2, 3),
        stopping=StopConditions(max_tokens=48, ignore_eos=True),
        speculation=SpeculationOptions(draft_length=4),
    )
    for token in (None, new_token()):
        async with GenerationClient(endpoint, token=token) as stranger:
            for call in (stranger.complete(request), stranger.pool_status(), stranger.list_models()):
                with pytest.raises(Unauthenticated):
                    await call
    async with served.client() as client, asyncio.timeout(LIMIT_S):
        # The first may be over before a drafter is there.
        while not (answer := await client.complete(request)).speculation.num_accepted_tokens:
            assert len(answer.token_ids) == 48


@pytest.mark.timeout(300)
def test_only_a_right_token_is_answered_over_http(served: Served) -> None:
    served.running()
    assert http_status(served, None) == http_status(served, new_token()) == 401
    assert http_status(served, served.token) == 200


def http_status(served: Served, token: str | None) -> int:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{served.http_url}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.timeout(300)
async def test_replicas_answer_orchestrators_alone(served: Served) -> None:
    """In plaintext nothing is answered; a certificate that the authority gave to somebody else is refused by its name; an
    orchestrator's is let in."""
    async with served.client() as client:
        pools = {pool.name: pool.replicas[0] for pool in (await client.pool_status()).pools}
    for service, replica in ((TARGET, pools["target"]), (DRAFTER, pools["drafter"])):
        assert await code_of_call(service, replica, None) is grpc.StatusCode.UNAVAILABLE
        for holder, code in (
            ("somebody.paceline", grpc.StatusCode.PERMISSION_DENIED),
            (ORCHESTRATOR, grpc.StatusCode.OK),
        ):
            ours = served.authority.issue(holder)
            tls = ClientTls(ca=ours.ca, cert=ours.cert, key=ours.key, server_name=service)
            assert await code_of_call(service, replica, tls) is code


async def code_of_call(service: str, replica: ReplicaStatus, tls: ClientTls | None) -> grpc.StatusCode:
    async with open_channel(replica.address, tls) as channel:
        try:
            if service == TARGET:
                await TargetServiceStub(channel).GetTargetInfo(GetTargetInfoRequest(), timeout=LIMIT_S)
            else:
                await DrafterServiceStub(channel).GetDrafterInfo(GetDrafterInfoRequest(), timeout=LIMIT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK
