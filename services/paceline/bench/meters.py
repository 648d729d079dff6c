"""What a process has spent so far: processor time, and bytes on its connections. As the system counts them (Linux)."""

from __future__ import annotations

import socket
import struct
import time

# linux/sock_diag.h, inet_diag.h, tcp.h
_SOCK_DIAG_BY_FAMILY = 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_INET_DIAG_INFO = 2
_ESTABLISHED = 1 << 1
_TCP = 6
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_PORTS = struct.Struct("!4xHH")  # of inet_diag_msg: family, state, timer, retrans, then source and destination
_MESSAGE_BYTES = 72  # of inet_diag_msg, behind which attributes follow
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # offsets in tcp_info
_TIMEOUT_S = 2.0


def cpu_seconds(pid: int) -> float | None:
    """Processor time of all threads of a process, of this user, since its start; None where the system does not say."""
    try:
        # As clock_getcpuclockid(3) computes it for the scheduler's clock.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def bytes_to_port(port: int) -> int | None:
    """Bytes sent and received so far on this machine's open connections to a local port; None where that is unknown.

    TCP payload, so gRPC's framing is counted and that of the network is not.
    """
    try:
        return sum(_bytes_to_port(family, port) for family in (socket.AF_INET, socket.AF_INET6))
    except (AttributeError, OSError):
        return None


def _bytes_to_port(family: int, port: int) -> int:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as diag:  # NETLINK_SOCK_DIAG
        diag.settimeout(_TIMEOUT_S)
        request = _REQUEST.pack(family, _TCP, 1 << (_INET_DIAG_INFO - 1), 0, _ESTABLISHED, b"")
        diag.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + request)
        total = 0
        while True:
            data = diag.recv(1 << 20)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return total
                if kind == _ERROR:
                    raise OSError("the system refuses to list its sockets")
                total += _bytes_of(data[_HEADER.size : length], port)
                data = data[-(-length // 4) * 4 :]


def _bytes_of(message: bytes, port: int) -> int:
    """Of one socket: both ways if it is connected to the port, else 0."""
    _, destination = _PORTS.unpack_from(message)
    if destination != port:
        return 0
    attributes = message[_MESSAGE_BYTES:]
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _INET_DIAG_INFO:
            sent, received = struct.unpack_from("=QQ", attributes, 4 + _BYTES_ACKED)
            return int(max(0, sent - 1) + received)  # -1: opening the connection counts as a byte
        attributes = attributes[-(-length // 4) * 4 :]
    return 0
