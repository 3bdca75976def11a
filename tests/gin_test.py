# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The shipped gin files: small, orthogonal, and each recipe ready to run."""

import collections
import dataclasses
import math
import re
from pathlib import Path

import pytest

from palm_mtf import config
from palm_mtf._tf import tf
from palm_mtf.accounting.hardware import check_chip, chip_names
from palm_mtf.architecture.parameters import count_parameters, parameter_shapes
from palm_mtf.checkpoints.writer import removable
from palm_mtf.cli import gin_files
from palm_mtf.cli.command_table import COMMANDS
from palm_mtf.cli.gin_folder import defaults_file, gin_folder, read_header
from palm_mtf.cli.gin_statements import read_file
from palm_mtf.config import mesh_layout
from palm_mtf.config.macros import macros_of
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.errors import UserError
from palm_mtf.machine.activation_dtype import resolve_dtype
from palm_mtf.model_dir.paths import step_of
from palm_mtf.programs.features import FEATURE_DTYPES, REQUIRED_FEATURES
from palm_mtf.programs.model_loss import find_shapes
from palm_mtf.programs.train_program import build_train_program
from tests.accounting.published_sizes import preset

FOLDER = gin_folder()
FILES = sorted(FOLDER.glob("**/*.gin"))
FRAGMENT_FOLDERS = ["data", "layouts", "models", "optim", "pods"]
FRAGMENTS = [path for path in FILES if path.parent.name in FRAGMENT_FOLDERS]
RECIPES, LAYOUTS, HARDWARE = (
  [path for path in FILES if path.parent.name == name]
  for name in ("recipes", "layouts", "hardware")
)
PALMS = sorted(FOLDER.glob("models/palm_*.gin"))
# tests/tools/bench/cases/tpu_test.py builds programs for TPUs.
ON_HOSTS = [path for path in RECIPES if "layouts/tpu" not in path.read_text()]
CONFIGURED = [name for name, command in COMMANDS.items() if command.config]
MACROS = {"MODEL_DIR", *macros_of(config.ConfigOfSweep)}
# {macro that the user has to set: (a value, the files that do not set it)}
TO_THE_USER = {
  "MODEL_DIR": ('"model_dir"', ""),
  "TEXT_FILES": ('"*.txt"', "'data/text.gin'"),
  "TASK": ('"mine"', "'data/examples.gin'"),
  "VOCABULARY": (
    '"mine.model"',
    "'data/examples.gin' 'data/palm_continued.gin'",
  ),
  "INIT_CHECKPOINT": ('"runs/first"', "'data/examples.gin'"),
}


def name_of(path: Path) -> str:
  return str(path.relative_to(FOLDER))


def read_statements(path: Path) -> list[str]:
  """Returns the statements of a file, without comments and blank lines."""
  lines = path.read_text(encoding="ascii").splitlines()
  return [line for line in lines if line and line[0] not in "# "]


def macros_set_in(path: Path) -> set[str]:
  names = (re.match(r"([A-Z0-9_]+) = ", line) for line in read_statements(path))
  return {name[1] for name in names if name}


def load_recipe(
  recipe: Path, command: str = "train"
) -> gin_files.Configuration:
  """Loads a recipe with the macros that it leaves to the user."""
  mine = [
    f"{name}={value}"
    for name, (value, included) in TO_THE_USER.items()
    if any(x in recipe.read_text() for x in included.split(" "))
  ]
  return gin_files.load(command, [name_of(recipe)], mine)


@pytest.mark.parametrize("path", FRAGMENTS, ids=name_of)
def test_a_fragment_is_a_header_imports_and_macros_in_25_lines(path):
  text = path.read_text(encoding="ascii")
  assert len(text.splitlines()) <= 25
  assert re.match(r"# [A-Z](.|\n# )*\.\n", text)
  statements = (
    r"[A-Z0-9_]+ = |from [\w.]+ import \w+$|include 'mesh_tensorflow/t5.gin'$"
  )
  assert all(re.match(statements, line) for line in read_statements(path))


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_is_a_header_includes_and_macros(path):
  text = path.read_text(encoding="ascii")
  assert len(read_statements(path)) <= 20
  assert re.match(r"# [A-Z](.|\n# |\n#\n)*\.\n", text)
  included = re.findall(r"^include '(\w+)/\w+\.gin'$", text, re.MULTILINE)
  pods = [] if "pods" in included else ["pods"]
  assert sorted(included + pods) == FRAGMENT_FOLDERS, "one of each, or one pod"
  assert len(read_statements(path)) == len(included) + len(macros_set_in(path))


