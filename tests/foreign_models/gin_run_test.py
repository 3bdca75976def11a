# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A project's own gin file trains its own model function."""

import gin
import numpy as np
import pytest

from palm_mtf import foreign_models
from palm_mtf.errors import UserError
from tests.settings import FOREIGN_OPTIMIZER

FILE = """
import palm_mtf.foreign_models
import PROJECT
train_on_pods.training = @PodTraining()
train_on_pods.batches = @PROJECT.batches
train_on_pods.num_steps = 2
PodTraining.function = @PROJECT.loss
PodTraining.features = {"x": ("float32", "d:8")}
PodTraining.mesh = @palm_mtf.foreign_models.DeviceMesh()
PodTraining.optimizer = @foreign_models.AdafactorConfig()
PodTraining.global_batch_size = 4
DeviceMesh.mesh_shape = "data:2"
DeviceMesh.layout = "batch:data"
AdafactorConfig.learning_rate = 0.1
AdafactorConfig.beta1 = 0.9
AdafactorConfig.beta2_exponent = 0.8
AdafactorConfig.update_clip = 1.0
AdafactorConfig.gradient_clip = 1.0
AdafactorConfig.weight_decay_exponent = None
AdafactorConfig.z_loss = 0.0
"""
MODULE = """
import gin
import mesh_tensorflow as mtf
import numpy as np


@gin.configurable
def loss(mesh, features, target=1.0):
  d = mtf.Dimension("d", 8)
  kernel = mtf.get_variable(mesh, "kernel", mtf.Shape([d]))
  y = mtf.einsum([features["x"], kernel], reduced_dims=[d])
  return mtf.reduce_mean(mtf.square(y - target))


@gin.configurable
def batches(step, rows=4):
  return {"x": np.ones([rows, 8])}
"""


@pytest.fixture
def main(tmp_path, monkeypatch, request):
  """`main` in a folder with the project's module and gin file."""
  # gin keeps what a module registers, so each test has its own module.
  name = f"project_{abs(hash(request.node.name))}"
  (tmp_path / f"{name}.py").write_text(MODULE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)

  def call(*flags, added="", removed="\0"):
    kept = [x for x in FILE.splitlines() if removed not in x]
    text = "\n".join([*kept, added]).replace("PROJECT", name)
    (tmp_path / "own.gin").write_text(text)
    return foreign_models.main(["own.gin"], flags)

  gin.clear_config()
  yield call
  gin.clear_config()


def test_gin_alone_gives_the_losses_of_the_same_settings_in_python(
  main, tmp_path, capsys
):
  assert main("--gin.train_on_pods.save_path='own.npz'") == 0
  out = capsys.readouterr().out
  assert out.endswith("after 2 steps all pods hold the same bits\n")
  namespace = {}
  exec(MODULE.replace("@gin.configurable\n", ""), namespace)
  training = foreign_models.PodTraining(
    namespace["loss"],
    {"x": ("float32", "d:8")},
    mesh=foreign_models.DeviceMesh(mesh_shape="data:2", layout="batch:data"),
    optimizer=FOREIGN_OPTIMIZER,
    global_batch_size=4,
  )
  with training:
    for step in range(2):
      found = training.step({"x": np.ones([4, 8])})["loss"]
      assert f"step {step + 1}  loss {found:.4f}\n" in out
    kernel = training.variables()["kernel"]
  np.testing.assert_array_equal(np.load("own.npz")["kernel"], kernel)


