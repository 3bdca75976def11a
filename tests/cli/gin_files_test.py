# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict gin: precedence, origins, the effective text and every refusal."""

import itertools
import re

import pytest

from palm_mtf.cli.gin_files import load
from palm_mtf.errors import UserError

RECIPE = "recipes/quickstart.gin"
DIR = 'MODEL_DIR="runs/x"'
COMMANDS = ["evaluate", "generate", "score", "train"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def write(here, name: str, text: str) -> str:
  (here / name).write_text(text, encoding="utf-8")
  return name


def values(configuration) -> dict[str, object]:
  return {name: each.value for name, each in configuration.macros.items()}


def origins(configuration) -> dict[str, str]:
  return {name: each.origin for name, each in configuration.macros.items()}


def without_origins(configuration) -> list[str]:
  """The text's statements, without its first line and the origins."""
  lines = configuration.effective_text().splitlines()[1:]
  return [line.partition("  # ")[0] for line in lines]


@pytest.mark.parametrize("command", ["evaluate", "generate", "train"])
def test_a_later_file_and_then_the_command_line_hold(here, command):
  first = write(here, "a.gin", "SEED = 1\nLOG_STEPS = 1\nNORM = 'rms_norm'\n")
  second = write(here, "b.gin", "SEED = 2\nLOG_STEPS = 2\n")
  configuration = load(
    command, [RECIPE, first, second], [DIR, "SEED=3", "SEED=4"]
  )
  got, places = values(configuration), origins(configuration)
  assert (got["SEED"], places["SEED"]) == (4, "command line")
  assert (got["LOG_STEPS"], places["LOG_STEPS"]) == (2, "b.gin:2")
  assert (got["NORM"], places["NORM"]) == ("rms_norm", "a.gin:3")
  assert places["D_FF"] == "models/palm_tiny.gin:7"
  assert places["TRAIN_STEPS"].startswith("recipes/quickstart.gin:")


def test_train_and_evaluate_see_the_same_values_and_origins(here):
  mine = write(here, "mine.gin", f"include '{RECIPE}'\nSEED = 5\n")
  arguments = [mine], [DIR, "D_FF=128"]
  train, evaluate = load("train", *arguments), load("evaluate", *arguments)
  both = values(train).keys() & values(evaluate).keys()
  assert both >= {"SEED", "D_FF", "NUM_LAYERS", "TEXT_FILES"}
  for told in (values, origins):
    a, b = told(train), told(evaluate)
    # A command may have macros of its own, with values in its run file.
    assert {x: a[x] for x in both} == {x: b[x] for x in both}


def test_what_a_file_sets_after_an_include_holds(here):
  mine = write(here, "mine.gin", f"SEED = 4\ninclude '{RECIPE}'\nD_FF = 5\n")
  got = values(load("train", [mine], [DIR]))
  recipe = values(load("train", [RECIPE], [DIR]))
  assert recipe["SEED"] != 4
  assert got == {**recipe, "D_FF": 5}


def test_the_order_of_fragments_and_run_files_does_not_matter():
  names = ["models/palm_8b.gin", "runs/train.gin", "layouts/single.gin"]
  rest = [RECIPE]
  texts = {
    tuple(without_origins(load("train", [*rest, *order], [DIR])))
    for order in itertools.permutations(names)
  }
  assert len(texts) == 1


def test_a_command_needs_only_the_macros_that_it_uses(here):
  unused = ("mesh", "run", "tasks")
  text = "".join(f"train.train.{name} = None\n" for name in unused)
  fewer = write(here, "m.gin", f"include 'models/palm_tiny.gin'\n{text}")
  rest = ["data/python_stdlib.gin", "optim/palm.gin"]
  configuration = load("train", [fewer, *rest], [DIR, "TRAIN_STEPS=3"])
  assert "NUM_LAYERS" in configuration.macros
  assert "MESH_SHAPE" not in configuration.macros
  assert "TRAIN_STEPS" not in configuration.macros


def test_the_effective_text_begins_as_gin_needs_it_and_shows_origins():
  text = load(
    "train", [RECIPE], [DIR], asked="palm_mtf train x"
  ).effective_text()
  lines = text.splitlines()
  assert lines[:6] == [
    "# palm_mtf train x",
    "from __gin__ import dynamic_registration",
    "from palm_mtf import config",
    "from palm_mtf.commands import train",
    "",
    'MODEL_DIR = "runs/x"  # command line',
  ]
  assert re.search(r"\nNUM_LAYERS = \d+  # models/palm_tiny.gin:3\n", text)
  assert "config.Config.model = @config.PalmConfig()" in text
  for line in lines[5:]:
    assert not line or "  # " in line


@pytest.mark.parametrize("command", COMMANDS)
def test_the_effective_text_gives_the_same_configuration_again(here, command):
  prompts = '["a \\" b", "\\u00e4 # \\n", \'%x\']'
  first = load(
    command, [RECIPE], [DIR, f"PROMPTS={prompts}", "D_MODEL=%D_FF", "D_FF=64"]
  )
  name = write(here, "config.gin", first.effective_text())
  second = load(command, [name])
  assert without_origins(second) == without_origins(first)
  assert values(second) == values(first)
  assert set(origins(second).values()) <= {
    f"config.gin:{i}" for i in range(1, 200)
  }


@pytest.mark.parametrize("command", COMMANDS)
def test_the_text_of_a_training_run_configures_every_command(here, command):
  text = load("train", [RECIPE], [DIR]).effective_text()
  name = write(here, "config.gin", text)
  assert without_origins(load(command, [name])) == without_origins(
    load(command, [RECIPE], [DIR])
  )


def test_a_macro_may_refer_to_another_of_the_users_own(here):
  mine = write(here, "mine.gin", "WIDTH = 64\nD_MODEL = %WIDTH\n")
  text = load("train", [RECIPE, mine], [DIR]).effective_text()
  assert "D_MODEL = %WIDTH  # mine.gin:2\n" in text
  assert "WIDTH = 64  # mine.gin:1\n" in text


def test_own_configurables_and_imports_stay_in_the_text(here):
  mine = write(
    here,
    "mine.gin",
    "from __gin__ import dynamic_registration\nimport their.models\n"
    "import tasks_of_mine\nfrom their import data as their_data\n"
    "config.Config.model = @their.models.Tall()\n"
    "their.models.Tall.depth = %DEPTH\nDEPTH = 9\n"
    "their_data.mixture.rate = 2.0\n",
  )
  configuration = load("train", [RECIPE, mine], [DIR])
  lines = configuration.effective_text().splitlines()
  for line in (
    "import their.models",
    "import tasks_of_mine",
    "from their import data as their_data",
    "DEPTH = 9  # mine.gin:7",
    "config.Config.model = @their.models.Tall()  # mine.gin:5",
    "their.models.Tall.depth = %DEPTH  # mine.gin:6",
    "their_data.mixture.rate = 2.0  # mine.gin:8",
  ):
    assert line in lines
  assert "config.PalmConfig" not in configuration.effective_text()
  assert "NUM_LAYERS" not in configuration.macros


def test_a_part_that_commands_once_took_is_that_of_their_config_now(here):
  mine = write(
    here,
    "mine.gin",
    "import their\n"
    "from palm_mtf import evaluate\n"
    "from palm_mtf import train\n"
    "train.train.data = @their.Data()\n"
    "evaluate.evaluate.data = @their.Data()\n",
  )
  for command in ("train", "evaluate"):
    text = load(command, [RECIPE, mine], [DIR]).effective_text()
    assert "config.Config.data = @their.Data()" in text
    assert "DataConfig" not in text


def test_a_scope_counts_where_a_reference_opens_it(here):
  mine = write(
    here,
    "mine.gin",
    "config.Config.model = @deep/config.PalmConfig()\n"
    "deep/config.PalmConfig.num_layers = 8\n",
  )
  text = load("train", [RECIPE, mine], [DIR]).effective_text()
  assert "deep/config.PalmConfig.num_layers = 8  # mine.gin:2\n" in text


PALM_PARAMETERS = (
  "num_layers, d_model, num_heads, d_kv, d_ff, vocab_size, sequence_length, "
  "norm, block, attention, activation_dtype, remat."
)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (
      "NUM_LAYER = 3",
      'unknown macro NUM_LAYER (did you mean "NUM_LAYERS"?) in mine.gin:1; '
      "see gin/runs/settings.gin",
    ),
    ("QQQ = 3", "unknown macro QQQ in mine.gin:1; see gin/runs/settings.gin"),
    (
      "config.PalmConfig.num_layer = 3",
      "config.PalmConfig.num_layer = 3 (mine.gin:1): config.PalmConfig has no "
      'parameter "num_layer" (did you mean "num_layers"?). Parameters: '
      + PALM_PARAMETERS,
    ),
    (
      "config.PalmConfig.num_layers = 3",
      "config.PalmConfig.num_layers = 3 (mine.gin:1): this parameter has a "
      "macro; set NUM_LAYERS = 3 instead.",
    ),
    (
      "from palm_mtf import config as c\nc.PalmConfig.num_layers = 3",
      "c.PalmConfig.num_layers = 3 (mine.gin:2): this parameter has a macro; "
      "set NUM_LAYERS = 3 instead.",
    ),
    (
      "config.PalmConfg.norm = 'x'",
      'config.PalmConfg.norm = "x" (mine.gin:1): has no effect, because '
      "nothing in this run uses config.PalmConfg (did you mean "
      '"config.PalmConfig"?).',
    ),
    (
      "deep/config.PalmConfig.num_layers = 8",
      "deep/config.PalmConfig.num_layers = 8 (mine.gin:1): has no effect, "
      'because nothing in this run uses scope "deep".',
    ),
    (
      "foo.bar.x = 1",
      'foo.bar.x = 1 (mine.gin:1): no import provides "foo"; import it, or set '
      "a macro of runs/settings.gin instead.",
    ),
    (
      "confg.PalmConfig.norm = 1",
      'confg.PalmConfig.norm = 1 (mine.gin:1): no import provides "confg" '
      '(did you mean "config"?); import it, or set a macro of '
      "runs/settings.gin instead.",
    ),
    (
      "config.Config.model = @foo.Model()",
      "config.Config.model = @foo.Model() (mine.gin:1): no import provides "
      '"foo"; import it, or set a macro of runs/settings.gin instead.',
    ),
    (
      "config.Config.modle = @config.PalmConfig()",
      "config.Config.modle = @config.PalmConfig() (mine.gin:1): config.Config "
      'has no parameter "modle" (did you mean "model"?). Parameters: model, '
      "mesh_layout, optimizer, data, run, pods, evaluation, decode, "
      "fault_tolerance.",
    ),
    (
      "from their import config",
      'mine.gin:1: from their import config: "config" is already '
      "palm_mtf.config (runs/settings.gin:5); import it as another name.",
    ),
    (
      "D_MODEL = %WIDHT",
      "D_MODEL = %WIDHT (mine.gin:1): WIDHT is not set; pass --gin.WIDHT=...",
    ),
    (
      "D_MODEL = %D_FFF",
      "D_MODEL = %D_FFF (mine.gin:1): D_FFF is not set (did you mean "
      '"D_FF"?); pass --gin.D_FFF=...',
    ),
    (
      "D_MODEL = [%D_FF]\nD_FF = {'a': %D_MODEL}",
      'D_FF = {"a": %D_MODEL} (mine.gin:2): macros refer to each other in a '
      "circle: D_MODEL -> D_FF -> D_MODEL.",
    ),
    (
      "SEED = %gin.REQUIRED",
      "SEED = %gin.REQUIRED (mine.gin:1): leave the line out; a macro that is "
      "required and not set is reported.",
    ),
    (
      "include 'models/palm_9b.gin'",
      'mine.gin:1: include "models/palm_9b.gin": no such file (did you mean '
      '"models/palm_8b.gin"?). Looked in the current folder and the '
      "package's gin folder.",
    ),
  ],
)
def test_what_would_have_no_effect_is_refused(here, text, message):
  mine = write(here, "mine.gin", text)
  with pytest.raises(UserError) as error:
    load("train", [RECIPE, mine], [DIR])
  assert str(error.value) == message


