"""Envoy ends TLS, asks clients for a certificate, and passes on our two services only."""

from __future__ import annotations

from typing import Any

from orchestrator.config import load_serve_file
from paceline.v1 import generation_service_pb2
from tests.deploy.files import DEPLOY, read_manifests, read_yaml

ENVOY: dict[str, Any] = read_yaml(DEPLOY / "envoy" / "envoy.yaml")["static_resources"]
DEPLOYMENT = next(each for each in read_manifests(DEPLOY / "envoy" / "deployment.yaml") if each["kind"] == "Deployment")
RAY_SERVICE = read_yaml(DEPLOY / "kuberay" / "base" / "rayservice.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]


def listener(name: str) -> dict[str, Any]:
    return next(each for each in ENVOY["listeners"] if each["name"] == name)


def routes(name: str) -> list[dict[str, Any]]:
    (chain,) = listener(name)["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    found = host["routes"]
    assert isinstance(found, list)
    return found


def port_of(name: str) -> int:
    port = listener(name)["address"]["socket_address"]["port_value"]
    assert isinstance(port, int)
    return port


def test_it_leads_to_the_ingress() -> None:
    """The name of KubeRay's service and the port of the Serve configuration, by HTTP/2."""
    cluster = next(each for each in ENVOY["clusters"] if each["name"] == "serve")
    ((endpoint,),) = [each["lb_endpoints"] for each in cluster["load_assignment"]["endpoints"]]
    assert endpoint["endpoint"]["address"]["socket_address"] == {
        "address": RAY_SERVICE["spec"]["serveService"]["metadata"]["name"],
        "port_value": load_serve_file(DEPLOY / "serve" / "production.yaml").grpc_options.port,
    }
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert "http2_protocol_options" in options["explicit_http_config"]


def test_only_our_services_are_reached() -> None:
    """The generation service and health; Serve's own services are not for callers."""
    generation = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    prefixes = {route["match"]["prefix"] for route in routes("grpc")}
    assert prefixes == {f"/{generation}/", "/grpc.health.v1.Health/"}


def test_no_answer_is_cut_short() -> None:
    """Envoy's own time limit, 15 s, is off for every route."""
    assert all(route["route"]["timeout"] == "0s" for route in routes("grpc"))


def test_every_route_leads_to_a_cluster() -> None:
    """None is misspelt."""
    clusters = {each["name"] for each in ENVOY["clusters"]}
    assert {route["route"]["cluster"] for name in ("grpc", "metrics") for route in routes(name)} == clusters


def test_clients_show_a_certificate() -> None:
    """The listener speaks TLS and refuses those without one: nothing behind it asks who calls."""
    (chain,) = listener("grpc")["filter_chains"]
    tls = chain["transport_socket"]["typed_config"]
    assert tls["require_client_certificate"] is True
    assert tls["common_tls_context"]["alpn_protocols"] == ["h2"]


def test_files_and_ports_are_where_the_pod_has_them() -> None:
    """Certificates lie in mounted secrets; container ports, probe and service fit the listeners."""
    (container,) = POD["containers"]
    mounts = tuple(mount["mountPath"] for mount in container["volumeMounts"])
    (chain,) = listener("grpc")["filter_chains"]
    context = chain["transport_socket"]["typed_config"]["common_tls_context"]
    (certificate,) = context["tls_certificates"]
    for file in (
        certificate["certificate_chain"],
        certificate["private_key"],
        context["validation_context"]["trusted_ca"],
    ):
        assert file["filename"].startswith(mounts)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc-tls": port_of("grpc"), "metrics": port_of("metrics")}
    (service,) = read_manifests(DEPLOY / "envoy" / "service.yaml")
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    probe = container["readinessProbe"]["httpGet"]
    assert probe["port"] in ports
    assert probe["path"] in {route["match"]["path"] for route in routes("metrics")}


def test_the_policy_opens_the_ports_that_are_listened_on() -> None:
    """And lets Envoy reach the ingress."""
    (policy,) = read_manifests(DEPLOY / "envoy" / "networkpolicy.yaml")
    opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert opened == [port_of("grpc"), port_of("metrics")]
    ingress = load_serve_file(DEPLOY / "serve" / "production.yaml").grpc_options.port
    assert ingress in [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]


def test_a_pod_outlives_the_answers_it_passes_on() -> None:
    """Before it stops it waits as long as a draining orchestrator may take."""
    pools = load_serve_file(DEPLOY / "serve" / "production.yaml").application.pools
    (container,) = POD["containers"]
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pools["Orchestrator"].drain_s <= waits_s < POD["terminationGracePeriodSeconds"]
