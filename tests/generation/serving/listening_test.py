# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers listen on IPv4 and IPv6, or fail with one error line."""

import contextlib
import socket

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.serving.listening import (
  is_on_loopback,
  listen,
  make_url,
)


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
  with pytest.raises(UserError) as error:
    begin(given)
  assert message in str(error.value)


@needs_ipv6
def test_a_port_in_use_is_named_with_its_address():
  with begin("[::1]:0") as listening:
    port = listening.getsockname()[1]
    with pytest.raises(UserError, match=rf"\[::1\]:{port}.: port {port} is in"):
      begin(f"[::1]:{port}")
