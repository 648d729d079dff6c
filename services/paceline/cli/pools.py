"""The state of a deployment as a person reads it: a block for each pool, a row for each replica, a line in short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.cli.show import counted, percent
from paceline.client import DeploymentStatus, OrchestratorStatus, PoolStatus, ReplicaStatus

_DASH = Text("-", "dim")
_ID_LENGTH = 8  # characters that tell replicas apart in a list
_NODE_LENGTH = 6


class ReplicaState(StrEnum):
    """What a person should know of a replica first."""

    CONNECTED = "connected"
    DRAINING = "draining"  # takes no new sessions and will stop soon
    STARTING = "starting"  # the orchestrator has not talked to it yet
    LOST = "lost"  # it has, and cannot any more

    @classmethod
    def of(cls, replica: ReplicaStatus) -> ReplicaState:
        if replica.is_draining:
            return cls.DRAINING
        if replica.is_connected:
            return cls.CONNECTED
        return cls.LOST if replica.model_id else cls.STARTING


# Told apart without colours too.
_MARKS: Mapping[ReplicaState, tuple[str, str]] = {
    ReplicaState.CONNECTED: ("●", "green"),
    ReplicaState.DRAINING: ("◐", "yellow"),
    ReplicaState.STARTING: ("◌", "cyan"),
    ReplicaState.LOST: ("○", "red"),
}

# ---------------------------------------------------------------------------------------------------------------------
# In words


def count_in_words(pool: PoolStatus) -> str:
    """How many replicas run and are wanted, and how many are in another state."""
    states = [ReplicaState.of(replica) for replica in pool.replicas]
    words = [f"{states.count(ReplicaState.CONNECTED)} running"]
    if pool.desired_replicas is not None:
        words.append(f"{pool.desired_replicas} wanted")
    others = (ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.LOST)
    words += [f"{states.count(state)} {state}" for state in others if state in states]
    return ", ".join(words)


def in_one_line(status: DeploymentStatus) -> str:
    """All of it in short, for logs."""
    pools = [f"{pool.name} {count_in_words(pool)}, {_sessions_in_words(pool)}" for pool in status.pools]
    return " · ".join([*pools, _orchestrator_in_words(status.orchestrator)])


def _sessions_in_words(pool: PoolStatus) -> str:
    return counted(sum(replica.sessions for replica in pool.replicas), "session")


def _orchestrator_in_words(orchestrator: OrchestratorStatus) -> str:
    most = f" of {orchestrator.max_answers}" if orchestrator.max_answers else ""
    words = f"{orchestrator.running_answers}{most} answers running"
    if orchestrator.waiting_requests:
        words += f", {counted(orchestrator.waiting_requests, 'request')} waiting"
    if orchestrator.stall_fraction is not None:
        words += f", {percent(orchestrator.stall_fraction)} of their time waiting for drafts"
    return words


# ---------------------------------------------------------------------------------------------------------------------
# As tables


def status_view(status: DeploymentStatus, *, width: int) -> RenderableType:
    """All pools and the orchestrator that answered; fits into 80 columns, and uses more if `width` has them."""
    layout = _Layout.of(status, width=width)
    blocks: list[RenderableType] = []
    for pool in status.pools:
        blocks.append(_heading(pool))
        if pool.replicas:
            blocks.append(_replica_table(pool.replicas, layout))
        blocks.append("")
    blocks.append(_titled("orchestrator", _orchestrator_in_words(status.orchestrator)))
    return Group(*blocks)


def _titled(name: str, words: str) -> Text:
    return Text.assemble((f"{name:<14}", "bold"), words, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What is shown of a replica, and the width of each column in characters, the same for every pool.

    Columns that would say nothing are left out: ids that are addresses, the node where there is only one.
    """

    columns: Mapping[str, int]
    bar_width: int
    gap: int

    @classmethod
    def of(cls, status: DeploymentStatus, *, width: int) -> _Layout:
        """The roomiest that fits into the width."""
        replicas = [replica for pool in status.pools for replica in pool.replicas]
        layouts = [cls(_columns(replicas, bar_width=bar_width), bar_width, gap) for bar_width, gap in _ROOM]
        return next((layout for layout in layouts if layout.width <= width), layouts[-1])

    @property
    def width(self) -> int:
        return sum(self.columns.values()) + self.gap * (len(self.columns) - 1)


