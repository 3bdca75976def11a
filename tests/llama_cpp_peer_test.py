# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A peer that dies is reported with its signal and its file."""

import os
import signal

import pytest

from tests import llama_cpp_peer


def die(path):
  os.kill(os.getpid(), signal.SIGSEGV)


def add(path, x, y):
  return path, x + y


def test_a_peer_that_dies_is_reported_and_the_next_call_starts_another():
  message = "^llama.cpp ended by SIGSEGV while it read /x/model.gguf$"
  for _ in range(2):
    with pytest.raises(AssertionError, match=message):
      llama_cpp_peer.call(die, "/x/model.gguf")
    assert llama_cpp_peer.call(add, "/x", 1, 2) == ("/x", 3)
  with pytest.raises(TypeError, match="missing 2 required"):
    llama_cpp_peer.call(add, "/x")
