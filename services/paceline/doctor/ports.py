"""What listens at an address, found out without a call: whether anything does, and what it speaks."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from paceline.doctor.certificates import distrust_of, read_certificate, tls_context
from paceline.doctor.looks import Certificate, Distrust, Greeting, PortLook, Trouble
from paceline.exposure import is_loopback
from paceline.tls import ClientTls

# How HTTP/2 begins: the preface of RFC 9113, and settings that change nothing. A server answers with its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_HEAD = 9  # bytes
_SETTINGS_FRAME = b"\x04"  # the type of a frame, behind the three bytes of its length
_LONGEST_GREETING_S = 2.0
_NOWHERE = ("192.0.2.1", 9)  # an address for documentation, of nobody


async def look_at_port(address: str, tls: ClientTls | None, *, timeout_s: float) -> PortLook:
    """What is at HOST:PORT. With `tls` it is said whether the certificate there is believed."""
    host, port = split(address)
    name = (tls.server_name if tls else None) or host
    try:
        ip_address = await _reached(host, port, timeout_s=timeout_s)
    except _NotReached as error:
        return PortLook(address=address, trouble=error.trouble)
    greeting, _ = await _greeting(ip_address, port, timeout_s=timeout_s)
    if greeting is Greeting.HTTP2:
        return PortLook(address=address, greeting=greeting)
    anybody = tls_context(tls or ClientTls(), believes_anybody=True, protocols=("h2",))
    try:
        tls_greeting, certificate = await _greeting(ip_address, port, context=anybody, name=name, timeout_s=timeout_s)
    except (OSError, TimeoutError):
        return PortLook(address=address, greeting=greeting)
    distrust = await _distrust(ip_address, port, tls, name=name, timeout_s=timeout_s) if tls else None
    return PortLook(address=address, greeting=tls_greeting, is_tls=True, certificate=certificate, distrust=distrust)


async def is_open(address: str, *, timeout_s: float) -> bool:
    """Whether anything listens at HOST:PORT."""
    try:
        await _reached(*split(address), timeout_s=timeout_s)
    except _NotReached:
        return False
    return True


def own_addresses() -> tuple[str, ...]:
    """By which other machines would reach this one; none where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the system is asked which way it would go.
            probe.connect(_NOWHERE)
        except OSError:
            return ()
        address: str = probe.getsockname()[0]
    return () if is_loopback(address) else (address,)


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class _NotReached(Exception):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble)
        self.trouble = trouble


async def _reached(host: str, port: int, *, timeout_s: float) -> str:
    """The first of the host's addresses that takes a connection; raises `_NotReached`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a label of more than 63 characters is the latter
        raise _NotReached(Trouble.UNKNOWN_HOST) from error
    trouble = Trouble.UNKNOWN_HOST
    for *_, endpoint in found:
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(str(endpoint[0]), port)
        except TimeoutError:
            trouble = Trouble.SILENT
        except ConnectionRefusedError:
            trouble = Trouble.REFUSED
        except OSError:
            trouble = Trouble.UNREACHABLE
        else:
            writer.transport.abort()
            return str(endpoint[0])
    raise _NotReached(trouble)


async def _greeting(
    host: str, port: int, *, timeout_s: float, context: ssl.SSLContext | None = None, name: str | None = None
) -> tuple[Greeting, Certificate | None]:
    """What the port says, and who it says to be; raises `OSError` or `TimeoutError` where there is no connection."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    shown = writer.get_extra_info("ssl_object")
    certificate, said = None, b""
    with suppress(ValueError):
        certificate = read_certificate(shown.getpeercert(binary_form=True)) if shown else None
    try:
        writer.write(_PREFACE)
        async with asyncio.timeout(min(timeout_s, _LONGEST_GREETING_S)):
            while len(said) < _FRAME_HEAD and (piece := await reader.read(_FRAME_HEAD - len(said))):
                said += piece
    except (OSError, TimeoutError):
        pass  # what was said until then is the answer, silence too
    finally:
        # Nobody waits for the other side to say good-bye.
        writer.transport.abort()
    return _classified(said), certificate


def _classified(said: bytes) -> Greeting:
    if not said:
        return Greeting.NOTHING
    if said.startswith(b"HTTP/1"):
        return Greeting.HTTP1
    return Greeting.HTTP2 if said[3:4] == _SETTINGS_FRAME else Greeting.OTHER


async def _distrust(host: str, port: int, tls: ClientTls, *, name: str, timeout_s: float) -> Distrust | None:
    context = tls_context(tls, believes_anybody=False, protocols=("h2",))
    # Whose it is comes last: a name says nothing on a certificate that nobody believes.
    for is_name_checked in (False, True):
        context.check_hostname = is_name_checked
        try:
            await _greeting(host, port, context=context, name=name, timeout_s=timeout_s)
        except ssl.SSLCertVerificationError as error:
            return distrust_of(error)
        except (OSError, TimeoutError):
            return None  # it was believed, or the next call says what is the matter
    return None
