"""HTTP requests as bytes: bodies around OpenAI's schema, bodies that are no JSON, and requests that are no HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.messages import TEXTS, damaged

MODEL = "fake"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What is written to a connection of its own."""

    data: bytes
    is_whole: bool  # it is HTTP and all there, so that it must be answered in OpenAI's shape


def framed(body: bytes, *, path: str, headers: Sequence[str] = ("content-type: application/json",)) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: here", "connection: close", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


# ---------------------------------------------------------------------------------------------------------------------
# JSON around the schema

_COMMON: Mapping[str, Sequence[Any]] = {
    "n": (1, 2, 3),
    "stream": (True, False),
    "user": ("somebody", ""),
    "seed": (0, 7, 2**63),
    "temperature": (0, 1, 0.7),
    "top_p": (1, 0.5),
    "frequency_penalty": (0.5, -2),
    "presence_penalty": (0.5, -2),
    "logit_bias": ({}, {"5": 3, "6": -100}),
    "stop": ("a", ["a", "é", "👩‍👩‍👧"], []),
    "max_tokens": (1, 4, 8),
    "top_k": (-1, 0, 5),
    "min_p": (0, 0.1),
    "repetition_penalty": (1, 1.2),
    "min_tokens": (0, 1),
    "ignore_eos": (True, False),
    "stop_token_ids": ([], [5, 6]),
    "allowed_token_ids": ([5, 6, 7, 8],),
    "banned_token_ids": ([], [9]),
    "speculation": ({}, {"off": True}, {"draft_length": 4, "rule": "coupled"}, {"schedule": "sequential"}),
}
_OF_COMPLETIONS = {**_COMMON, "logprobs": (0, 5), "echo": (True, False), "best_of": (1,), "suffix": ("", None)}
_OF_CHAT = {
    **_COMMON,
    "logprobs": (True, False),
    "max_completion_tokens": (1, 4),
    "tools": ([], None),
    "store": (False,),
    "response_format": ({"type": "text"},),
}
_SECTIONS = {
    "stream_options": ("include_usage", "include_obfuscation", "other"),
    "speculation": ("rule", "draft_length", "fan_out", "schedule", "off", "of"),
    "logit_bias": ("5", "-1", "1e3", "319", "320", "99999999999", "٣", ""),
}
_OTHERS = ("prompt", "messages", "model", "top_logprobs", "functions", "promt", "", "\ud800", "a\0b", "x" * 1000)

