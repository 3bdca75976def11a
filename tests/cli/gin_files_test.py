# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict gin: precedence, origins, the effective text and every refusal."""

import dataclasses
import importlib
import os
import pathlib
import re

import pytest

from palm_mtf.cli.gin_files import load, read_chip
from palm_mtf.config import Config
from palm_mtf.config.macros import macros_of
from palm_mtf.machine.cache_folder import measured_hardware, write_cached
from tests import processes
from tests.refusals import message_of

pytestmark = pytest.mark.usefixtures("here")

RECIPE = "recipes/quickstart.gin"
DIR = 'MODEL_DIR="runs/x"'
COMMANDS = ["evaluate", "generate", "score", "train"]


def write(here, name: str, text: str) -> str:
  (here / name).write_text(text, encoding="utf-8")
  return name


def values(configuration) -> dict[str, object]:
  return {name: each.value for name, each in configuration.macros.items()}


def origins(configuration) -> dict[str, str]:
  return {name: each.origin for name, each in configuration.macros.items()}


def without_origins(configuration) -> list[str]:
  """Returns the statements of the text, without first line and origins."""
  lines = configuration.format_effective().splitlines()[1:]
  return [line.partition("  # ")[0] for line in lines]


def refusal(*files: str, bindings: tuple[str, ...] = (DIR,)) -> str:
  return message_of(load, "train", files, bindings)


PARALLEL = "BLOCK = 'parallel'\nATTENTION = 'multi_query'\nNUM_LAYERS = 4\n"


@pytest.mark.parametrize(
  ("serial", "message"),
  [
    (
      "NUM_KV_HEADS = 1",
      "NUM_KV_HEADS = 1 and ATTENTION = 'multi_query': only \"grouped_query\" "
      "has this setting; set NUM_KV_HEADS = None, or ATTENTION = "
      '"grouped_query". (NUM_KV_HEADS is set in mine.gin:1, ATTENTION is set '
      "in parallel.gin:2)",
    ),
    (
      "BRANCH_NORM = True",
      "BRANCH_NORM = True and BLOCK = 'parallel': only a serial block adds the "
      "results of attention and MLP one by one; set BRANCH_NORM = False, or "
      'BLOCK = "serial". (BRANCH_NORM is set in mine.gin:1, BLOCK is set in '
      "parallel.gin:1)",
    ),
    (
      "LAYERS = '2*window, global'\n"
      "VARIANTS = {'window': {'ATTENTION_WINDOW': 512}, 'global': {}}",
      "LAYERS = '2*window, global' and NUM_LAYERS = 4: a pattern of 3 layers "
      'does not divide the model\'s; set LAYERS = "2*window, global, window", '
      "or another NUM_LAYERS. (LAYERS is set in mine.gin:1, NUM_LAYERS is set "
      "in parallel.gin:3)",
    ),
  ],
)
def test_settings_that_contradict_are_told_with_both_places_and_both_ways_out(
  serial, message, here
):
  files = [write(here, "mine.gin", serial)]
  files.append(write(here, "parallel.gin", PARALLEL))
  wrong = load("train", [RECIPE, *files], (DIR,))
  assert wrong.add_location(message_of(wrong.build)) == message


def model_in(*files: str):
  """Returns the model that the files give without a recipe."""
  return load("plan", [*files, "layouts/tpu_v4_8.gin"]).build()[1].model


LLAMA, GPT3 = "models/llama_tiny.gin", "models/gpt3_tiny.gin"


@pytest.mark.parametrize(
  ("files", "model"),
  [
    ([RECIPE, LLAMA], LLAMA),
    ([LLAMA, RECIPE], "models/palm_tiny.gin"),
    ([RECIPE, GPT3, LLAMA], LLAMA),
    ([RECIPE, LLAMA, GPT3, "recipes/finetune.gin"], "models/palm_tiny.gin"),
    (["relu.gin", LLAMA], LLAMA),
    (["bound.gin", RECIPE], "models/palm_tiny.gin"),
    (["gpt3.gin", LLAMA], LLAMA),
  ],
)
def test_a_file_of_a_model_replaces_the_whole_model_of_earlier_files(
  files, model, here
):
  """Also settings that the file leaves at their defaults."""
  write(here, "relu.gin", f"include '{RECIPE}'\nMLP = 'relu'\nSEED = 9\n")
  write(here, "bound.gin", "ModelConfig.mlp = 'relu'\n")
  write(here, "gpt3.gin", f"include '{RECIPE}'\ninclude '{GPT3}'\n")
  found = load("train", files, [DIR, "TASK=None", "TEXT_FILES='a.txt'"])
  assert found.build()[1].model == model_in(model)
  if "relu.gin" in files:  # only the model is replaced
    assert values(found)["SEED"] == 9