def test_a_misspelt_macro_on_the_command_line_is_refused():
  with pytest.raises(UserError) as error:
    load("train", [RECIPE], [DIR, "NUM_LAYER=3"])
  assert str(error.value) == (
    'unknown macro NUM_LAYER (did you mean "NUM_LAYERS"?) on the command '
    "line; see gin/runs/settings.gin"
  )


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ([RECIPE], "MODEL_DIR is not set; pass --gin.MODEL_DIR='\"...\"'"),
    (
      ["recipes/palm_8b.gin"],
      "MODEL_DIR and TEXT_FILES are not set; pass --gin.MODEL_DIR='\"...\"' "
      "--gin.TEXT_FILES='\"...\"'",
    ),
  ],
)
def test_a_macro_that_is_not_set_is_named(files, message):
  with pytest.raises(UserError) as error:
    load("train", files)
  assert str(error.value) == message


def test_many_macros_that_are_not_set_are_counted():
  recipe, texts = "recipes/palm_8b.gin", 'TEXT_FILES="x"'
  places = origins(load("evaluate", [recipe], [DIR, texts])).values()
  count = sum(not place.startswith("runs/") for place in places)
  count -= 1  # TPU, which layouts set and runs/settings.gin too
  with pytest.raises(UserError) as error:
    load("evaluate")
  assert str(error.value) == (
    f"MODEL_DIR, NUM_LAYERS, D_MODEL and {count - 3} more are not set; start "
    "from a recipe, such as --gin_file=recipes/quickstart.gin"
  )


def test_only_a_message_about_a_macro_says_where_it_was_set():
  configuration = load("train", [RECIPE], [DIR, "D_KV=7"])
  assert configuration.located("D_KV = 7: no.") == (
    "D_KV = 7: no. (D_KV is set on the command line)"
  )
  assert configuration.located("D_FF = 1: no.") == (
    "D_FF = 1: no. (D_FF is set in models/palm_tiny.gin:7)"
  )
  assert configuration.located("no space left") == "no space left"


def test_a_run_file_sets_a_macro_of_its_own_unless_the_user_does(here):
  plain = load("data_statistics", [RECIPE], [DIR])
  assert values(plain)["OVERLAP_FILES"] is None
  assert origins(plain)["OVERLAP_FILES"].startswith("runs/data_statistics.gin:")
  mine = write(here, "mine.gin", "OVERLAP_FILES = 'a'\n")
  assert (
    values(load("data_statistics", [RECIPE, mine], [DIR]))["OVERLAP_FILES"]
    == "a"
  )
  train = load("train", [RECIPE, mine], [DIR])
  assert "OVERLAP_FILES" not in values(train)
  kept = write(here, "kept.gin", train.effective_text())
  again = load("data_statistics", [kept])
  assert without_origins(again) == without_origins(plain)
