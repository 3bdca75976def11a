# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from palm_mtf.json_text import json_text
from tests.strict_json import loads

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
  ("value", "read"),
  [
    (NAN, None),
    ({"a": [1.5, INF, (-INF, [NAN])]}, {"a": [1.5, None, [None, [None]]]}),
    (np.float64("nan"), None),
    ({NAN: 1, INF: 2, 1.5: 3, 4: 5}, {"nan": 1, "inf": 2, "1.5": 3, "4": 5}),
    ([True, None, 10**400, "NaN"], [True, None, 10**400, "NaN"]),
  ],
)
def test_numbers_that_are_not_finite_are_null(value, read):
  assert loads(json_text(value)) == read


def test_finite_numbers_are_written_to_the_last_bit():
  values = [0.1, -0.0, 5e-324, 1.7976931348623157e308]
  assert [x.hex() for x in loads(json_text(values))] == [
    x.hex() for x in values
  ]


def test_what_default_returns_is_made_finite_too():
  value = {"x": np.array([1.0, NAN]), "y": np.float32("inf")}
  text = json_text(value, default=lambda each: each.tolist())
  assert loads(text) == {"x": [1.0, None], "y": None}


def test_a_value_of_an_unknown_type_is_an_error():
  with pytest.raises(TypeError):
    json_text({"x": object()})