_scalars = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 17, 21, 320, 2**31, 2**32, 2**53 + 1, 2**64, -(2**63), 10**400),
        *(0.5, -0.0, 1e308, math.nan, math.inf, "0", "-1", "null", "\ud800", "a\udfffb", *TEXTS[:9]),
    ]
)
_junk = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5", "rule"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def _contents(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """What a body holds: mostly sensible, with up to two parameters, a section and a message gone wrong."""
    fields = _OF_COMPLETIONS if path == COMPLETIONS else _OF_CHAT
    content: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    if path == COMPLETIONS:
        content["prompt"] = draw(st.sampled_from(["Why?", TEXTS[5], [5, 6], ["a", "b"], [[5], [6, 7]]]))
    else:
        content["messages"] = [{"role": "user", "content": draw(st.sampled_from(TEXTS[:6]))}]
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)):
        content[name] = draw(st.sampled_from(fields[name]))
    for name in draw(st.lists(st.sampled_from([*sorted(fields), *_OTHERS]), max_size=2)):
        content[name] = draw(_junk)
    section = draw(st.sampled_from([None, None, None, *_SECTIONS, "messages"]))
    if section == "messages":
        content["messages"] = [{draw(st.sampled_from(["role", "content", "name", "x"])): draw(_junk), "role": "user"}]
    elif section is not None:
        content[section] = {draw(st.sampled_from(_SECTIONS[section])): draw(_junk)}
    content.pop(draw(st.sampled_from([*[""] * 8, "model", "prompt", "messages"])), None)
    return content


def _as_json(content: Any, is_ascii: bool) -> bytes:
    """Names and texts may hold half a surrogate pair: escaped, or as bytes that are no UTF-8."""
    return json.dumps(content, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")


_paths = st.sampled_from([COMPLETIONS, CHAT])
_bodies = _paths.flatmap(lambda path: st.tuples(st.just(path), st.builds(_as_json, _contents(path), st.booleans())))

json_requests = _bodies.map(lambda asked: HttpRequest(framed(asked[1], path=asked[0]), is_whole=True))
"""JSON in whole requests."""


# ---------------------------------------------------------------------------------------------------------------------
# Bodies that are no JSON, or not as it should be

_SENSIBLE = _as_json({"model": MODEL, "prompt": "naïve 你好", "max_tokens": 2}, is_ascii=False)
_depths = st.sampled_from([10, 150, 250, 5_000])


def _with_number(digits: str) -> bytes:
    return b'{"model":"fake","prompt":"a","max_tokens":' + digits.encode() + b"}"


_broken_bodies = st.one_of(
    damaged(_bodies.map(lambda asked: asked[1])),
    st.binary(max_size=40),
    st.builds(lambda depth, opening: opening * depth, _depths, st.sampled_from([b"[", b'{"a":', b'[{"prompt":'])),
    st.builds(lambda depth: b'{"model":"fake","prompt":' + b"[" * depth + b"]" * depth + b"}", _depths),
    st.sampled_from(["1e999", "-1e999", "9" * 5000, "0" * 99, "1.", ".5", "+1", "0x1", "NaN", "1" + "0" * 400]).map(
        _with_number
    ),
    st.sampled_from(["utf-16", "utf-16-be", "utf-32", "utf-7", "cp1252"]).map(
        lambda encoding: _SENSIBLE.decode().encode(encoding, "replace")
    ),
    st.sampled_from(
        [b"", b"\xef\xbb\xbf" + _SENSIBLE, _SENSIBLE * 2, _SENSIBLE + b"\0", b"null", b"[]", b'"a"', b"{}"]
    ),
    st.just(b'{"model":"fake","model":"fake","prompt":"a","prompt":["b"],"max_tokens":1}'),
)
_content_types = st.sampled_from(
    ["application/json"] * 6
    + [
        "text/plain",
        "application/json; charset=latin-1",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
    ]
    + ["APPLICATION/JSON", "application/json;;;", "*/*", "application/json, text/plain", "\x80"]
)

broken_bodies = st.builds(
    lambda path, body, kind: HttpRequest(framed(body, path=path, headers=[f"content-type: {kind}"]), is_whole=True),
    _paths,
    _broken_bodies,
    _content_types,
)
"""Whole requests whose bodies are no JSON, or say that they are none."""


# ---------------------------------------------------------------------------------------------------------------------
# Requests that are no HTTP, or hardly

_METHODS = ("POST", "POST", "POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "post", "")
_TARGETS = (
    *(COMPLETIONS, CHAT, "/v1/models", "/v1/models/fake", "/health", "/metrics", "/", "*", ""),
    *("/v1/models/%ff%00", "/v1/models/" + "x" * 3000, "/nowhere?\xff", "/nowhere#a?b", "//v1//models", "/../../etc"),
    *("http://else:99999/v1/models", "http://[/", "/v1/models?" + "a=b&" * 500, "/\x7f", "/a b", "/%"),
)
_HEADERS = (
    *("expect: 100-continue", "upgrade: websocket\r\nconnection: upgrade", "upgrade: h2c", "te: trailers"),
    *("host: [", "host: a:b:c", "host: \xff", "host:", "x-request-id: " + "x" * 200, "x-request-id: \x01"),
    *("x-request-timeout: nan", "x-request-timeout: -1", "x-request-timeout: 1e400", "x-request-timeout: 0.000001"),
    *("authorization: Bearer \xff", "authorization: " + "a" * 9000, "traceparent: 00-0-0-00", "accept-encoding: gzip"),
    *("content-encoding: gzip", "content-type: text/html", "no colon", " : ", "a\0b: c", "a: b\n c: d"),
    *("transfer-encoding: gzip, chunked", "content-length: 0", "content-length: 7\r\ncontent-length: 8"),
)
_FRAMES = (
    *("content-length: {size}", "content-length: {size}", "content-length: {more}", "content-length: {less}"),
    *("content-length: -1", "content-length: 0x10", "content-length: 99999999999999999999", "content-length: a", ""),
    *("transfer-encoding: chunked", "transfer-encoding: chunked", "transfer-encoding: chunked\r\ncontent-length: 5"),
)
_CHUNKS = (
    "{size:x}\r\n{body}\r\n0\r\n\r\n",
    "{size:x}\r\n{body}",
    "{more:x}\r\n{body}\r\n0\r\n\r\n",
    "zz\r\n{body}\r\n",
)
_LONG_CHUNKS = (
    "-1\r\n{body}\r\n",
    "ffffffffffffffffff\r\n{body}",
    "1;" + "a" * 5000 + "\r\n{body}",
    "0\r\na: b\r\n\r\n",
)


@st.composite
def _odd_requests(draw: st.DrawFn) -> HttpRequest:
    body = draw(st.sampled_from([_SENSIBLE, b"", b"{}", b'{"model":"fake","prompt":"a"}'])).decode()
    size = len(body.encode())
    frame = draw(st.sampled_from(_FRAMES)).format(size=size, more=size + 3, less=max(0, size - 3))
    if "chunked" in frame:
        chunks = draw(st.sampled_from([*_CHUNKS, *_CHUNKS, *_LONG_CHUNKS]))
        body = chunks.format(size=size, more=size + 3, body=body)
    version = draw(st.sampled_from(["HTTP/1.1"] * 6 + ["HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.1.1", "", "ICY"]))
    head = [
        f"{draw(st.sampled_from(_METHODS))} {draw(st.sampled_from(_TARGETS))} {version}",
        "content-type: application/json",
        frame,
        *draw(st.lists(st.sampled_from(_HEADERS), max_size=3)),
    ]
    text = draw(st.sampled_from(["\r\n", "\r\n", "\r\n", "\n"])).join(line for line in head if line) + "\r\n\r\n"
    return HttpRequest(text.encode("latin-1") + body.encode(), is_whole=False)


_PREFACES = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\r\n\r\n",
    b"\0" * 99,
)

raw_requests = _odd_requests() | st.builds(
    HttpRequest,
    st.binary(max_size=64)
    | st.sampled_from(_PREFACES)
    | damaged(_bodies.map(lambda asked: framed(asked[1], path=asked[0]))),
    st.just(False),
)
"""Odd methods, paths, headers, lengths and chunks, and bytes of any kind."""