def test_settings_after_the_file_of_a_model_hold(here):
  mine = write(here, "mine.gin", "MLP = 'relu'\n")
  found = load("train", [RECIPE, LLAMA, mine], [DIR, "ROTARY_BASE=5e5"])
  assert found.build()[1].model == dataclasses.replace(
    model_in(LLAMA), mlp="relu", rotary_base=5e5
  )


def test_a_layout_of_tpus_brings_their_chip(here):
  files = [LLAMA, "layouts/tpu_v3_8.gin"]
  assert load("plan", files).build()[1].run.chip == "tpu_v3"
  given = load("plan", files, ["CHIP='tpu_v5p'"]).build()[1].run
  assert given.chip == "tpu_v5p"
  assert message_of(load, "plan", [LLAMA, "layouts/single.gin"]) == (
    "CHIP is not set; pass --gin.CHIP=..."
  )


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


def test_what_a_file_sets_after_an_include_holds(here):
  mine = write(here, "mine.gin", f"SEED = 4\ninclude '{RECIPE}'\nD_FF = 5\n")
  got = values(load("train", [mine], [DIR]))
  recipe = values(load("train", [RECIPE], [DIR]))
  assert recipe["SEED"] != 4
  assert got == {**recipe, "D_FF": 5}


def test_a_command_needs_only_the_macros_that_it_uses(here):
  files = ["models/palm_tiny.gin", "data/python_stdlib.gin"]
  configuration = load("data cache", files, [DIR])
  assert "NUM_LAYERS" in configuration.macros
  assert "MESH_SHAPE" not in configuration.macros
  assert "LEARNING_RATE" not in configuration.macros


def test_the_effective_text_begins_as_gin_needs_it_and_shows_origins():
  text = load(
    "train", [RECIPE], [DIR], asked="palm_mtf train x"
  ).format_effective()
  lines = text.splitlines()
  assert lines[:4] == [
    "# palm_mtf train x",
    "from __gin__ import dynamic_registration",
    "",
    'MODEL_DIR = "runs/x"  # command line',
  ]
  assert re.search(r"\nNUM_LAYERS = \d+  # models/palm_tiny.gin:3\n", text)
  assert "\nSPIKE_REWINDS = 20  # default\n" in text
  assert all("  # " in line for line in lines[3:])


def test_plain_gin_reads_the_effective_text():
  config = importlib.import_module("gin.config")
  text = load("train", [RECIPE], [DIR]).format_effective()
  config.clear_config()
  config.parse_config(text)
  assert config.query_parameter("%D_FF") == 512
  config.clear_config()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_effective_text_gives_the_same_configuration_again(here, command):
  prompts = '["a \\" b", "\\u00e4 # \\n", \'%x\']'
  first = load(
    command, [RECIPE], [DIR, f"PROMPTS={prompts}", "D_MODEL=%D_FF", "D_FF=64"]
  )
  text = first.format_effective()
  second = load(command, [write(here, "config.gin", text)])
  assert without_origins(second) == without_origins(first)
  assert values(second) == values(first)
  # Settings that follow from CHIP are commented out in the file.
  assert {
    origin
    for name, origin in origins(second).items()
    if not name.startswith("CHIP_")
  } <= {f"config.gin:{i}" for i, _ in enumerate(text.splitlines(), 1)}


def test_own_macros_functions_and_imports_stay_in_the_text(here):
  mine = write(
    here,
    "mine.gin",
    "from __gin__ import dynamic_registration\nimport their.models\n"
    "import tasks_of_mine\nfrom their import data as their_data\n"
    "NUM_LAYERS = @their.models.depth()\n"
    "their.models.depth.most = %DEPTH\nDEPTH = 9\n"
    "their_data.mixture.rate = 2.0\nD_MODEL = %DEPTH\n",
  )
  lines = load("train", [RECIPE, mine], [DIR]).format_effective().splitlines()
  for number, line in enumerate((here / mine).read_text().splitlines(), 1):
    assert (f"{line}  # mine.gin:{number}" if "=" in line else line) in lines


