"""The configuration of a Paceline application on Ray Serve, as one validated value.

One YAML file serves `serve deploy` and `paceline serve` alike: Serve's own keys around the arguments of our builder
(`orchestrator.app:build`). Serve ignores keys that it does not know; we refuse them, and name the nearest valid one.
Knows nothing of Ray.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from orchestrator.scaling import ScalingRules
from paceline.errors import PacelineError
from paceline.settings import DrafterSettings, OrchestratorSettings, ServiceSettings, TargetSettings

IMPORT_PATH = "orchestrator.app:build"
POLICY_FUNCTION = "orchestrator.app:PoolPolicy"
SERVICER_FUNCTIONS = (
    "paceline.v1.generation_service_pb2_grpc.add_GenerationServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
TARGET_LABELS = {"paceline.pool": "target"}
DRAFTER_LABELS = {"paceline.pool": "drafter"}


# Of node labels and their values.
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")


class ConfigInvalid(PacelineError):
    """The configuration holds something that cannot be honoured."""

    reason = "CONFIG_INVALID"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ---------------------------------------------------------------------------------------------------------------------
# Pools


class Replicas(_Section):
    """How many replicas a pool has, and what its autoscaler aims at."""

    min: int = Field(default=1, ge=0, strict=True)
    max: int = Field(default=1, ge=1, strict=True)
    initial: int | None = Field(default=None, ge=0, strict=True)
    sessions_per_replica: PositiveFloat = 16  # leased sessions that one replica is meant to carry
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    look_back_period_s: PositiveFloat = 15.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        if self.initial is not None and not self.min <= self.initial <= self.max:
            raise ValueError(f"initial {self.initial} must lie between min {self.min} and max {self.max}")
        return self

    @property
    def is_fixed(self) -> bool:
        return self.min == self.max


class Pool(_Section):
    """What the three pools have in common: hardware, counts, patience. `service` is checked as the service's settings."""

    # Decided by the placement, never by the file. `host` is not among them: left out, it is the address of the node.
    owned_settings: ClassVar[frozenset[str]] = frozenset({"port", "stop_with_parent", "metrics_port"})
    settings_type: ClassVar[type[ServiceSettings]]
    placeholders: ClassVar[Mapping[str, Any]] = {}  # settings that are only known once the replica runs

    service: dict[str, Any] = Field(default_factory=dict)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    accelerator_type: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)  # of the nodes this pool may run on
    max_replicas_per_node: int | None = Field(default=None, ge=1, le=100)
    environment: dict[str, str] = Field(default_factory=dict)  # variables of the replicas' processes
    replicas: Replicas = Replicas()
    drain_s: PositiveFloat = 60.0  # then a replica that is to go is killed
    health_check_period_s: PositiveFloat = 5.0
    health_check_timeout_s: PositiveFloat = 15.0

    @field_validator("labels", "prefers", check_fields=False)
    @classmethod
    def _labels_are_valid(cls, value: dict[str, str]) -> dict[str, str]:
        for text in (*value, *value.values()):
            if not _LABEL.fullmatch(text):
                raise ValueError(f"{text!r} is no label: letters, digits, dots, dashes and underscores, at most 63")
        return value

    @field_validator("num_gpus")
    @classmethod
    def _share_or_whole(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("a replica takes a share of one GPU, or whole ones")
        return value

    @model_validator(mode="after")
    def _can_carry_its_sessions(self) -> Self:
        aim, most = self.replicas.sessions_per_replica, self.settings().max_sessions
        if "sessions_per_replica" in self.replicas.model_fields_set and aim > most:
            raise ValueError(f"replicas.sessions_per_replica {aim:g} is more than service.max_sessions {most}")
        return self

    @field_validator("service")
    @classmethod
    def _service_is_valid(cls, value: dict[str, Any]) -> dict[str, Any]:
        owned = sorted(cls.owned_settings & value.keys())
        if owned:
            raise ValueError(f"{owned[0]} is decided by the placement; leave it out")
        try:
            cls.settings_type(**cls.placeholders, **value)
        except ValidationError as error:
            raise ValueError("; ".join(sentences(error, cls.settings_type))) from error
        return value

    def settings(self, **decided: Any) -> Any:
        """The service's settings, with what its replica decides."""
        return self.settings_type(**{**self.placeholders, **self.service, **decided})


def _never_none(replicas: Replicas) -> Replicas:
    if replicas.min < 1:
        raise ValueError("min must be at least 1: without one of these nothing answers")
    return replicas


class TargetPool(Pool):
    settings_type = TargetSettings
    replicas: Annotated[Replicas, AfterValidator(_never_none)] = Replicas()
    labels: dict[str, str] = Field(default_factory=lambda: dict(TARGET_LABELS))


class DrafterPool(Pool):
    settings_type = DrafterSettings
    labels: dict[str, str] = Field(default_factory=lambda: dict(DRAFTER_LABELS))


class OrchestratorPool(Pool):
    """Orchestrators prefer the nodes of `prefers`, so that the way to a target is short; they run anywhere."""

    settings_type = OrchestratorSettings
    owned_settings = Pool.owned_settings | {"host", "target", "drafter"}
    placeholders = {"target": "found by Serve"}
    replicas: Annotated[Replicas, AfterValidator(_never_none)] = Replicas()
    prefers: dict[str, str] = Field(default_factory=lambda: dict(TARGET_LABELS))


class Application(_Section):
    """The arguments of `orchestrator.app:build`."""

    target: TargetPool
    drafter: DrafterPool | None = None
    orchestrator: OrchestratorPool = OrchestratorPool()

    @property
    def pools(self) -> dict[str, Pool]:
        """By the name of their deployment."""
        named: dict[str, Pool | None] = {
            "Orchestrator": self.orchestrator,
            "Target": self.target,
            "Drafter": self.drafter,
        }
        return {name: pool for name, pool in named.items() if pool is not None}


def parse_application(args: Mapping[str, Any]) -> Application:
    """Raises `ConfigInvalid`, which names every key at fault."""
    return _validated(Application, args)


# ---------------------------------------------------------------------------------------------------------------------
# The file


class HttpOptions(_Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    request_timeout_s: float | None = None
    keep_alive_timeout_s: int | None = None


class GrpcOptions(_Section):
    port: int = Field(default=9000, ge=1, le=65535)
    grpc_servicer_functions: list[str] = Field(default_factory=lambda: list(SERVICER_FUNCTIONS))
    request_timeout_s: float | None = None
    enable_reflection: bool = False

    @field_validator("grpc_servicer_functions")
    @classmethod
    def _are_ours(cls, value: list[str]) -> list[str]:
        if set(value) != set(SERVICER_FUNCTIONS):
            raise ValueError(f"must be {' and '.join(SERVICER_FUNCTIONS)}, which the ingress serves; leave it out")
        return value


class ScalingPolicy(_Section):
    """One policy for the pools together, instead of one for each deployment."""

    policy_function: Literal["orchestrator.app:PoolPolicy"]
    policy_kwargs: dict[str, float] = Field(default_factory=dict)  # fields of `scaling.ScalingRules`

    @field_validator("policy_kwargs")
    @classmethod
    def _rules_are_valid(cls, value: dict[str, float]) -> dict[str, float]:
        names = [rule.name for rule in fields(ScalingRules)]
        for name in value:
            if name not in names:
                raise ValueError(_unknown(name, names))
        ScalingRules(**value)
        return value


class ServeApplication(_Section):
    name: str = Field(default="paceline", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    route_prefix: str = Field(default="/", pattern=r"^/")
    import_path: Literal["orchestrator.app:build"]
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    autoscaling_policy: ScalingPolicy | None = None
    args: Application


class ServeFile(_Section):
    """A Serve configuration with one application, ours."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "EveryNode"
    http_options: HttpOptions = HttpOptions()
    grpc_options: GrpcOptions = GrpcOptions()
    logging_config: dict[str, Any] | None = None
    controller_options: dict[str, Any] | None = None
    applications: list[ServeApplication] = Field(min_length=1, max_length=1)

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.grpc_options.port == self.http_options.port:
            raise ValueError(
                f"grpc_options.port and http_options.port are both {self.grpc_options.port}; they must differ"
            )
        return self

    @property
    def application(self) -> Application:
        return self.applications[0].args


def load_serve_file(path: Path) -> ServeFile:
    """Raises `ConfigInvalid` with a sentence that says what to change."""
    return parse_serve_file(read_yaml(path), origin=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises `ConfigInvalid`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read ({error.strerror}); name a configuration file.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: bytes that are no text, and days that there are not.
        raise ConfigInvalid(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigInvalid(f"{path} holds no configuration; deploy/serve has examples.")
    return content


def on_loopback(file: ServeFile) -> ServeFile:
    """The same with model replicas that this machine alone can reach, unless the file says where they listen."""
    application = file.application
    pools = {"target": application.target, "drafter": application.drafter}
    args = application.model_copy(
        update={
            name: pool.model_copy(update={"service": {"host": "127.0.0.1", **pool.service}})
            for name, pool in pools.items()
            if pool is not None
        }
    )
    return file.model_copy(update={"applications": [file.applications[0].model_copy(update={"args": args})]})


def parse_serve_file(content: Mapping[str, Any], *, origin: str = "The configuration") -> ServeFile:
    return _validated(ServeFile, content, origin=origin)


# ---------------------------------------------------------------------------------------------------------------------
# Errors in words


ModelT = TypeVar("ModelT", bound=BaseModel)


def _validated(model: type[ModelT], content: Mapping[str, Any], *, origin: str = "The configuration") -> ModelT:
    try:
        return model.model_validate(dict(content))
    except ValidationError as error:
        raise ConfigInvalid(f"{origin} cannot be used: {'; '.join(sentences(error, model))}.") from error


def sentences(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """One a fault: where it is, what is wrong, and for an unknown key the nearest valid name."""
    for problem in error.errors():
        location = problem["loc"]
        place = ".".join(str(part) for part in location)
        if problem["type"] != "extra_forbidden":
            yield f"{place}: {problem['msg'].removeprefix('Value error, ')}" if place else problem["msg"]
            continue
        yield _unknown(place, _fields_at(model, location[:-1]))


def _unknown(place: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(place.rpartition(".")[2], names, n=1, cutoff=0.0)
    return f"{place} is not known here" + (f"; did you mean {nearest[0]}?" if nearest else "")


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the section at that place."""
    section: type[BaseModel] = model
    for part in location:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        inner = _section_in(field.annotation) if field is not None else None
        if inner is None:
            return []
        section = inner
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The model within an annotation such as `DrafterPool | None` or `list[ServeApplication]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_in(inner)
        if found is not None:
            return found
    return None
