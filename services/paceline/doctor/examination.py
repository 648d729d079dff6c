"""One examination of one deployment: look, judge, and look further where there is something to be seen.

It asks what any caller may ask, and for two answers of a few tokens. Nothing it does changes the deployment.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from paceline.client import GenerationClient
from paceline.client.connection import Connection, require_private
from paceline.doctor.access_checks import (
    TOKEN,
    TOKENS_FILE,
    check_exposure,
    check_service_exposure,
    check_token,
    check_tokens_file,
)
from paceline.doctor.answer_checks import DRAFT_LENGTH, check_answers, check_distance, check_model, check_refusal
from paceline.doctor.calls import look_at_model_service, look_at_server
from paceline.doctor.connection_checks import TLS, check_own_certificate, check_port, check_tls
from paceline.doctor.findings import Finding, Outcome, failed, has_failed, skipped
from paceline.doctor.http_checks import check_acceptance, check_http
from paceline.doctor.looks import AnswerLook, OpenLook, ServiceLook
from paceline.doctor.pool_checks import (
    check_drafters,
    check_memory,
    check_services,
    check_targets,
    check_tokenizers,
    has_target,
)
from paceline.doctor.ports import is_open, look_at_port, own_addresses, split
from paceline.doctor.server_checks import (
    CLOCK,
    SERVER,
    VERSION,
    check_clock,
    check_round_trip,
    check_server,
    check_version,
)
from paceline.doctor.timing import quickest
from paceline.doctor.web import look_at_url
from paceline.errors import InvalidRequest, PacelineError, StartupFailed, Unauthenticated
from paceline.exposure import is_loopback
from paceline.generation import (
    CompletionBuilder,
    Delta,
    DeploymentStatus,
    GenerationRequest,
    Schedule,
    ServedModel,
    SpeculationOptions,
    StopConditions,
)
from paceline.tls import ClientTls, expires_unix_s
from paceline.tokens import read_tokens
from paceline.types import SamplingParams
from paceline.version import installed_version

_ANSWER_TOKENS = 24
_PROMPT = (1, 2, 3) * 4  # repeats itself, so that drafting by repetition has something to offer too
_ANSWER_PATIENCE = 6  # times the patience for one question
_NEAR_S = 1.0  # who was not named and is not there within it is not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Where a deployment is, and how it is reached."""

    endpoint: str  # HOST:PORT of the orchestrator
    http_url: str | None = None  # of the HTTP API (`web.checked_url`); None: it is not looked at
    targets: tuple[str, ...] = ()  # HOST:PORT; besides those that the orchestrator names
    drafters: tuple[str, ...] = ()
    model: str = ""  # that must be served; "": any
    token: str | None = field(default=None, repr=False)
    tokens_file: Path | None = None  # of the orchestrator, where it is on this machine
    tls: ClientTls | None = None  # to the orchestrator; None: in plaintext
    services_tls: ClientTls | None = None  # to targets and drafters
    trust_network: bool = False  # nobody listens on the way, and no stranger reaches the services


def _ignore(finding: Finding) -> None:
    return None