@pytest.mark.parametrize(
  "line",
  [
    "AdafactorConfig.learning_rate = 0.5",
    "config.AdafactorConfig.learning_rate = 0.5",
    "AdafactorConfig:\n  learning_rate = 0.5",
    "from palm_mtf import config as c\nc.AdafactorConfig.learning_rate = 0.5",
    "import my\nAdafactorConfig.learning_rate = @my.rate()",
  ],
)
def test_a_parameter_of_a_class_of_settings_sets_its_macro(
  here, monkeypatch, line
):
  monkeypatch.syspath_prepend(str(here))
  write(here, "my.py", "def rate():\n  return 0.5\n")
  mine = write(here, "mine.gin", line)
  configuration = load("train", [RECIPE, mine], [DIR])
  assert configuration.build()[1].optimizer.learning_rate == 0.5
  assert "\nLEARNING_RATE = " in configuration.format_effective()
  assert origins(configuration)["LEARNING_RATE"].startswith("mine.gin:")
  # The last setting wins, in either form.
  bindings = [DIR, "LEARNING_RATE=0.25"]
  last = load("train", [RECIPE, mine], bindings)
  assert values(last)["LEARNING_RATE"] == 0.25
  last = load(
    "train", [RECIPE], [*bindings, "AdafactorConfig.learning_rate=2."]
  )
  assert values(last)["LEARNING_RATE"] == 2.0


def test_the_loss_s_settings_may_be_bound_as_the_optimizer_s(here):
  """Earlier versions had them in AdafactorConfig."""
  mine = "AdafactorConfig.z_loss = 0.5\nAdafactorConfig.dropout = 0.25"
  loaded = load("train", [RECIPE, write(here, "mine.gin", mine)], [DIR])
  loss = loaded.build()[1].loss
  assert (loss.z_loss, loss.dropout) == (0.5, 0.25)
  refusal = message_of(load, "train", [RECIPE], ["AdafactorConfig.d_ff=64"])
  assert "set D_FF = 64 instead" in refusal


@pytest.mark.parametrize(
  ("name", "hint"),
  [("NUM_LAYER", ' (did you mean "NUM_LAYERS"?)'), ("QQQ", "")],
)
def test_an_unknown_macro_is_refused_wherever_it_is_set(here, name, hint):
  mine = write(here, "mine.gin", f"{name} = 3")
  for place, message in (
    ("in mine.gin:1", refusal(RECIPE, mine)),
    ("on the command line", refusal(RECIPE, bindings=(DIR, f"{name}=3"))),
  ):
    assert message == (
      f"unknown macro {name}{hint} {place}; --print_config lists all of them"
    )


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (
      "train/ModelConfig.num_layers = 3",
      "settings have no scopes; set NUM_LAYERS = 3 instead.",
    ),
    (
      "RunConfig.seed = 3",
      "RunConfig and FewShotConfig read SEED; set SEED = 3 instead.",
    ),
    (
      "DataConfig.num_layers = 3",
      "is not bound in gin; set NUM_LAYERS = 3 instead.",
    ),
    (
      "PalmConfg.num_layers = 3",
      'no import provides "PalmConfg"; import it, or set NUM_LAYERS = 3 '
      "instead.",
    ),
    (
      "ModelConfig.num_layers = @ModelConfig()",
      'no import provides "ModelConfig"; import it, or set NUM_LAYERS = '
      "@ModelConfig() instead.",
    ),
    (
      "from palm_mtf import config\nconfig.ModelConfig.num_layer = 3",
      'is not bound in gin; set a macro instead (did you mean "NUM_LAYERS"?).',
    ),
    pytest.param(
      "import their\nfrom palm_mtf import train\n"
      "train.train.model = @their.model()",
      "is not bound in gin; set a macro instead.",
      id="what earlier versions bound, to the user's own function",
    ),
    (
      "import their\nther.bar.x = 1",
      'no import provides "ther" (did you mean "their"?); import it, or set a '
      "macro instead.",
    ),
    (
      "D_MODEL = %D_FFF",
      'D_FFF is not set (did you mean "D_FF"?); pass --gin.D_FFF=...',
    ),
    (
      'D_MODEL = [%D_FF]\nD_FF = {"a": %D_MODEL}',
      "macros refer to each other in a circle: D_MODEL -> D_FF -> D_MODEL.",
    ),
    (
      "import their\ntheir.bar.x = [%REQUIRED]",
      "leave the line out; a macro that is required and not set is reported.",
    ),
  ],
)
def test_a_last_line_that_would_have_no_effect_is_refused(here, text, message):
  lines = text.splitlines()
  assert refusal(RECIPE, write(here, "mine.gin", text)) == (
    f"{lines[-1]} (mine.gin:{len(lines)}): {message}"
  )


