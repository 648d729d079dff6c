"""TLS as the examination speaks it: with and without belief, so that what is not believed can be named."""

from __future__ import annotations

import ssl
from contextlib import suppress

from paceline.doctor.looks import Certificate, Distrust
from paceline.tls import ClientTls

# OpenSSL's numbers of why a certificate is not believed.
_EXPIRED, _NOT_YET_VALID, _NAME, _IP_ADDRESS = 10, 9, 62, 64
_DISTRUST = {
    _EXPIRED: Distrust.EXPIRED,
    _NOT_YET_VALID: Distrust.NOT_YET_VALID,
    _NAME: Distrust.NAME,
    _IP_ADDRESS: Distrust.NAME,
}


def tls_context(tls: ClientTls, *, believes_anybody: bool, protocols: tuple[str, ...] = ()) -> ssl.SSLContext:
    """What a connection is made with that ends where the server is not believed, or that believes anybody.

    The files of `tls` have been read before (`ClientTls.read`), and can be used.
    """
    if believes_anybody:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context = ssl.create_default_context(cafile=tls.ca)
        # Newer Pythons refuse authorities that gRPC takes.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def distrust_of(error: ssl.SSLCertVerificationError) -> Distrust:
    return _DISTRUST.get(error.verify_code, Distrust.AUTHORITY)


def read_certificate(data: bytes) -> Certificate:
    """Of the DER bytes that a server has shown; raises `ValueError` for what is none."""
    from cryptography import x509  # noqa: PLC0415 - who examines no TLS needs none of it

    certificate = x509.load_der_x509_certificate(data)
    names: list[str] = []
    with suppress(x509.ExtensionNotFound):
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names += extension.get_values_for_type(x509.DNSName)
        names += map(str, extension.get_values_for_type(x509.IPAddress))
    return Certificate(
        names=tuple(names), issuer=certificate.issuer.rfc4514_string(), ends=certificate.not_valid_after_utc
    )
