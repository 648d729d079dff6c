"""The pools as their orchestrator sees them: targets, drafters, whether their tokens mean the same, memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.doctor.findings import Finding, failed, ok, skipped, warning
from paceline.doctor.looks import ServiceLook
from paceline.generation import DeploymentStatus, PoolStatus, ReplicaStatus

TARGETS, DRAFTERS, TOKENIZERS, MEMORY, SERVICES = "targets", "drafters", "tokenizers", "memory", "model service"

KV_PRESSURE = 0.9
"""Share of the memory for keys and values beyond which new answers may soon be refused."""

_FINGERPRINT_LENGTH = 16  # characters, as services write them


def pool_named(status: DeploymentStatus, name: str) -> PoolStatus | None:
    return next((pool for pool in status.pools if pool.name == name), None)


def has_target(status: DeploymentStatus) -> bool:
    """Whether anything can be answered."""
    pool = pool_named(status, "target")
    return pool is not None and _count_used(pool) > 0


def check_targets(status: DeploymentStatus) -> Iterator[Finding]:
    """Whether there is one, and what is the matter with each that is not used."""
    pool = pool_named(status, "target") or PoolStatus(name="target", replicas=())
    if _count_used(pool) == 0:
        yield failed(
            TARGETS,
            f"No target is connected{_of_those(pool)}, so nothing can be answered.",
            "Start one with `python -m target_service`, and name it to the orchestrator by --target.",
        )
    yield from _each(TARGETS, pool)
    yield from _whole(TARGETS, pool)


def check_drafters(status: DeploymentStatus) -> Iterator[Finding]:
    """The same for drafters, without which answers only take longer."""
    pool = pool_named(status, "drafter")
    if pool is None:
        yield ok(DRAFTERS, "None is configured: every answer is decoded plainly.")
        return
    if not pool.replicas and pool.desired_replicas == 0:
        yield ok(DRAFTERS, "None is wanted now.")
        return
    if _count_used(pool) == 0 and not any(replica.refusal for replica in pool.replicas):
        yield warning(
            DRAFTERS,
            f"A drafter is configured and none is connected{_of_those(pool)}: answers are decoded without it.",
            "Start one with `python -m drafter_service`, or start the orchestrator without --drafter.",
        )
    yield from _each(DRAFTERS, pool)
    yield from _whole(DRAFTERS, pool)


def _count_used(pool: PoolStatus) -> int:
    return sum(replica.is_connected for replica in pool.replicas)


def _of_those(pool: PoolStatus) -> str:
    addresses = ", ".join(replica.address for replica in pool.replicas)
    return f" (known: {addresses})" if addresses else ""


def _each(name: str, pool: PoolStatus) -> Iterator[Finding]:
    for replica in pool.replicas:
        title = f"The {pool.name} at {replica.address}"
        if replica.refusal:
            # The orchestrator has said already what to do.
            yield failed(name, f"{title} answers and is refused by the orchestrator: {replica.refusal}", _FIT)
        elif replica.is_draining and replica.is_connected:
            yield warning(
                name,
                f"{title} is about to stop and takes no new sessions.",
                "Wait for the one that takes its place; if none comes, start one.",
            )
        elif not replica.is_connected and _count_used(pool):
            yield warning(
                name,
                f"{title} is known and not connected.",
                f"Start it again, look into its log, or take its address out of --{pool.name}.",
            )
        elif _is_full(replica):
            yield warning(
                name,
                f"{title} is full: it holds {replica.sessions} sessions of {replica.max_sessions}.",
                f"Add a {pool.name}, or raise its --max-sessions.",
            )


_FIT = "Do what the orchestrator says: a drafter needs the target's tokenizer, all targets the same model."


def _whole(name: str, pool: PoolStatus) -> Iterator[Finding]:
    used = _count_used(pool)
    if pool.desired_replicas is not None and used < pool.desired_replicas:
        yield warning(
            name,
            f"{used} of {pool.desired_replicas} {pool.name}s that are wanted are connected.",
            "Wait if they have just been ordered; if they do not come, give Ray nodes with room for them.",
        )
    elif used == len(pool.replicas) > 0 and not any(map(_is_troubled, pool.replicas)):
        models = ", ".join(sorted({replica.model_id for replica in pool.replicas if replica.model_id}))
        yield ok(name, f"{used} connected: {models}." if models else f"{used} connected.")


def _is_troubled(replica: ReplicaStatus) -> bool:
    return bool(replica.refusal) or replica.is_draining or _is_full(replica)


def _is_full(replica: ReplicaStatus) -> bool:
    return 0 < replica.max_sessions <= replica.sessions


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def check_memory(before: DeploymentStatus, after: DeploymentStatus) -> Iterator[Finding]:
    """How full the memory for keys and values is, and whether sessions had to give theirs up between the two looks."""
    known = {replica.replica_id: replica for pool in before.pools for replica in pool.replicas}
    shares = []
    for pool in after.pools:
        for replica in pool.replicas:
            if not replica.is_connected or not replica.kv_capacity_tokens:
                continue
            share = replica.kv_used_tokens / replica.kv_capacity_tokens
            earlier = known.get(replica.replica_id)
            preempted = replica.preemptions - earlier.preemptions if earlier else 0
            if share > KV_PRESSURE or preempted > 0:
                yield _pressed(f"The {pool.name} at {replica.address}", share, preempted)
            else:
                shares.append(share)
    if shares:
        yield ok(MEMORY, f"At most {100 * max(shares):.0f} % of the keys and values that fit are held.")


def _pressed(title: str, share: float, preempted: int) -> Finding:
    lost = f", and {preempted} sessions had to give theirs up just now" if preempted else ""
    return warning(
        MEMORY,
        f"{title} has {100 * share:.0f} % of its memory for keys and values in use{lost}.",
        "Add a replica, give it more by --memory-fraction or --kv-budget-tokens, or let fewer in by --max-sessions.",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Model services by their own words


def check_services(looks: Sequence[ServiceLook]) -> Iterator[Finding]:
    """Those that were named must answer this machine; the others need to answer the orchestrator alone."""
    for look in looks:
        if look.is_named:
            yield _named_service(look)
    others = [look for look in looks if not look.is_named]
    answering = sum(look.info is not None for look in others)
    if answering:
        yield ok(SERVICES, f"{answering} of {len(others)} that the orchestrator knows answer this machine too.")
    elif others:
        yield skipped(SERVICES, f"{len(others)} that the orchestrator knows do not answer this machine, nor need to.")


def _named_service(look: ServiceLook) -> Finding:
    if look.info is not None:
        method = f" ({look.info.method})" if look.info.method else ""
        return ok(SERVICES, f"{look.title} answers: {look.info.model_id}{method}.")
    if look.wants_certificate:
        return failed(
            SERVICES,
            f"{look.title} wants a certificate of whoever asks.",
            "Show one whose name it lets in, by --services-tls-ca, --services-tls-cert and --services-tls-key.",
        )
    return failed(
        SERVICES,
        f"{look.title} does not answer this machine ({look.trouble}).",
        f"Start it with `python -m {look.kind}_service`, or correct --{look.kind}.",
    )


def check_tokenizers(looks: Sequence[ServiceLook]) -> Iterator[Finding]:
    """Whether token ids mean the same at all that answer; a method without a tokenizer takes any."""
    speaking = [look for look in looks if look.info is not None and look.info.tokenizer_sha256]
    targets = [look for look in speaking if look.kind == "target"]
    if not targets or len(speaking) < 2:
        return
    first = targets[0]
    others = [look for look in speaking if _fingerprint(look) != _fingerprint(first)]
    for look in others:
        yield failed(
            TOKENIZERS,
            f"{look.title} has the tokenizer {_fingerprint(look)}, and the target at {first.address} has "
            f"{_fingerprint(first)}: their ids mean other tokens.",
            "Start a drafter with the target's tokenizer, or that one with --use-heterogeneous-vocab "
            "--target-tokenizer NAME."
            if look.kind == "drafter"
            else "Start all targets with the same model.",
        )
    if not others:
        yield ok(TOKENIZERS, f"Targets and drafters have one tokenizer, {_fingerprint(first)}.")


def _fingerprint(look: ServiceLook) -> str:
    return look.info.tokenizer_sha256[:_FINGERPRINT_LENGTH] if look.info else ""
