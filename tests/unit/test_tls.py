"""Certificates as files: read whole, or refused in a sentence that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from paceline.errors import StartupFailed
from paceline.tls import ClientTls, ServerTls
from tests.certificates import TARGET, Authority, Identity


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def server(identity: Identity) -> ServerTls:
    return ServerTls(cert=identity.cert, key=identity.key, client_ca=identity.ca)


def test_files_that_fit_are_read_whole(authority: Authority) -> None:
    """As PEM, byte for byte."""
    identity = authority.issue(TARGET)
    material = server(identity).read()
    assert material.cert == identity.cert.read_bytes()
    assert material.key == identity.key.read_bytes()
    assert material.ca == identity.ca.read_bytes()


def test_a_client_may_show_no_certificate(authority: Authority) -> None:
    """It then believes servers by the authority alone, or by those that gRPC comes with."""
    material = ClientTls(ca=authority.ca).read()
    assert (material.cert, material.key) == (None, None)
    assert material.ca is not None
    assert ClientTls().read().ca is None


def test_material_does_not_show_its_key(authority: Authority) -> None:
    """Neither in a log line nor in a traceback."""
    assert "PRIVATE" not in repr(server(authority.issue(TARGET)).read())


def _missing(identity: Identity) -> Path:
    identity.cert.unlink()
    return identity.cert


def _missing_key(identity: Identity) -> Path:
    identity.key.unlink()
    return identity.key


def _no_pem(identity: Identity) -> Path:
    identity.cert.write_text("certificate")
    return identity.cert


def _no_authority(identity: Identity) -> Path:
    identity.ca.write_text("authority")
    return identity.ca


def _no_key(identity: Identity) -> Path:
    identity.key.write_bytes(identity.cert.read_bytes())
    return identity.key


def _empty_key(identity: Identity) -> Path:
    identity.key.write_bytes(b"")
    return identity.key


def _encrypted_key(identity: Identity) -> Path:
    key = serialization.load_pem_private_key(identity.key.read_bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    encrypted = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    identity.key.write_bytes(encrypted)
    return identity.key


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_missing, "cannot be read"),
        (_missing_key, "cannot be read"),
        (_no_pem, "holds no certificate in PEM"),
        (_no_authority, "holds no authority's certificate in PEM"),
        (_no_key, "holds no private key"),
        (_empty_key, "holds no private key"),
        (_encrypted_key, "must not be encrypted"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(authority: Authority, spoil: Callable[[Identity], Path], why: str) -> None:
    """In a sentence that says what it should be; an encrypted key does not ask for a password."""
    identity = authority.issue(TARGET)
    spoiled = spoil(identity)
    with pytest.raises(StartupFailed, match=why) as caught:
        server(identity).read()
    assert str(spoiled) in caught.value.message


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    """Both files are named, for either may be the wrong one."""
    identity, other = authority.issue(TARGET), authority.issue(TARGET)
    with pytest.raises(StartupFailed, match="is not that of the certificate") as caught:
        ServerTls(cert=identity.cert, key=other.key).read()
    assert str(identity.cert) in caught.value.message
    assert str(other.key) in caught.value.message


def test_a_certificate_that_has_expired_is_refused(authority: Authority) -> None:
    """With the moment at which it did."""
    identity = authority.issue(TARGET, expires_in_s=-86_400)
    with pytest.raises(StartupFailed, match="has expired at"):
        server(identity).read()


def test_an_authority_that_has_expired_is_refused(authority: Authority) -> None:
    """It would be believed by nobody."""
    expired = authority.issue("authority", expires_in_s=-86_400)
    with pytest.raises(StartupFailed, match="has expired at"):
        ClientTls(ca=expired.cert).read()


def test_a_certificate_without_its_key_is_refused(authority: Authority) -> None:
    """They are of use together alone."""
    with pytest.raises(StartupFailed, match="go together"):
        ClientTls(cert=authority.issue(TARGET).cert).read()