def test_a_class_that_python_makes_does_not_read_gin(main):
  foreign_models.parse_gin([], ["PodsConfig.num_pods=2"])
  made = gin.get_configurable("PodsConfig")()
  assert (made.num_pods, foreign_models.PodsConfig().num_pods) == (2, 1)
  assert type(made) is foreign_models.PodsConfig


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"added": "DeviceMesh.layot = ''"},
      'DeviceMesh.layot = "" (own.gin:21): DeviceMesh has no parameter "layot" '
      '(did you mean "layout"?).',
    ),
    (
      {"added": "PodTraining.pods = @PodConfig()"},
      'PodTraining.pods = @PodConfig() (own.gin:21): gin knows no "PodConfig" '
      '(did you mean "PodsConfig"?); import its module, and decorate it with '
      "gin.configurable.",
    ),
    (
      {"added": "PodTraining.seed = %SEDE\nSEED = 3"},
      "PodTraining.seed = %SEDE (own.gin:21): SEDE is not set (did you mean "
      '"SEED"?); pass --gin.SEDE=...',
    ),
    (
      {"removed": "PodTraining.function"},
      "PodTraining.function is not set; set it in a gin file, or pass "
      "--gin.PodTraining.function=...",
    ),
    (
      {"added": "RATE = 99\nAdafactorConfig.learning_rate = %RATE"},
      "LEARNING_RATE = 99: give a number from 0.0 to 10.0. (RATE is set in "
      "own.gin:21)",
    ),
    (  # 0, as in own.gin, which earlier versions required, has no effect
      {"added": "AdafactorConfig.z_loss = 1e-4"},
      "AdafactorConfig.z_loss = 0.0001 (own.gin:21): a model function has its "
      "own loss; remove this line.",
    ),
    (
      {"added": "train_on_pods.num_steps = 0"},
      "train_on_pods.num_steps = 0: give a whole number of at least 1. "
      "(train_on_pods.num_steps is set in own.gin:21)",
    ),
    (
      {"added": "train_on_pods.save_path = 'no/such.npz'"},
      "train_on_pods.save_path = 'no/such.npz': give None, or a file in a "
      "folder that exists. (train_on_pods.save_path is set in own.gin:21)",
    ),
    (
      {"added": "PodTraining.features = 3"},
      'PodTraining.features = 3: give the features by name, as in {"inputs": '
      '("int32", "length:64")}. (PodTraining.features is set in own.gin:21)',
    ),
    (
      {"added": "import no_such_module"},
      "own.gin:21: import no_such_module: No module named 'no_such_module'; is "
      "it installed?",
    ),
    (
      {"added": "include 'ownn.gin'"},
      'own.gin:21: include "ownn.gin": no such file (did you mean "own.gin"?). '
      "Looked in the current folder and the package's gin folder.",
    ),
  ],
)
def test_a_wrong_file_is_one_line(main, capsys, changes, message):
  assert main(**changes) == 2
  assert capsys.readouterr() == ("", f"palm_mtf: {message}\n")


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("train_on_pods.training", "PodTraining"),
    ("PodTraining.mesh", "DeviceMesh"),
  ],
)
def test_a_class_without_its_call_is_one_line(main, capsys, name, kind):
  assert main(added=f"{name} = @{kind}") == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert err.startswith(f"palm_mtf: {name} = <")
  assert f": give a {kind}; in a gin file, @{kind}(). ({name} is set in" in err


def test_an_error_in_the_projects_own_code_is_one_line(main, capsys):
  assert main(added="PROJECT.batches.rows = 'a'") == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert err.startswith("palm_mtf: train_on_pods.batches, step 0: TypeError: ")
  assert main(added="PROJECT.loss.target = 'a'") == 2
  out, err = capsys.readouterr()
  assert err.startswith("palm_mtf: PodTraining.function: ")


def test_an_unknown_flag_names_the_nearest(main, capsys):
  assert main("--gin_fil=a.gin") == 2
  _, err = capsys.readouterr()
  assert '--gin_fil (did you mean "--gin_file"?)' in err


def test_macros_of_a_file_of_palm_mtf_need_no_reader(main):
  foreign_models.parse_gin(["models/palm_8b.gin"])
  with pytest.raises(UserError, match="nothing refers to MINE; remove it"):
    foreign_models.parse_gin(["models/palm_8b.gin"], ["MINE=1"])
