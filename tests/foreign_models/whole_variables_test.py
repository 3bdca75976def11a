# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.foreign_models.whole_variables import as_numbers


@pytest.mark.parametrize(
  ("value", "dtype", "read"),
  [
    ([[1, 2], [3, 4]], tf.float32, [[1.0, 2.0], [3.0, 4.0]]),
    (np.float64(0.1), tf.float32, np.float32(0.1)),
    ([True, 2.0], tf.int32, [1, 2]),
    (np.array([np.nan]), tf.float32, [np.nan]),
    (np.ones(2, tf.bfloat16.as_numpy_dtype), tf.bfloat16, [1.0, 1.0]),
  ],
)
def test_numbers_of_any_library_are_taken(value, dtype, read):
  found = as_numbers("x", value, dtype)
  assert found.dtype == dtype.as_numpy_dtype
  np.testing.assert_array_equal(found, read)


@pytest.mark.parametrize(
  ("value", "dtype"),
  [
    ([1.5], tf.int32),
    ([np.nan], tf.int32),
    ([2**31], tf.int32),
    ([-1], tf.uint8),
    (["a"], tf.float32),
    ([[1], [1, 2]], tf.float32),
    (None, tf.float32),
    ([1j], tf.float32),
  ],
)
def test_what_is_no_number_of_the_dtype_is_refused(value, dtype):
  with pytest.raises(UserError) as error:
    as_numbers("x in the batch", value, dtype)
  assert str(error.value) == (
    f"x in the batch: give numbers that {dtype.name} holds, in an array or in "
    "lists of equal lengths."
  )
