# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Frequencies of rotary embedding are those of transformers and the oracle."""

import itertools
import math

import numpy as np
import pytest

from palm_mtf.architecture.rotary import (
  find_frequencies,
  find_magnitude,
  rotary_of,
)
from palm_mtf.errors import UserError
from tests import oracle
from tests.mtf_testing import small_config


def make_config(**settings):
  return small_config(
    **{f"rotary_{x}": y for x, y in settings.items()}, d_kv=16
  )


LLAMA3 = dict(base=5e5, original_length=8192, slow=1.0, fast=4.0)
YARN = dict(scaling="yarn", base=1e6, factor=4.0, original_length=32768)
OTHER_YARN = dict(base=1e4, factor=40.0, original_length=4096, fast=16.0)
OTHER_YARN |= dict(slow=2.0, truncate=False, attention_factor=0.9)
# (settings, radians per position, factor of q and k) of transformers 5.23.
PUBLISHED = [
  (
    dict(scaling="linear", factor=4.0),
    "0.25 0.07905694 0.025 0.007905695 0.0025 7.905695e-4 2.5e-4 7.905695e-5",
    1.0,
  ),
  (
    dict(LLAMA3, scaling="llama3", factor=8.0),
    "1 0.1939228 0.03760603 0.007292665 5.24846e-4 3.428102e-5 6.64787e-6 "
    "1.289173e-6",
    1.0,
  ),
  (
    YARN,
    "1 0.1778279 0.03162278 0.00421756 5e-4 4.445699e-5 7.905694e-6 "
    "1.405853e-6",
    1.138629436111989,
  ),
  (
    {**YARN, **OTHER_YARN},
    "1 0.3162278 0.1 0.03162278 0.005790105 1.239525e-4 2.5e-5 7.905694e-6",
    0.9,
  ),
]


@pytest.mark.parametrize("settings, frequencies, magnitude", PUBLISHED)
def test_frequencies_are_those_of_transformers(
  settings, frequencies, magnitude
):
  rotary = rotary_of(make_config(**settings))
  theirs = np.array(frequencies.split(), float)
  np.testing.assert_allclose(find_frequencies(rotary), theirs, rtol=3e-6)
  assert find_magnitude(rotary) == pytest.approx(magnitude, rel=1e-12)


def test_frequencies_are_the_oracle_s_for_many_settings():
  num_tried = 0
  every = itertools.product(
    ("linear", "llama3", "yarn"),
    *((10.0, 5e5), (1.0, 3.5, 40.0), (9, 100, 32768), (0.5, 1.0, 2.0)),
    *((3.0, 32.0), (True, False)),
  )
  for scaling, base, factor, length, slow, fast, is_truncated in every:
    settings = dict(scaling=scaling, base=base, factor=factor)
    if scaling != "linear":
      settings |= dict(original_length=length, slow=slow, fast=fast)
    if scaling == "yarn":
      settings["truncate"] = is_truncated
    try:
      config = make_config(**settings)
    except UserError:
      assert scaling == "yarn" and (
        slow > length / (2 * math.pi) or base**2 < length / (2 * math.pi * fast)
      )
      continue
    rotary, num_tried = rotary_of(config), num_tried + 1
    frequencies, magnitude = oracle.rotary_scaling(config, 16)
    np.testing.assert_allclose(find_frequencies(rotary), frequencies, 1e-12)
    assert find_magnitude(rotary) == pytest.approx(magnitude, rel=1e-12)
  assert num_tried > 500


GIVEN = dict(factor=4.0, original_length=32)
REFUSED = [
  (dict(scaling="yarm"), "ROTARY_SCALING = 'yarm' (did you mean \"yarn\"?)"),
  (dict(scaling="dynamic", factor=2.0), "ROTARY_SCALING = 'dynamic': choose"),
  (dict(scaling="linear"), "ROTARY_SCALING = 'linear': give ROTARY_FACTOR"),
  (dict(scaling="yarn", factor=2.0), "'yarn': give ROTARY_ORIGINAL_LENGTH"),
  (dict(scaling="llama3", **GIVEN, slow=1.0), "'llama3': give ROTARY_FAST"),
  (dict(factor=2.0), "ROTARY_FACTOR = 2.0 and ROTARY_SCALING = 'none'"),
  (
    dict(scaling="linear", **GIVEN),
    "ROTARY_ORIGINAL_LENGTH = 32 and ROTARY_SCALING = 'linear'",
  ),
  (
    dict(scaling="llama3", **GIVEN, slow=1.0, fast=4.0, truncate=False),
    "ROTARY_TRUNCATE = False and ROTARY_SCALING = 'llama3'",
  ),
  (dict(scaling="linear", factor=0.5), "ROTARY_FACTOR = 0.5: give a number"),
  (dict(scaling="linear", factor=math.nan), "ROTARY_FACTOR = nan: give a num"),
  (dict(scaling="linear", factor=True), "ROTARY_FACTOR = True: give a number"),
  (dict(scaling="linear", factor="2"), "ROTARY_FACTOR = '2': give a number"),
  (
    dict(scaling="yarn", factor=4.0, original_length=32.0),
    "ROTARY_ORIGINAL_LENGTH = 32.0: give a whole number",
  ),
  (
    dict(scaling="llama3", **GIVEN, slow=4.0, fast=4.0),
    "ROTARY_SLOW = 4: give a number below ROTARY_FAST = 4",
  ),
  (dict(scaling="yarn", **GIVEN, slow=33.0), "ROTARY_SLOW = 33: give a number"),
  (
    dict(scaling="yarn", factor=4.0, original_length=6),
    "ROTARY_SLOW = 1: give a number below ROTARY_FAST = 32 and below "
    "ROTARY_ORIGINAL_LENGTH / 2 pi = 0.954",
  ),
  (
    dict(scaling="yarn", **GIVEN, base=1.0),
    "ROTARY_BASE = 1: all pairs of numbers turn more than ROTARY_FAST = 32",
  ),
  (
    dict(scaling="yarn", **GIVEN, attention_factor=0.0),
    "ROTARY_ATTENTION_FACTOR = 0.0: give a number",
  ),
]


@pytest.mark.parametrize("settings, message", REFUSED, ids=str)
def test_settings_without_a_meaning_are_refused(settings, message):
  with pytest.raises(UserError) as error:
    make_config(**settings)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_a_scaling_without_rotary_embedding_is_refused():
  with pytest.raises(UserError, match="ROTARY_SCALING = 'linear' and POSITION"):
    small_config(positions="none", rotary_scaling="linear", rotary_factor=2.0)
