# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A search plans all even layouts; for PaLM 540B it finds PaLM's layout."""

import dataclasses

import pytest

from palm_mtf.accounting.plan import fits
from palm_mtf.accounting.search import candidates, find_slice, reason, search
from palm_mtf.accounting.step_time import predict_step
from palm_mtf.config.mesh_layout import MeshLayout, check_layout
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.errors import UserError
from tests.planning import palm_540b, plan_config


def settings_of(config):
  mesh = config.mesh_layout
  return (
    config.pods.num_pods,
    tuple(mesh.axes.items()),
    tuple(sorted(mesh.rules.items())),
    mesh.num_microbatches,
    config.model.remat,
  )


def palm_8b(**macros):
  """PaLM 8B with batches of 256 on TPU v4."""
  return plan_config("recipes/palm_8b.gin", GLOBAL_BATCH_SIZE=256, **macros)


def test_for_540b_on_two_pods_of_v4_it_finds_what_palm_had():
  """12-way model, 256-way fully sharded data, blocks recomputed (PaLM 4)."""
  result = search(palm_540b(), 6144)
  assert result.num_candidates > 1000
  assert settings_of(result.fitting[0].config) == settings_of(palm_540b())
  # More pods exchange more; twice the model axis moves more activations.
  reasons = {
    (x.config.pods.num_pods, x.config.mesh_layout.axes["model"]): reason(
      result.fitting[0], x
    )
    for x in result.fitting[3:0:-1]
  }
  assert reasons[4, 12].startswith("exchange +")
  assert reasons[2, 24].startswith("all_gather over model +")


def test_every_candidate_divides_is_another_and_uses_all_devices():
  config = palm_8b()
  every = list(candidates(config, 12))
  assert len({settings_of(each) for each in every}) == len(every) > 100
  for each in every:
    check_layout(each.mesh_layout, each.model, 256, num_pods=each.pods.num_pods)
    assert each.pods.num_pods * each.mesh_layout.num_devices == 12


def test_a_mixture_s_tokens_move_where_that_is_fastest():
  """Five devices, because few settings divide by five."""
  experts = dict(MLP="experts", NUM_EXPERTS=15, EXPERTS_PER_TOKEN=2)
  sizes = dict(D_MODEL=3840, D_EXPERT=2048, NUM_LAYERS=1, CAPACITY_FACTOR=1.0)
  given = dict(TPU="", MESH_SHAPE="", LAYOUT="", GLOBAL_BATCH_SIZE=155)
  config = plan_config("recipes/palm_8b.gin", **given, **experts, **sizes)
  best, *others = search(config, 5).fitting
  assert best.config.mesh_layout.layout == "batch:data,experts:data"
  others = [x for x in others if not x.config.mesh_layout.moves_tokens]
  assert best.step.total < 0.95 * others[0].step.total


def test_what_is_found_fits_and_comes_fastest_first():
  result = search(palm_8b(), 8)
  secs = [each.step.total for each in result.fitting]
  assert secs == sorted(secs) and len(secs) < result.num_candidates
  for each in result.fitting[::100]:
    assert fits(each.config, 256)
    assert each.step == predict_step(each.config, 256)


@pytest.mark.slow
def test_a_brute_force_over_one_axis_finds_nothing_faster():
  """By hand: the batch over 8 devices, with weights stored whole or split."""
  given = palm_8b(CHIP_MEMORY_BYTES=1e12)
  best = search(given, 8).fitting[0]
  for layout in ("batch:data", "batch:data,d_model_stored:data"):
    for parts in (1, 2, 4, 8, 16, 32):
      for remat in ("none", "attention", "layer"):
        mesh = MeshLayout(
          mesh_shape="data:8", layout=layout, num_microbatches=parts
        )
        model = dataclasses.replace(given.model, remat=remat)
        config = dataclasses.replace(given, mesh_layout=mesh, model=model)
        assert best.step.total <= predict_step(config, 256).total


def test_a_pod_of_a_torus_ends_where_its_links_do():
  pods = {each.pods.num_pods for each in candidates(palm_540b(), 6144)}
  assert pods == {2, 4, 8}  # 4,096 chips at most
  v5e = palm_8b(CHIP="tpu_v5e")
  assert min(x.pods.num_pods for x in candidates(v5e, 512)) == 2


def test_without_a_published_network_there_is_one_pod():
  v3 = palm_8b(CHIP="tpu_v3")
  assert {each.pods.num_pods for each in candidates(v3, 16)} == {1}


def test_slices_of_other_sizes_are_named_by_their_cores():
  config = plan_config(
    "recipes/palm_8b.gin",
    "layouts/tpu_palm_8b.gin",
    "pods/cluster.gin",
    GLOBAL_BATCH_SIZE=256,
  )
  names = {x.mesh_layout.tpu for x in candidates(config, 128)}
  assert names == {"v4-256", "v4-4x4x4", "v4-64", "v4-32"}


def test_a_number_of_tpus_that_no_slice_has_is_said():
  with pytest.raises(UserError, match=r"--devices = 50: no TPU slice"):
    search(palm_540b(), 50)


@pytest.mark.parametrize(
  ("kind", "devices", "name"),
  [
    ("v3", 32, "v3-32"),
    ("v4", 64, "v4-128"),
    ("v4", 3072, "v4-12x16x16"),  # PaLM's pod
    ("v4", 1536, "v4-8x12x16"),
    ("v4", 320, "v4-4x4x20"),
    ("v4", 96, None),  # no whole number of cubes of 64 chips
    ("v3", 96, None),
    ("v5p", 64, "v5p-128"),
    ("v5p", 1536, "v5p-8x12x16"),
    ("v6e", 64, "v6e-64"),
    ("v6e", 512, None),
  ],
)
def test_a_slice_is_found_by_its_devices(kind, devices, name):
  found = find_slice(f"{kind}-8", devices)
  assert found == name
  assert found is None or tpu_slice(found).num_devices == devices