def test_an_import_or_include_that_cannot_be_is_named(here):
  for text, message in (
    (
      "import their.data\nfrom mine import data as their",
      'from mine import data as their: "their" is already their (mine.gin:1); '
      "import it as another name.",
    ),
    (
      "\ninclude 'models/palm_9b.gin'",
      'include "models/palm_9b.gin": no such file (did you mean '
      '"models/palm_8b.gin"?). Looked in the current folder and the '
      "package's gin folder.",
    ),
  ):
    mine = write(here, "mine.gin", text)
    assert refusal(RECIPE, mine) == f"mine.gin:2: {message}"


def test_macros_that_are_not_set_are_named():
  assert refusal("recipes/palm_8b.gin", bindings=()) == (
    "MODEL_DIR and TEXT_FILES are not set; pass --gin.MODEL_DIR='\"...\"' "
    "--gin.TEXT_FILES='\"...\"'"
  )


def test_a_list_as_the_key_of_a_dict_is_one_line(here):
  mine = write(here, "mine.gin", "PROMPT_HEADERS = {%A: 'x'}\nA = [1]\n")
  assert message_of(load("evaluate", [RECIPE, mine], [DIR]).build) == (
    'PROMPT_HEADERS = {%A: "x"} (mine.gin:1): a list or a dict cannot be the '
    "key of a dict."
  )


def test_many_macros_that_are_not_set_are_counted():
  defaults = macros_of(Config, {}).values()
  count = 1 + [*defaults].count(dataclasses.MISSING)  # MODEL_DIR
  assert message_of(load, "evaluate") == (
    f"MODEL_DIR, NUM_LAYERS, D_MODEL and {count - 3} more are not set; start "
    "from a recipe, such as --gin_file=recipes/quickstart.gin"
  )


def test_a_command_has_its_defaults_unless_the_user_sets_them(here):
  plain = load("evaluate", [RECIPE], [DIR])
  assert values(plain)["TEMPERATURE"] == 0.0
  assert origins(plain)["TEMPERATURE"].startswith("defaults/evaluate.gin:")
  assert values(load("generate", [RECIPE], [DIR]))["TEMPERATURE"] == 0.7
  mine = write(here, "mine.gin", "TEMPERATURE = 0.5\n")
  given = load("evaluate", [RECIPE, mine], [DIR])
  assert values(given)["TEMPERATURE"] == 0.5
  # Training does not set it, because commands that decode do.
  train = load("train", [RECIPE, mine], [DIR])
  assert "TEMPERATURE" not in values(train)
  kept = write(here, "kept.gin", train.format_effective())
  assert without_origins(load("evaluate", [kept])) == without_origins(plain)


def hardware(*given):
  return load("train", [RECIPE], [DIR, *given]).build()[1].hardware


def test_a_chip_brings_its_rates_and_the_user_has_the_last_word(here):
  """config.gin only has comments for the settings that followed from CHIP."""
  assert hardware('CHIP="tpu_v4"').chip_watts == 378.5
  mine = load("train", [RECIPE], [DIR, 'CHIP="tpu_v4"', "CHIP_WATTS=500"])
  found = mine.build()[1].hardware
  assert (found.chip_watts, found.chip_memory_bytes) == (500, 32 * 2**30)
  text = mine.format_effective()
  assert "# CHIP_MEMORY_BYTES = 34359738368  # hardware/tpu_v4.gin" in text
  file = write(here, "config.gin", text)
  again = load("train", [file], ['CHIP="a100"']).build()[1]
  assert again.hardware.chip_bfloat16_flops == 312e12
  assert again.hardware.chip_watts == 500