def test_folders_set_disjoint_macros():
  owner = {}
  for path in [*FRAGMENTS, *RECIPES]:
    for macro in macros_set_in(path):
      assert owner.setdefault(macro, path.parent.name) == path.parent.name


@pytest.mark.parametrize("folder", ["exchange", "layouts", "optim", "pods"])
def test_fragments_of_one_folder_set_the_same_macros(folder):
  """Those of optim/, if they have the same OPTIMIZER.

  cli/gin_files_test.py tests that a file of models/ replaces any other.
  """
  kinds = collections.defaultdict(set)
  for path in (FOLDER / folder).glob("*.gin"):
    optimizer = re.findall("^OPTIMIZER = .*", path.read_text(), re.MULTILINE)
    kinds[tuple(optimizer)].add(frozenset(macros_set_in(path)))
  assert all(len(sets) == 1 for sets in kinds.values())


@pytest.mark.parametrize("one", sorted(FOLDER.glob("optim/*.gin")), ids=name_of)
def test_another_optimizer_may_follow_any_recipe(one):
  for other in FOLDER.glob("optim/*.gin"):
    files = ["recipes/quickstart.gin", name_of(one), name_of(other)]
    settings = gin_files.load("train", files, ["MODEL_DIR='a'"]).build()[1]
    wanted = {x.name: x.value for x in read_file(other)}
    assert settings.optimizer.optimizer == wanted["OPTIMIZER"]
    assert settings.optimizer.learning_rate == wanted["LEARNING_RATE"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_macro_that_a_file_sets_is_a_setting(path):
  assert macros_set_in(path) <= MACROS


@pytest.mark.parametrize("path", HARDWARE, ids=name_of)
def test_a_chip_is_a_header_with_its_source_and_its_rates(path):
  text = path.read_text(encoding="ascii")
  assert re.match(r"# [A-Z](.|\n# )*\.\n", text)
  assert re.search(r"cloud\.google\.com|data sheet|white paper", text)
  assert macros_set_in(path) == macros_set_in(HARDWARE[0])
  assert path.stem in chip_names()


@pytest.mark.parametrize("command", CONFIGURED)
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_every_recipe_is_complete_for_every_command(recipe, command):
  """Or it is refused: most commands know no models of a function, as T5 is."""
  has_function = "t5" in recipe.stem
  if has_function and not COMMANDS[command].takes_functions:
    with pytest.raises(UserError, match=f"`{command}` knows only PaLM's block"):
      load_recipe(recipe, command)
    return
  model_dir, settings = load_recipe(recipe, command).build()
  assert model_dir == "model_dir"
  assert isinstance(settings, getattr(config, COMMANDS[command].config))
  if command == "train":
    mesh_layout.check_layout(
      settings.mesh_layout,
      settings.model,
      *settings.run.batch_sizes.sizes,
      num_pods=settings.pods.num_pods,
    )
    check_chip(settings.run.chip, settings.hardware)


@pytest.mark.parametrize(
  "path",
  [x for x in LAYOUTS if "experts" not in x.read_text()],
  ids=name_of,
)
@pytest.mark.parametrize("model", PALMS, ids=name_of)
def test_every_layout_divides_every_palm(path, model):
  """A layout of more than 8 devices must divide the model of its name.

  presets_test.py plans other models, also those with experts.
  """
  settings = {each.name: each.value for each in read_file(path)}
  mesh = config.MeshLayout(**{x.lower(): y for x, y in settings.items()})
  own = path.stem.removeprefix("tpu_")
  if not own.startswith("palm"):
    own = "palm_540b"
  if mesh.num_devices <= 8 or model.stem == own:
    batch_size = max(16, mesh.axis_size_of("batch") * mesh.num_microbatches)
    mesh_layout.check_layout(mesh, preset(model.stem), batch_size)


@pytest.mark.parametrize("path", PALMS, ids=name_of)
def test_the_counts_in_the_header_of_a_palm_are_those_of_its_sizes(path):
  size = {each.name: each.value for each in read_file(path)}
  d_model, heads = size["D_MODEL"], size["NUM_HEADS"]
  queries_and_output = 2 * d_model * heads * size["D_KV"]
  key_and_value = 2 * d_model * size["D_KV"]
  gate_in_and_out = 3 * d_model * size["D_FF"]
  block = queries_and_output + key_and_value + gate_in_and_out
  matrices = size["VOCAB_SIZE"] * d_model + size["NUM_LAYERS"] * block
  scales = (size["NUM_LAYERS"] + 1) * d_model  # one per block, and a last norm
  assert (
    f"# Parameters: {matrices:,}; with norm scales: {matrices + scales:,}.\n"
  ) in path.read_text()


# From PaLM, Table 1 and section 5; 62B was trained on 795B tokens.
@pytest.mark.parametrize(
  ("name", "parameters", "batches", "billions"),
  [
    ("palm_8b", 8_631_877_632, [256, 512], 780),
    ("palm_62b", 62_495_129_600, [512, 1024], 795),
    ("palm_540b", 540_354_281_472, [512, 1024, 2048], 780),
  ],
)
def test_the_paper_recipes_have_the_paper_sizes_batches_and_tokens(
  name, parameters, batches, billions
):
  _, settings = load_recipe(FOLDER / "recipes" / f"{name}.gin").build()
  model, run = settings.model, settings.run
  assert count_parameters(model) == parameters
  assert (model.sequence_length, model.vocab_size) == (2048, 256000)
  assert run.batch_sizes.sizes == batches
  if name == "palm_540b":  # only this ramp's steps are published
    assert run.batch_sizes.pairs == [[0, 512], [50000, 1024], [115000, 2048]]
    assert run.train_steps == 255000
  tokens = run.batch_sizes.rows_before(run.train_steps) * 2048
  # 540B's published steps read 775.9B tokens, which the paper rounds to 780B.
  assert tokens == pytest.approx(billions * 1e9, rel=0.006)


@pytest.mark.parametrize("command", CONFIGURED)
def test_the_header_of_a_defaults_file_speaks_of_its_command(command):
  text = "\n".join(read_header(defaults_file(command)))
  assert f"`palm_mtf {command}`" in text
  assert f"palm_mtf {command} --gin_file=" in text
  required = "what a recipe sets" if command == "plan" else "MODEL_DIR"
  assert f"Required: {required}" in text
  named = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", text))
  assert named <= MACROS, "the help names macros that exist"


# PaLM (sections 4 and 5.1) has 3,072 chips per pod in a mesh of 12 x 256, 768
# hosts, and rewinds of about 100 steps that skip 200 to 500 batches. The slices
# of 8B and 62B are ours.
@pytest.mark.parametrize(
  ("name", "axes", "rows"),
  [
    ("palm_8b", {"data": 16, "model": 4}, [256, 512]),
    ("palm_62b", {"data": 64, "model": 8}, [512, 1024]),
    ("palm_540b", {"data": 256, "model": 12}, [512, 1024, 2048]),
  ],
)
def test_recipes_of_two_pods_join_what_the_paper_trained_with(name, axes, rows):
  _, settings = load_recipe(FOLDER / "recipes" / f"{name}_two_pods.gin").build()
  _, alone = load_recipe(FOLDER / "recipes" / f"{name}.gin").build()
  assert (settings.model, settings.optimizer) == (alone.model, alone.optimizer)
  mesh, pods, watch = (
    settings.mesh_layout,
    settings.pods,
    settings.fault_tolerance,
  )
  assert settings.run.train_steps == alone.run.train_steps
  assert settings.run.batch_sizes.sizes == rows
  assert (mesh.axes, pods.num_pods) == (axes, 2)
  assert (pods.pods, pods.dcn_dtype) == ("cluster", "bfloat16")
  assert settings.data.task == "palm"
  assert settings.run.checkpoint_steps <= 100 and settings.run.chip == "tpu_v4"
  assert watch.spike_policy == "rewind" and 200 <= watch.spike_skip_steps <= 500
  where = tpu_slice(mesh.tpu)
  assert math.prod(where.chips) == math.prod(axes.values())
  if name == "palm_540b":  # communication_test.py has its 1.3 GB
    assert (2 * math.prod(where.chips), where.num_hosts) == (6144, 768)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_starts_from_a_step_that_the_recipe_before_it_keeps(recipe):
  _, settings = load_recipe(recipe).build()
  if settings.run.init_checkpoint in (None, "runs/first"):  # the user's own run
    assert settings.run.init_state == "weights"
    return
  named = re.fullmatch(
    r"runs/(\w+)/checkpoints/step_\d{8}", settings.run.init_checkpoint
  )
  before = FOLDER / "recipes" / f"{named[1]}.gin"
  _, earlier = load_recipe(before).build()
  assert before.name in recipe.read_text()  # its header names the recipe
  assert parameter_shapes(earlier.model) == parameter_shapes(settings.model)
  step, run = step_of(settings.run.init_checkpoint), earlier.run
  last = run.train_steps
  steps = [*range(run.checkpoint_steps, last, run.checkpoint_steps), last]
  written = [f"step_{each:08d}" for each in steps]
  removed = removable(written, run.keep_checkpoints, run.keep_every_steps)
  assert f"step_{step:08d}" in set(written) - set(removed)
  rows = [x.run.batch_sizes.rows_before(step) for x in (earlier, settings)]
  assert rows[0] == rows[1]


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_long_recipe_keeps_checkpoints_of_all_its_length(recipe):
  _, settings = load_recipe(recipe).build()
  run = settings.run
  if run.train_steps > 50_000:
    assert run.keep_every_steps <= run.train_steps / 20


def test_62b_continues_from_600b_tokens_to_1325b():
  """PaLM Appendix F."""
  path = FOLDER / "recipes" / "palm_62b_continued.gin"
  _, settings = load_recipe(path).build()
  rows = settings.run.batch_sizes.rows_before
  begun_at = step_of(settings.run.init_checkpoint)
  # A checkpoint is kept every 10,000 steps, which are 21B tokens.
  assert rows(begun_at) * 2048 == pytest.approx(600e9, abs=21e9 / 2)
  assert rows(settings.run.train_steps) * 2048 == pytest.approx(
    1325e9, rel=1e-3
  )
  assert (settings.run.init_state, settings.data.task) == (
    "all",
    "palm_continued",
  )


ALIKE = [x for x in ON_HOSTS if x.stem != "t5_quickstart"]


@pytest.mark.parametrize(
  ("recipe", "most_layers"),
  [
    *(pytest.param(x, 2, id=name_of(x)) for x in ALIKE),
    *(
      pytest.param(x, 200, id=f"all of {name_of(x)}", marks=pytest.mark.slow)
      for x in ON_HOSTS
    ),
  ],
)
def test_recipe_builds_its_whole_training_step_without_its_memory(
  recipe, most_layers
):
  """Lowers forward pass, backward pass and update of all layers to TensorFlow.

  Tests that are not slow build two layers, because all layers are alike.
  t5_runs_test.py trains the T5, whose step takes longer.
  """
  _, settings = load_recipe(recipe).build()
  model = resolve_dtype(settings.model, settings.mesh_layout)
  if not model.model_function:
    num_layers = min(model.num_layers, most_layers)
    model = dataclasses.replace(model, num_layers=num_layers)
  settings = dataclasses.replace(settings, model=model)
  size, features = settings.run.batch_sizes.largest, REQUIRED_FEATURES
  if model.model_function:
    features, expected = [*FEATURE_DTYPES], find_shapes(settings, size)
  else:
    expected = parameter_shapes(model)
  with tf.Graph().as_default():
    program = build_train_program(
      settings, batch_size=size, seed=0, features=features
    )
  built = {
    name: tuple(slices[0].variable.shape.as_list())
    for name, slices in program.slices.items()
    if not name.endswith(("/second_moment", "/momentum"))
  }
  assert built == expected
  assert len(program.slices) == 3 * len(built)
