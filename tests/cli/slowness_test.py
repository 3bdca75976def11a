# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What makes a machine slow is named, with its fix."""

import dataclasses

import pytest

from palm_mtf.cli.slowness import Machine, dtype_line, find_slowness

FAST = Machine(
  native_bfloat16="avx512_bf16",
  asked_dtype="bfloat16",
  asked_where="mine.gin:3",
  cores=[0, 1, 2, 3],
  threads=4,
  busy={0: 0.02, 1: 0.1, 2: 0.0, 3: 0.2},
)


def only_problem(**changes):
  (problem,) = find_slowness(dataclasses.replace(FAST, **changes))
  return problem


def test_a_fast_machine_has_no_problem():
  assert find_slowness(FAST) == []
  assert dtype_line(FAST) == 'native (avx512_bf16): "auto" is "bfloat16"'


def test_bfloat16_that_is_asked_for_and_not_native_is_one():
  problem = only_problem(native_bfloat16="")
  assert problem.what == (
    'ACTIVATION_DTYPE = "bfloat16" (mine.gin:3): this machine has no native '
    "bfloat16; it computes in float32 and rounds."
  )
  assert problem.fix == "--gin.ACTIVATION_DTYPE='\"auto\"'"


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_machine_without_bfloat16_suits_what_does_not_ask_for_it(dtype):
  slow = dataclasses.replace(FAST, native_bfloat16="", asked_dtype=dtype)
  assert find_slowness(slow) == []
  assert dtype_line(slow) == 'not native: "auto" is "float32"'


@pytest.mark.parametrize(
  ("changes", "what", "cores"),
  [
    ({"threads": 8}, "8 threads would share 4 cores", "0,1,2,3"),
    ({"quota": 2.5}, "4 threads would share 2 cores", "0,1"),
    ({"quota": 0.5}, "4 threads would share 1 core,", "0"),
  ],
)
def test_fewer_cores_than_threads_are_one(changes, what, cores):
  problem = only_problem(**changes)
  assert problem.what.startswith(what)
  assert problem.fix.endswith(f"begin the command with taskset -c {cores}")


def test_cores_that_others_keep_busy_are_one():
  problem = only_problem(busy={0: 0.02, 1: 0.9, 2: 0.3, 3: 0.2})
  assert problem.what.endswith("keep cores busy: 1 (90%), 2 (30%).")
  assert problem.fix.endswith("taskset -c 0,3")
  problem = only_problem(busy=dict.fromkeys(range(4), 1.0))
  assert "taskset" not in problem.fix
