# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server answers only requests with an allowed Host and a valid key."""

import asyncio
import contextlib
import os
import socket

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.serving.access import (
  Access,
  find_allowed_hosts,
  is_on_loopback,
  listen,
  make_url,
  read_keys,
)
from tests.generation.serving.live_server import answer_to, http, serving
from tests.refusals import message_of


def begin(given, *, allow_any_address=False, has_keys=False):
  return contextlib.closing(
    listen(given, allow_any_address=allow_any_address, has_keys=has_keys)
  )


def has_ipv6():
  try:
    socket.create_server(("::1", 0), family=socket.AF_INET6).close()
  except OSError:
    return False
  return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@pytest.mark.parametrize(
  ("given", "url"),
  [
    ("127.0.0.1:0", "http://127.0.0.1:"),
    ("localhost:0", "http://127.0.0.1:"),
    pytest.param("[::1]:0", "http://[::1]:", marks=needs_ipv6),
    pytest.param("[0:0::1]:0", "http://[::1]:", marks=needs_ipv6),
  ],
)
def test_a_loopback_address_is_listened_on_without_a_warning(
  given, url, caplog
):
  with begin(given) as listening:
    assert make_url(listening).startswith(url)
    assert is_on_loopback(listening)
    socket.create_connection(listening.getsockname()[:2]).close()
  assert not caplog.records


@pytest.mark.parametrize(
  "given",
  [
    "0.0.0.0:0",
    pytest.param("[::]:0", marks=needs_ipv6),
    pytest.param("[::ffff:0.0.0.0]:0", marks=needs_ipv6),
  ],
)
def test_every_address_needs_its_flag_and_warns(given, caplog):
  with pytest.raises(UserError, match="add --allow_any_address"):
    begin(given)
  with begin(given, allow_any_address=True) as listening:
    assert not is_on_loopback(listening)
  with begin(given, allow_any_address=True, has_keys=True):
    pass
  first, second = (record.getMessage() for record in caplog.records)
  assert "no API key and no encryption" in first
  assert "there is no encryption" in second


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ("127.0.0.1", "write ADDRESS:PORT"),
    ("127.0.0.1:99999", "write ADDRESS:PORT"),
    ("[]:1", 'the name "[]" has no address on this host'),
    ("no.such.host.invalid:1", "has no address on this host"),
    ("192.0.2.1:0", '"192.0.2.1:0": this host has no such address.'),
  ],
)
def test_what_is_not_an_address_of_this_host_is_one_error_line(given, message):
  assert message in message_of(begin, given)


PROMPT = {"prompt": "one"}
PAGES = ["/health", "/metrics", "/v1/models", "/v1/models/m", "/none"]


def answers(access, *requests):
  """Returns status, headers and content of answers to requests in bytes."""

  async def run():
    async with serving(access) as (_, address):
      return [await answer_to(address, x) for x in requests]

  return asyncio.run(run())


def statuses(access, *requests):
  """Returns the statuses of answers to (method, path, body, headers)."""
  made = [http(*request, **headers) for *request, headers in requests]
  return [status for status, *_ in answers(access, *made)]


def of_loopback(*allowed, listen="127.0.0.1"):
  return Access(find_allowed_hosts(listen, is_loopback=True, allowed=allowed))


@pytest.mark.parametrize(
  ("host", "status"),
  [
    ("127.0.0.1", 200),
    ("127.0.0.1:8000", 200),
    ("localhost", 200),
    ("LocalHost:1", 200),
    ("[::1]", 200),
    ("[::1]:8000", 200),
    ("[0:0:0:0:0:0:0:1]:8000", 200),
    ("evil.example", 403),
    ("evil.example:8000", 403),
    ("localhost.evil.example", 403),
    ("127.0.0.1.evil.example", 403),
    ("evil.example@localhost", 403),
    ("localhost:80:80", 403),
    ("127.0.0.2", 403),
    ("[::1", 403),
    ("", 403),
  ],
)
def test_a_server_on_loopback_answers_its_own_names_only(host, status):
  head = {"Host": host, "Origin": f"http://{host}"}
  found = statuses(
    of_loopback(),
    ("POST", "/v1/completions", PROMPT, head),
    *(("GET", page, b"", head) for page in PAGES[:-1]),
  )
  assert found == [status] * 5


