# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives and cycles of compilers' texts, against ring formulas.

compiled_for_v4.txt is, for a v4-8 with a mesh of 2 x 2, a loop of three rounds
that gathers a matrix over the first axis, sums a product over the second axis,
and reduce-scatters another product over the first axis; and a permute.
compiled_parts_of_8b.txt has instructions of PaLM 8B on 16 x 4 devices.
compiled_for_h100.txt is the program of compiled_for_v4.txt for four H100 GPUs,
by jax-cuda12-pjrt 0.10.2. The texts have lost some attributes.
"""

import collections
import pathlib

import pytest

from palm_mtf.compilation.hlo_text import (
  Collective,
  CompiledText,
  find_axes,
  read_excess,
  read_groups,
)

FOLDER = pathlib.Path(__file__).parent


def read(name: str) -> CompiledText:
  return CompiledText((FOLDER / name).read_text())


def test_collectives_of_a_loop_count_once_per_round():
  found = {x.kind: x for x in read("compiled_for_v4.txt").collectives}
  half = 512 * 512 * 2 / 2  # of a bfloat16 matrix, over two devices
  assert {kind: (x.times, x.sent_bytes) for kind, x in found.items()} == {
    "all_gather": (3, half),
    "all_reduce": (3, 2 * half),
    "reduce_scatter": (3, half),
    "permute": (1, 2 * half),
  }
  assert found["all_gather"].groups == ((0, 2), (1, 3))
  assert found["all_reduce"].groups == ((0, 1), (2, 3))


@pytest.mark.parametrize("chip", ["v4", "h100"])
def test_each_collective_is_over_an_axis_of_the_mesh(chip):
  collectives = read(f"compiled_for_{chip}.txt").collectives
  assert {x.kind: find_axes(x, [2, 2]) for x in collectives} == {
    "all_gather": (0,),
    "reduce_scatter": (0,),
    "all_reduce": (1,),
    "permute": (1,),
  }


def test_gpus_run_a_part_of_the_first_and_the_last_round_outside_of_the_loop():
  text = read("compiled_for_h100.txt")
  half = 512 * 512 * 2 / 2
  sent, times = collections.Counter(), collections.Counter()
  for x in text.collectives:
    sent[x.kind] += x.times * x.sent_bytes
    times[x.kind] += x.times
  assert sent == {
    "all_gather": 3 * half,
    "all_reduce": 3 * 2 * half,
    "reduce_scatter": 3 * half,
    "permute": 2 * half,
  }
  assert {*times.values()} == {3, 1}
  assert text.estimated_cycles == 0


def test_cycles_of_a_loop_count_once_per_round():
  of_round = 1911 + 3806 + 3735 + 1911 + 2535
  assert read("compiled_for_v4.txt").estimated_cycles == (
    3 * of_round + 3224 + 2535
  )


def test_a_fusion_with_a_part_of_a_sum_is_a_reduce_scatter():
  of_two, fused, permute = read("compiled_parts_of_8b.txt").collectives
  # The compiler adds rows, so that each of 16 devices gets whole tiles.
  assert fused.kind == "reduce_scatter"
  assert fused.sent_bytes == 15 / 16 * 4480 * 4096 * 2
  assert find_axes(fused, [16, 4]) == (0,)
  # One all-reduce of two arrays.
  assert of_two.kind == "all_reduce"
  assert of_two.sent_bytes == 2 * 3 / 4 * 2 * 4 * 2048 * 4
  assert find_axes(of_two, [16, 4]) == (1,)
  assert permute.sent_bytes == 80 * 4096 * 2
  assert find_axes(permute, [16, 4]) == (0,)


@pytest.mark.parametrize(
  ("text", "groups"),
  [
    ("replica_groups={{0,1},{2,3}}, x={}", ((0, 1), (2, 3))),
    ("replica_groups=[2,2]<=[4], x={}", ((0, 1), (2, 3))),
    ("replica_groups=[2,2]<=[2,2]T(1,0), x={}", ((0, 2), (1, 3))),
    (
      "replica_groups=[4,3]<=[2,3,2]T(0,2,1)",
      ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)),
    ),
    ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
  ],
)
def test_groups_are_read_as_lists_and_as_matrices(text, groups):
  assert read_groups(text) == groups


def test_groups_of_some_devices_of_an_axis_are_over_no_axis():
  parts = Collective(
    kind="all_reduce", groups=((0, 1), (2, 3)), times=1, sent_bytes=4
  )
  assert find_axes(parts, [4]) is None
  assert find_axes(parts, [2, 2]) == (1,)


def test_a_loop_whose_rounds_are_not_known_is_an_error():
  text = (FOLDER / "compiled_for_v4.txt").read_text()
  text = text.replace("direction=LT", "direction=NE")
  with pytest.raises(ValueError, match=r"while\.12 does not count"):
    _ = CompiledText(text).collectives


def test_what_a_program_needs_is_read_from_the_error_of_the_compiler():
  message = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
    "the total memory required for HLO temporaries (84.21G) exceeds available "
    "HBM (30.75G). HLO module: jit_run."
  )
  assert read_excess(message) == (84.21 * 2**30, 30.75 * 2**30)
  assert read_excess("INTERNAL: a bug") is None