@pytest.mark.parametrize("chip", ["../models/palm_8b", "nochip", 3, None, ""])
def test_what_names_no_file_brings_nothing(chip):
  assert read_chip(chip) == {}


@pytest.fixture
def measured(tmp_path, monkeypatch):
  """The file of this machine's rates."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert hardware().chip_memory_bandwidth is None
  assert measured_hardware().startswith(f"{tmp_path}/palm_mtf/hardware/")
  write_cached(measured_hardware(), b"CHIP_MEMORY_BANDWIDTH = 2e10\n")
  assert hardware().chip_memory_bandwidth == 2e10
  return pathlib.Path(measured_hardware())


@pytest.mark.parametrize(
  "content",
  [b"", bytes(30), b"CHIP_MEMORY_BAND", b"\xff\xfe", b"X = 1 = 2", b"@@("],
)
def test_a_damaged_file_of_rates_ends_no_command(content, measured, caplog):
  measured.write_bytes(content)
  assert hardware().chip_memory_bandwidth is None
  if content:
    (line,) = caplog.messages
    assert line.startswith(f"{measured} does not hold measured rates (")
    assert line.endswith("measure them again: palm_mtf plan --calibrate")


def test_rates_of_another_user_are_not_read(measured, monkeypatch, caplog):
  monkeypatch.setattr(os, "geteuid", lambda: 12345)
  assert hardware().chip_memory_bandwidth is None
  (line,) = caplog.messages
  assert "palm_mtf belongs to another user; set XDG_CACHE_HOME" in line


_READS = """
import os, sys
from palm_mtf.cli.gin_files import read_chip
os.setuid(65534)
print(read_chip("measured"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_cache_that_may_not_be_searched_is_like_none(measured, tmp_path):
  tmp_path.chmod(0o700)
  run = processes.python("-c", _READS)
  assert (run.returncode, run.stdout) == (0, "{}\n"), run.stderr


def test_rates_are_of_the_cores_that_the_process_may_use(measured, monkeypatch):
  monkeypatch.setattr("palm_mtf.machine.cache_folder.usable_cores", lambda: 99)
  assert hardware().chip_memory_bandwidth is None


@pytest.mark.parametrize(
  ("bindings", "message"),
  [
    (
      ["OPTIMIZER='adamv'"],
      "OPTIMIZER = \"adamv\" (command line): choose one of 'adafactor', "
      "'adamw', 'muon', 'sgd' (did you mean \"adamw\"?).",
    ),
    (
      ["OPTIMIZER=%MINE", "MINE=[]"],
      "OPTIMIZER = %MINE (command line): choose one of",
    ),
    (
      ["BETA2_EXPONENT=0.8"],
      "BETA2_EXPONENT = 0.8 (command line): OPTIMIZER = 'adamw' has no such "
      'setting (did you mean "BETA2"?); leave it out.',
    ),
    (
      ["MOMENTUM=0.9"],
      "MOMENTUM = 0.9 (command line): OPTIMIZER = 'adamw' has",
    ),
    (["BETA2=2.0"], "BETA2 = 2.0: give a number from 0.0 to 0.999999."),
  ],
)
def test_an_optimizer_has_only_its_own_settings(bindings, message):
  def build():
    load("train", [RECIPE, "optim/adamw.gin"], [DIR, *bindings]).build()

  assert message_of(build).startswith(message)


def test_a_user_s_file_in_any_folder_sets_only_what_the_optimizer_has(
  tmp_path_factory,
):
  mine = str(tmp_path_factory.mktemp("elsewhere") / "mine.gin")
  pathlib.Path(mine).write_text("MOMENTUM = 0.9\n")
  assert message_of(load, "train", [RECIPE, mine], [DIR]).startswith(
    f"MOMENTUM = 0.9 ({mine}:1): OPTIMIZER = 'adafactor' has no such setting"
  )


def test_a_saved_configuration_has_only_the_optimizer_s_settings(here):
  loaded = load("train", [RECIPE, "optim/muon.gin"], [DIR])
  text = loaded.format_effective()
  assert re.search("^MOMENTUM = 0.95  # optim/muon.gin:", text, re.M)
  assert "BETA2_EXPONENT" not in text
  again = load("train", [write(here, "saved.gin", text)])
  assert again.build() == loaded.build()