def test_a_request_without_host_or_with_two_is_refused():
  two = http("GET", "/health", Host="localhost\r\nHost: localhost")
  none = http("GET", "/health", Host=None)
  old = none.replace(b"HTTP/1.1", b"HTTP/1.0")
  found = answers(of_loopback(), two, none, old)
  assert [status for status, *_ in found] == [400] * 3


def test_further_names_come_from_the_flags():
  access = of_loopback("Model.Example", "10.0.0.9", "[fd00::2]", listen="me")
  given = ["model.example", "model.example:443", "10.0.0.9:1", "[fd00:0::2]:1"]
  given += ["me:8000", "localhost", "other.example"]
  assert health(access, *given) == [200] * 6 + [403]


def health(access, *hosts):
  """Returns the statuses of /health for names in Host."""
  heads = [{"Host": host} for host in hosts]
  return statuses(access, *(("GET", "/health", b"", head) for head in heads))


def test_a_server_on_other_addresses_answers_every_name_until_some_are_given():
  assert find_allowed_hosts("10.0.0.1", is_loopback=False, allowed=[]) is None
  hosts = find_allowed_hosts(
    "10.0.0.1", is_loopback=False, allowed=["a.example"]
  )
  given = "10.0.0.1:80", "a.example", "b.example"
  assert health(Access(hosts), *given) == [200, 200, 403]
  assert health(Access(None), "b.example") == [200]


@pytest.mark.parametrize(
  "name", ["a:80", "[::1]:80", "http://a", "a b", "", "a/"]
)
def test_a_flag_that_is_not_a_name_is_one_error_line(name):
  with pytest.raises(UserError, match="give the name of a host or an address"):
    find_allowed_hosts("127.0.0.1", is_loopback=True, allowed=[name])


def test_every_page_but_health_needs_a_key():
  access = Access(None, ["first", "second"])

  def of(**headers):
    return [
      *(("GET", page, b"", headers) for page in PAGES),
      ("POST", "/v1/completions", PROMPT, headers),
    ]

  assert statuses(access, *of()) == [200] + [401] * 5
  for key in ("first", "second"):
    for scheme in ("Bearer", "bearer"):
      found = statuses(access, *of(Authorization=f"{scheme} {key}"))
      assert found == [200, 200, 200, 200, 404, 200]


@pytest.mark.parametrize(
  "given",
  [
    "Bearer third",
    "Bearer firs",
    "Bearer firstfirst",
    "Bearer",
    "Bearer ",
    "first",
    "Basic first",
    "Bearer f\u00edrst",
    "Bearer first\r\nAuthorization: Bearer first",
  ],
)
def test_a_wrong_key_is_refused_with_the_way_to_give_one(given):
  data = http("POST", "/v1/completions", PROMPT, Authorization=given)
  ((status, headers, content),) = answers(Access(None, ["first"]), data)
  assert status == 401 and headers["www-authenticate"] == "bearer"
  assert "Authorization: Bearer KEY" in content["error"]["message"]
  assert "first" not in str(content)


def test_keys_are_the_lines_of_a_file(tmp_path):
  path = tmp_path / "keys"
  path.write_bytes(b"\xef\xbb\xbffirst\r\n\n  sk-second \n")
  path.chmod(0o640)
  assert read_keys(str(path)) == ["first", "sk-second"]


@pytest.mark.parametrize(
  ("content", "mode", "message"),
  [
    (b"key\n", 0o644, "other users can read or write it; run chmod 600"),
    (b"key\n", 0o602, "other users can read or write it; run chmod 600"),
    (b"\n \n", 0o600, "holds no key; write one key per line."),
    (b"key\ntwo words\n", 0o600, "line 2 is not a key; write printable ASCII"),
    (b"\xff\xfe", 0o600, "line 1 is not a key; write printable ASCII"),
    (None, 0o600, "No such file or directory; give a text file."),
  ],
)
def test_a_file_without_private_keys_is_one_error_line(
  tmp_path, content, mode, message
):
  path = tmp_path / "keys"
  if content is not None:
    path.write_bytes(content)
    path.chmod(mode)
  said = message_of(read_keys, str(path))
  assert message in said and "two words" not in said
  with pytest.raises(UserError, match="give a text file"):
    read_keys(os.path.dirname(path))