_ROOM = ((10, 2), (6, 2), (6, 1), (0, 1))
"""Width of the bar of KV memory, and characters between two columns: from roomy to tight."""


def _columns(replicas: Sequence[ReplicaStatus], *, bar_width: int) -> dict[str, int]:
    has_ids = any(replica.replica_id != replica.address for replica in replicas)
    has_nodes = len({replica.node_id for replica in replicas}) > 1
    columns = {
        **({"replica": _ID_LENGTH} if has_ids else {}),
        **({"node": _NODE_LENGTH} if has_nodes else {}),
        "address": max((len(replica.address) for replica in replicas), default=0),
        "sessions": max((len(_sessions(replica)) for replica in replicas), default=0),
        "queued": 0,
        "KV used": bar_width + 6,
        "accepted": 0,
        "state": 2 + max(len(state) for state in ReplicaState),
    }
    return {name: max(len(name), cells) for name, cells in columns.items()}


_RIGHT_ALIGNED = {"sessions", "queued", "KV used", "accepted"}


def _heading(pool: PoolStatus) -> Text:
    models = sorted({replica.model_id for replica in pool.replicas if replica.model_id})
    heading = _titled(pool.name, count_in_words(pool))
    return heading.append("  " + ", ".join(models), "dim") if models else heading


def _replica_table(replicas: Sequence[ReplicaStatus], layout: _Layout) -> Table:
    table = Table(box=None, padding=(0, layout.gap, 0, 0), pad_edge=False, header_style="dim")
    for name, cells in layout.columns.items():
        table.add_column(name, width=cells, justify="right" if name in _RIGHT_ALIGNED else "left", overflow="fold")
    for replica in sorted(replicas, key=lambda replica: (replica.node_id, replica.replica_id)):
        facts = dict(_facts(replica, layout))
        # What stands there of a replica that does not answer is old.
        is_current = replica.is_connected or replica.is_draining
        table.add_row(*(facts[name] for name in layout.columns), style="" if is_current else "dim")
    return table


def _facts(replica: ReplicaStatus, layout: _Layout) -> Iterator[tuple[str, str | Text]]:
    yield "replica", replica.replica_id[:_ID_LENGTH]
    yield "node", replica.node_id[:_NODE_LENGTH] or _DASH
    yield "address", replica.address
    yield "sessions", _sessions(replica)
    yield "queued", str(replica.queued)
    yield "KV used", _kv_used(replica, layout.bar_width)
    yield "accepted", _DASH if replica.acceptance_rate is None else percent(replica.acceptance_rate)
    state = ReplicaState.of(replica)
    mark, style = _MARKS[state]
    yield "state", Text(f"{mark} {state}", style)


def _sessions(replica: ReplicaStatus) -> str:
    return f"{replica.sessions}/{replica.max_sessions}" if replica.max_sessions else str(replica.sessions)


def _kv_used(replica: ReplicaStatus, bar_width: int) -> Text:
    """A bar and a percentage; for a cache without a known bound the tokens in it."""
    if not replica.kv_capacity_tokens:
        return Text(counted(replica.kv_used_tokens, "token")) if replica.kv_used_tokens else _DASH
    share = min(1.0, replica.kv_used_tokens / replica.kv_capacity_tokens)
    # What is in use is seen, however little.
    filled = max(1 if share else 0, round(share * bar_width)) if bar_width else 0
    return Text.assemble(("━" * filled, "cyan"), ("─" * (bar_width - filled), "dim"), f" {percent(share):>5}")
