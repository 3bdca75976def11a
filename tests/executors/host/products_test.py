# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The products of decoding are measured once per machine, then kept."""

import errno
import fcntl
import os

import pytest

from palm_mtf.executors.host import products
from palm_mtf.executors.host.products import Case, fastest_products
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import SlotDecoder
from palm_mtf.json_text import json_text
from palm_mtf.machine import processors
from palm_mtf.machine.cache_folder import open_cache
from palm_mtf.native.decoding import BY_FLAGS, NEVER, Products
from palm_mtf.native.operations import operations, operations_built_with
from tests import oracle
from tests.cpus import ZEN_3, pretend_cpu
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import SINGLE, small_config

ROWS = 1, 16, 64, 256
needs_choice = pytest.mark.skipif(
  operations() is None or not processors.bfloat16_flags(),
  reason="with no C++ compiler or no native bfloat16, there is no choice",
)


def seconds(**of_executor):
  """Returns {case: seconds}; `of_executor` has those of 1, 16, ... rows."""
  return {
    Case(name.removesuffix("_int8"), dtype, rows): secs
    for name, all_secs in of_executor.items()
    for dtype in ["int8" if name.endswith("_int8") else "bfloat16"]
    for rows, secs in zip(ROWS[-len(all_secs) :], all_secs, strict=True)
  }


@pytest.mark.parametrize(
  ("secs", "chosen"),
  [
    # Without tiles, oneDNN has to be twice as fast.
    (
      dict(vectors=[1, 2, 4, 9], oneDNN=[3, 5]),
      Products(NEVER, NEVER, NEVER, NEVER),
    ),
    (dict(vectors=[1, 2, 4, 9], oneDNN=[3, 4]), Products(*[NEVER] * 3, 256)),
    (dict(vectors=[1, 2, 4, 9], oneDNN=[2, 4]), Products(*[NEVER] * 3, 64)),
    # Steps and prompts may have different products; oneDNN is compared with the
    # faster of the others.
    (
      dict(
        vectors=[1, 2, 4, 9],
        tiles=[3, 1, 1, 2],
        oneDNN=[2, 2],
        vectors_int8=[1, 1, 1, 1],
        tiles_int8=[2, 0.5, 0.5, 0.5],
      ),
      Products(steps=NEVER, prompts=1, int8=16, onednn=NEVER),
    ),
    (
      dict(
        vectors=[1, 2, 4, 9],
        tiles=[1.1, 1, 8, 16],
        oneDNN=[3, 4],
        vectors_int8=[1, 1, 1, 1],
        tiles_int8=[0.5, 2, 0.5, 2],
      ),
      Products(steps=1, prompts=NEVER, int8=NEVER, onednn=256),
    ),
  ],
)
def test_the_fastest_products_are_chosen(secs, chosen):
  assert products.choose_products(seconds(**secs)) == chosen


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """An empty cache; yields a function that keeps a choice there."""
  operations_built_with()  # the library stays in memory
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  folder = tmp_path / "palm_mtf" / "products"

  def keep(choice):
    (path,) = folder.iterdir()
    with open_cache(str(folder)) as opened:
      opened.keep(path.name, json_text(choice._asdict()).encode())
    return path

  return keep


@needs_choice
def test_products_are_measured_once_and_then_kept(cache, caplog):
  measured = fastest_products()
  assert measured.steps in (1, NEVER)
  assert fastest_products() == measured
  kept = Products(NEVER, 1, 16, 64)
  path = cache(kept)
  assert fastest_products() == kept  # whatever is faster now
  path.write_bytes(b"damaged")
  again = fastest_products()
  assert "removed and compiled again" in caplog.text
  assert fastest_products() == again


@needs_choice
def test_without_locks_the_flags_choose(cache, monkeypatch, caplog):
  def refuse(*unused):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(products.fcntl, "flock", refuse)
  assert fastest_products() == BY_FLAGS
  assert "the cache is not used" in caplog.text
  assert "No locks available" in caplog.text


@needs_choice
def test_a_kept_choice_waits_for_no_other_process(cache):
  fastest_products()
  kept = Products(NEVER, 1, 16, 64)
  folder = os.open(cache(kept).parent, os.O_RDONLY)
  try:
    fcntl.flock(folder, fcntl.LOCK_EX)  # as a process that is suspended
    assert fastest_products() == kept
  finally:
    os.close(folder)


@needs_choice
def test_without_a_cache_the_flags_choose(tmp_path, monkeypatch, caplog):
  operations_built_with()
  (tmp_path / "file").touch()
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
  assert fastest_products() == BY_FLAGS
  assert "the cache is not used" in caplog.text


def test_without_native_bfloat16_nothing_is_measured(tmp_path, monkeypatch):
  pretend_cpu(ZEN_3, tmp_path, monkeypatch)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert fastest_products() == BY_FLAGS
  assert os.listdir(tmp_path) == ["cpuinfo"]


@needs_choice
def test_what_training_decodes_depends_on_the_flags_only(cache, tmp_path):
  config = small_config(activation_dtype="bfloat16")
  params = oracle.random_parameters(config, seed=1)
  saved = save_checkpoint(config, params, tmp_path / "model")
  fastest_products()
  cache(Products(onednn=64))

  def reads_parts(is_measured):
    # With oneDNN, prompts are read whole.
    with LoadedDecoder(
      saved, config, SINGLE, is_measured=is_measured
    ) as loaded:
      decoder = SlotDecoder(loaded, config.vocab_size, 1, prompt_lookup=True)
      return bool(decoder.part_tokens)

  assert not reads_parts(is_measured=True)  # the texts of users
  assert reads_parts(is_measured=False)  # teachers and references
