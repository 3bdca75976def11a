# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bodies are JSON in UTF-8; other bodies are refused in a short line."""

import asyncio
import codecs
import gzip
import json
import zlib

import pytest

from tests.generation.serving.live_server import ask, complete, serving

PROMPT = {"prompt": "one"}
TEXT = json.dumps(PROMPT).encode()


def answers(*requests, **model):
  """Returns the answers to (body, headers) of one server."""

  async def run():
    async with serving(**model) as (_, address):
      return [await complete(address, x, **head) for x, head in requests]

  return asyncio.run(run())


def message_of(answer, status):
  assert answer[0] == status, answer
  message = answer[1]["error"]["message"]
  assert "\n" not in message and len(message) < 300
  return message


def test_utf_8_is_read_with_and_without_charset_or_byte_order_mark():
  heads = ["application/json; charset=UTF-8", "Application/JSON; charset=utf8"]
  heads += ["application/json", 'application/json; charset="utf-8"']
  requests = [(TEXT, {"Content_Type": head}) for head in heads]
  requests.append((codecs.BOM_UTF8 + TEXT, {}))
  requests.append((PACKED, {"Content_Encoding": "gzip"}))
  assert [status for status, _ in answers(*requests)] == [200] * 6


def test_a_body_of_a_slow_codec_stops_nobody():
  body = b"x" * 10**6 + b"-" + b"a" * 10**6
  head = {"Content_Type": "application/json; charset=punycode"}

  async def run():
    async with serving() as (_, address), asyncio.timeout(30):
      return await asyncio.gather(
        complete(address, body, **head), ask(address, "GET", "/health")
      )

  (status, _), health = asyncio.run(run())
  assert status == 415 and health == (200, {"status": "ok"})


PACKED = gzip.compress(TEXT, mtime=0)
JSON = "application/json; charset="
# (body, headers, status, message)
REFUSED = [
  (b"", {}, 400, "Expecting value at character 0"),
  (b"{", {}, 400, "at character 1"),
  (b'{"prompt": "\xff"}', {}, 400, "byte 12 is not UTF-8"),
  (TEXT.decode().encode("utf-16"), {}, 400, "byte 0 is not UTF-8"),
  (b"[" * 100_000, {}, 400, "nested too deep"),
  (b'{"n": ' + b"1" * 5000 + b"}", {}, 400, "has more than 4,300 digits"),
  # In a schema, such a number would become null.
  (b'{"n": NaN}', {}, 400, "'NaN' is no number that JSON"),
  (b'{"n": -Infinity}', {}, 400, "'-Infinity' is no number that JSON"),
  (b'{"n": [1e999]}', {}, 400, "'1e999' is no number that JSON"),
  (b'{"n": ' + b"9" * 5000 + b".5}", {}, 400, " is no number that JSON"),
  (
    b"zz\r\n{}",
    {"Transfer_Encoding": "chunked", "Content_Length": None},
    400,
    "",
  ),
  *(
    (TEXT, {"Content_Type": JSON + x}, 415, "JSON is UTF-8")
    for x in ("punycode", "utf-16", "hex", "no", '""')
  ),
  *(
    (TEXT, {"Content_Encoding": x}, 415, "is not supported")
    for x in ("bogus", "gzip, deflate", "x" * 900, "x-gzip", "br", "zstd")
  ),
  *(
    (body, {"Content_Encoding": coding}, 400, "the body is not ")
    for body, coding in (
      (TEXT, "gzip"),
      (TEXT, "deflate"),
      (PACKED[:-12], "gzip"),
      (PACKED[:12] + b"\xff" * 20, "gzip"),
      (zlib.compress(TEXT)[:-5], "deflate"),
    )
  ),
]


def test_what_is_not_json_in_utf_8_is_refused_with_the_reason(caplog):
  found = answers(*((body, head) for body, head, *_ in REFUSED))
  for answer, (_, _, status, message) in zip(found, REFUSED, strict=True):
    assert message in message_of(answer, status)
  assert not caplog.records


def test_bombs_and_large_bodies_are_refused_by_their_size():
  bomb = gzip.compress(b"a" * 10**7, mtime=0)
  large, packed = answers(
    (b'"' + b"a" * 2**21 + b'"', {}), (bomb, {"Content_Encoding": "gzip"})
  )
  assert "more than 2,097,152 bytes" in message_of(large, 413)
  assert "more than 2,097,152 bytes" in message_of(packed, 413)


def test_a_body_that_does_not_come_is_given_up():
  head = {"Content_Length": 10}
  (answer,) = answers((b"{", head), most_secs=0.05)
  assert "in time" in message_of(answer, 408)


@pytest.mark.parametrize("path", ["/v1/completions", "/unknown"])
def test_an_unknown_expectation_is_refused_in_json(path):
  async def run():
    async with serving() as (server, address):
      answer = await ask(address, "POST", path, TEXT, Expect="nonsense")
      return answer, server._counters.requests[417]

  answer, counted = asyncio.run(run())
  assert "Expect: 'nonsense' is not supported" in message_of(answer, 417)
  assert counted == 1


LONG = "x" * 10**6


@pytest.mark.parametrize(
  "body",
  [
    {LONG: 1},
    {"model": LONG},
    {"model": [LONG]},
    {"n": int("9" * 4000)},
    {"temperature": LONG},
    {"top_p": [0] * 10**5},
    {"top_k": LONG},
    {"seed": LONG},
    {"stop": LONG},
    {"stop": {LONG: LONG}},
    {"stream_options": {LONG: 1}},
    {"logit_bias": {LONG: 1}},
    {"prompt": LONG},
    {"prompt": [5] * 10**5},
    {"prompt": ["\ud800" * 10**4]},
    {"prompt": [[int("9" * 4000)]]},
    {"model": "\ud800\n\x1b[2J"},
  ],
  ids=lambda body: f"{next(iter(body))[:9]}",
)
def test_no_answer_repeats_a_long_value(body):
  (answer,) = answers(({**PROMPT, **body}, {}))
  message_of(answer, 404 if "model" in body else 400)


def test_no_page_repeats_a_long_path():
  async def run():
    async with serving() as (_, address):
      paths = [
        "/v1/models/" + "a" * 6000,
        "/v1/" + "b" * 6000,
        "/" + "c" * 10**5,
      ]
      return [await ask(address, "GET", path) for path in paths]

  for answer, status in zip(asyncio.run(run()), (404, 404, 400), strict=True):
    message_of(answer, status)