class Examination:
    """Made for one `run`."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        on_finding: Callable[[Finding], None] = _ignore,
        timeout_s: float = 5.0,
        asks_for_answers: bool = True,
        version: str | None = None,
        clock: Callable[[], float] = time.time,
        addresses: Callable[[], Sequence[str]] = own_addresses,
    ) -> None:
        """`on_finding` hears of each as soon as it is made; `timeout_s` is the patience for one question.

        `version` is this client's; `clock` and `addresses` are this machine's.
        """
        self._deployment, self._on_finding = deployment, on_finding
        self._timeout_s, self._asks_for_answers = timeout_s, asks_for_answers
        self._version = installed_version() if version is None else version
        self._clock, self._addresses = clock, addresses
        self._findings: list[Finding] = []
        self._status: DeploymentStatus | None = None
        self._models: tuple[ServedModel, ...] = ()

    async def run(self) -> list[Finding]:
        """All findings; raises `InvalidRequest` for an endpoint that is none."""
        Connection(self._deployment.endpoint)
        if not self._look_at_own_files():
            return self._findings  # nobody can be asked with these
        if await self._find_way():
            await self._ask_server()
        else:
            self._note([skipped(SERVER, "Not asked, for there is no way to it.")])
        await self._ask_services()
        await self._ask_web()
        return self._findings

    def _note(self, findings: Iterable[Finding]) -> bool:
        """Whether none of them has failed."""
        made = list(findings)
        for finding in made:
            self._findings.append(finding)
            self._on_finding(finding)
        return not has_failed(made)

    def _now(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self._clock(), dt.UTC)

    # -----------------------------------------------------------------------------------------------------------------
    # This machine

    def _look_at_own_files(self) -> bool:
        """Whether the certificates here can be used, if there are any."""
        asked, can_be_used = self._deployment, True
        if asked.tokens_file is not None:
            self._note(self._tokens(asked.tokens_file))
        for tls in (asked.tls, asked.services_tls):
            if tls is not None:
                can_be_used = self._note(self._own_certificate(tls)) and can_be_used
        return can_be_used

    def _tokens(self, path: Path) -> Iterator[Finding]:
        try:
            file = read_tokens(path)
        except StartupFailed as error:
            yield failed(TOKENS_FILE, error.message, "Make one by `paceline token new`, or correct --tokens-file.")
            return
        yield from check_tokens_file(
            path, file, mode=path.stat().st_mode, token=self._deployment.token, now=self._now()
        )

    def _own_certificate(self, tls: ClientTls) -> Iterator[Finding]:
        try:
            tls.read()
        except StartupFailed as error:
            yield failed(TLS, error.message, "Name files that can be used by the --tls and --services-tls options.")
            return
        if tls.cert is not None:
            yield check_own_certificate(dt.datetime.fromtimestamp(expires_unix_s(tls.cert), dt.UTC), now=self._now())

    # -----------------------------------------------------------------------------------------------------------------
    # The orchestrator

    async def _find_way(self) -> bool:
        asked = self._deployment
        look = await look_at_port(asked.endpoint, asked.tls, timeout_s=self._timeout_s)
        if not self._note([check_port(look)]):
            return False
        is_asked_for = asked.tls is not None
        return self._note(check_tls(look, is_asked_for=is_asked_for, is_trusted=asked.trust_network, now=self._now()))

    async def _ask_server(self) -> None:
        asked = self._deployment
        try:
            client = self._client(asked.endpoint, asked.tls, token=asked.token)
        except InvalidRequest as error:
            self._note([failed(TOKEN, error.message, "Reach the server over TLS (--tls), or add --trust-network.")])
            return
        look = await look_at_server(Connection(asked.endpoint, tls=asked.tls), timeout_s=self._timeout_s)
        self._note(check_server(look, endpoint=asked.endpoint))
        if look.answers:
            async with client:
                await self._ask_as_caller(client)

    def _client(self, address: str, tls: ClientTls | None, *, token: str | None) -> GenerationClient:
        trust = self._deployment.trust_network
        # A fault is to be seen, not got over.
        return GenerationClient(address, token=token, tls=tls, trust_network=trust, max_resumptions=0)

    async def _ask_as_caller(self, client: GenerationClient) -> None:
        """All that whoever is let in can learn."""
        is_token_shown = self._deployment.token is not None
        try:
            self._status = status = await client.pool_status(timeout_s=self._timeout_s)
        except Unauthenticated:
            self._note([check_token(is_shown=is_token_shown, is_refused=True)])
            return
        except PacelineError as error:
            self._note([_untold(error)])
            return
        self._note([check_token(is_shown=is_token_shown, is_refused=False)])
        self._note([check_exposure(await self._ask_as_stranger(), is_trusted=self._deployment.trust_network)])
        await self._ask_who(client, status)
        self._note(check_targets(status))
        self._note(check_drafters(status))
        if has_target(status):
            await self._ask_for_answers(client)
        try:
            self._note(check_memory(status, await client.pool_status(timeout_s=self._timeout_s)))
        except PacelineError as error:
            self._note([_untold(error)])

    async def _ask_who(self, client: GenerationClient, status: DeploymentStatus) -> None:
        try:
            timed = await quickest(lambda: client.server_info(timeout_s=self._timeout_s), clock=self._clock)
        except PacelineError as error:
            self._note(skipped(name, f"The orchestrator does not say: {error.message}") for name in (VERSION, CLOCK))
            return
        connected = {
            f"the {pool.name} at {replica.address}": replica.version
            for pool in status.pools
            for replica in pool.replicas
            if replica.is_connected
        }
        self._note(check_version(self._version, timed.reply.version, connected))
        self._note(
            [
                check_clock("The orchestrator", timed.clock(timed.reply.clock_unix_ms), has_deadlines=True),
                check_round_trip(timed.round_trip_s),
            ]
        )

    async def _ask_as_stranger(self) -> OpenLook:
        """Without token and certificate, at an address that others can reach too."""
        endpoint, tls = self._deployment.endpoint, self._deployment.tls
        address = await self._address_beyond(endpoint)
        if not address:
            return OpenLook(is_anonymous_answered=False)
        stranger = None if tls is None else ClientTls(ca=tls.ca, server_name=tls.server_name or split(endpoint)[0])
        try:
            async with self._client(address, stranger, token=None) as client:
                await client.pool_status(timeout_s=self._timeout_s)
        except PacelineError:
            return OpenLook(is_anonymous_answered=False, address=address)
        return OpenLook(is_anonymous_answered=True, address=address)

    async def _address_beyond(self, address: str) -> str:
        """Where others reach what is reached at that address from here; empty if nowhere."""
        host, port = split(address)
        for beyond in self._addresses() if is_loopback(host) else [host]:
            candidate = f"[{beyond}]:{port}" if ":" in beyond else f"{beyond}:{port}"
            if await is_open(candidate, timeout_s=_NEAR_S):
                return candidate
        return ""

    # -----------------------------------------------------------------------------------------------------------------
    # Answers

    async def _ask_for_answers(self, client: GenerationClient) -> None:
        wanted = self._deployment.model
        try:
            self._models = await client.list_models(timeout_s=self._timeout_s)
            if not self._note(check_model(self._models, wanted=wanted)) or not self._asks_for_answers:
                return
            model = next(each for each in self._models if wanted in ("", each.name))
            plain = await self._answer(client, model, Schedule.PLAIN)
            drafted = await self._answer(client, model, Schedule.SEQUENTIAL)
            traced = await client.round_trace(request_id=drafted.request_id, timeout_s=self._timeout_s)
        except PacelineError as error:
            self._note([check_refusal(error)])
            return
        self._note(check_answers(plain, drafted, model))
        self._note([check_distance(drafted, traced.records, model.drafter)])

    async def _answer(self, client: GenerationClient, model: ServedModel, schedule: Schedule) -> AnswerLook:
        """A short one, at temperature 0; sequential, every draft is waited for."""
        request = GenerationRequest(
            token_ids=tuple(token_id % max(1, model.target.vocab_size) for token_id in _PROMPT),
            sampling=SamplingParams(temperature=0.0),
            stopping=StopConditions(max_tokens=_ANSWER_TOKENS, ignore_eos=True),
            speculation=SpeculationOptions(schedule=schedule, draft_length=DRAFT_LENGTH),
            model=model.name,
        )
        builder, began_s, first_token_s = CompletionBuilder(), time.perf_counter(), None
        async with aclosing(client.generate(request, timeout_s=_ANSWER_PATIENCE * self._timeout_s)) as events:
            async for event in events:
                builder.add(event)
                if first_token_s is None and isinstance(event, Delta):
                    first_token_s = time.perf_counter() - began_s
        answer = builder.build()
        return AnswerLook(
            request_id=answer.request_id,
            token_ids=answer.token_ids,
            first_token_s=first_token_s or 0.0,
            usage=answer.speculation,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Model services, and HTTP

    async def _ask_services(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask_service(look)) for look in self._known_services()]
        looks = [task.result() for task in tasks]
        self._note(check_services(looks))
        for look in looks:
            clock = check_clock(look.title, look.clock, has_deadlines=False)
            self._note([clock] if clock.outcome is Outcome.WARNING else [])
            self._note(check_service_exposure(look, is_trusted=self._deployment.trust_network))
        self._note(check_tokenizers(looks))

    def _known_services(self) -> Iterator[ServiceLook]:
        """Those that were named, and those that the orchestrator knows and this machine may reach; each once."""
        named = {"target": self._deployment.targets, "drafter": self._deployment.drafters}
        for kind, addresses in named.items():
            for address in dict.fromkeys(addresses):
                yield ServiceLook(kind=kind, address=address, is_named=True)
        is_here = is_loopback(split(self._deployment.endpoint)[0])
        for pool in self._status.pools if self._status else ():
            for replica in pool.replicas:
                host, _, port = replica.address.rpartition(":")
                # A target in the orchestrator's own process has no port, and another machine's loopback is not ours.
                if (
                    port.isdecimal()
                    and (is_here or not is_loopback(host))
                    and replica.address not in named.get(pool.name, ())
                ):
                    yield ServiceLook(kind=pool.name, address=replica.address, is_named=False)

    async def _ask_service(self, look: ServiceLook) -> ServiceLook:
        tls = self._deployment.services_tls
        if tls is not None:
            tls = replace(tls, server_name=f"{look.kind}.paceline")
        patience_s = self._timeout_s if look.is_named else min(_NEAR_S, self._timeout_s)
        port = await look_at_port(look.address, tls, timeout_s=patience_s)
        if port.trouble is not None:
            return replace(look, trouble=port.trouble)
        if port.is_tls and tls is None:
            return replace(look, wants_certificate=True)
        look = await look_at_model_service(look, tls, timeout_s=self._timeout_s, clock=self._clock)
        is_open_to_all = look.info is not None and not port.is_tls
        return replace(look, open_at=await self._address_beyond(look.address)) if is_open_to_all else look

    async def _ask_web(self) -> None:
        asked = self._deployment
        if asked.http_url is None:
            return
        parts = urlsplit(asked.http_url)
        if asked.token is not None and parts.scheme == "http":
            try:
                require_private(parts.hostname or "", trust_network=asked.trust_network)
            except InvalidRequest as error:
                self._note([failed(TOKEN, error.message, "Ask over https, or add --trust-network.")])
                return
        look = await look_at_url(asked.http_url, token=asked.token, tls=asked.tls, timeout_s=self._timeout_s)
        if self._note(check_http(look, served=[model.name for model in self._models])):
            self._note(check_acceptance(look))


def _untold(error: PacelineError) -> Finding:
    return failed(
        SERVER,
        f"The orchestrator does not say how its pools are: {error.message} [{error.reason}]",
        f"Look up {error.reason} in docs/errors.md, and look into the orchestrator's log.",
    )
