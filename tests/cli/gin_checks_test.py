# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.gin of a stranger's run is read as data."""

import sys

import pytest

from palm_mtf.cli import gin_checks
from palm_mtf.cli.gin_files import load
from palm_mtf.cli.gin_statements import read_file
from palm_mtf.cli.main import main
from tests import processes
from tests.refusals import message_of

pytestmark = pytest.mark.usefixtures("here")


def check(tmp_path, *lines):
  path = tmp_path / "config.gin"
  path.write_text("".join(f"{line}\n" for line in lines))
  gin_checks.check_runs_no_code(read_file(path))


@pytest.mark.parametrize(
  "lines",
  [
    "SEED = 3\nPROMPTS = ['a', \"b\"]\nD_FF = %D_MODEL",
    "HEADERS = {'a': [1, (2.0, None)]}",
    "from __gin__ import dynamic_registration\n"
    "from palm_mtf.tasks import records\n"
    "from palm_mtf.tasks import palm_mixture\n"
    "records.places.folder = '/data'\n"
    "palm_mixture.books.files = %TEXT_FILES",
    # From an earlier version, which bound its own functions in gin.
    "from palm_mtf import config\nfrom palm_mtf import train\n"
    "train.train.model = @config.PalmConfig()\n"
    "config.PalmConfig.d_ff = %D_FF",
    "ModelConfig.d_ff = 64\nAdafactorConfig.learning_rate = 0.5",
  ],
)
def test_literals_of_macros_and_of_our_tasks_are_data(tmp_path, lines):
  check(tmp_path, lines)


@pytest.mark.parametrize(
  "lines",
  [
    "import subprocess",
    "from os import path",
    "import palm_mtfx.tasks",
    "A = @gin.singleton()",
    "A = [{1: @f}]",
    "A = %my_tasks.NAME",
    "from palm_mtf.tasks import code_execution as x\n"
    "SAMPLE_TOKENS = @x.subprocess.getoutput()",
    "from palm_mtf.tasks import records\n"
    "records.places.folder = @records.Path()",
    "from palm_mtf.tasks import code as c\nc.programs.allowed = True",
    "import palm_mtf.tasks.code\npalm_mtf.tasks.code.programs.secs = 9",
    'os.system.command = "true"',
    "ModelConfig.d_ff = [@f()]",
    "from palm_mtf.tasks import code_execution as x\n"
    "ModelConfig.d_ff = @x.subprocess.getoutput()",
  ],
)
def test_whatever_could_run_code_is_refused_by_its_line(tmp_path, lines):
  lines = ["SEED = 3", *lines.splitlines()]
  assert message_of(check, tmp_path, *lines) == (
    f"config.gin:{len(lines)}: {lines[-1]}: runs or permits code from "
    "the author of this run; if you trust the author, add --trust_config."
  )


def test_an_included_file_is_data_too(tmp_path):
  (tmp_path / "more.gin").write_text("import subprocess\n")
  said = message_of(check, tmp_path, "include 'more.gin'")
  assert said.startswith("more.gin:1: import subprocess: runs")


def test_a_run_is_checked_before_its_modules_and_files_of_the_user_are_not(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "of_a_stranger.py").write_text("raise SystemExit('it ran')\n")
  run = tmp_path / "config.gin"
  run.write_text("include 'recipes/quickstart.gin'\nimport of_a_stranger\n")
  directory = "MODEL_DIR='x'"
  said = message_of(load, "generate", [], [directory], model_dir=str(tmp_path))
  assert "import of_a_stranger: runs or permits" in said
  said = message_of(load("generate", [str(run)], [directory]).build)
  assert "SystemExit: it ran" in said
  run.write_text("include 'recipes/quickstart.gin'\nD_FF = 64\n")
  (tmp_path / "mine.gin").write_text("import json\nSEED = 5\n")
  settings = load(
    "generate", ["mine.gin"], [directory], model_dir=str(tmp_path)
  ).build()[1]
  assert (settings.model.d_ff, settings.run.seed) == (64, 5)


def test_a_model_dir_with_code_needs_trust(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "theirs.py").write_text(
    "print('imported')\ndef seed():\n  return 3\n"
  )
  (tmp_path / "x").mkdir()
  (tmp_path / "x" / "config.gin").write_text(
    "import theirs\ninclude 'recipes/quickstart.gin'\nSEED = @theirs.seed()\n"
  )
  flags = ["evaluate", "--model_dir=x", "--print_config"]
  assert main(flags) == 2
  assert capsys.readouterr() == (
    "",
    "palm_mtf: x/config.gin:1: import theirs: runs or permits code from "
    "the author of this run; if you trust the author, add --trust_config.\n",
  )
  assert main([*flags, "--trust_config"]) == 0
  # Text that the user's module prints does not go to stdout.
  out, err = capsys.readouterr()
  assert out.startswith("# palm_mtf evaluate ") and "imported" not in out
  assert err == "imported\n"


RECIPE = "recipes/quickstart.gin"
FUNCTIONS = """
import enum
import pathlib
import sys

import gin
import numpy as np

gin.constant("own.SIZE", 3)
gin.constant("own.PLACE", object())

class Kind(enum.IntEnum):
  SMALL = 2

class Plan:
  def __init__(self, layers=1):
    self.layers = layers

class UnreadableError(Exception):
  def __str__(self):
    raise ValueError

class Unreadable:
  def __repr__(self):
    raise UnreadableError

@gin.configurable
def needs(size=gin.REQUIRED):
  return size

def layers_of(plan=None):
  return plan.layers

def deeper(inner=None):
  return inner

def unreadable_error():
  raise UnreadableError  # whose message raises

def leave():
  sys.exit("no such size")

def chatter():
  print("chatter")
  return 3

def returning(name, value):
  def function():
    return value

  function.__name__ = function.__qualname__ = name
  return function

ITSELF = []
ITSELF.append(ITSELF)
RESULTS = dict(
  numpy_number=np.int64(3),
  array=np.array([[0, 8], [10, 16]]),
  path=pathlib.Path("texts") / "*.txt",
  kind=Kind.SMALL,
  itself=ITSELF,
  text="many",
  chip="v100",
  not_a_number=np.float32("nan"),
  a_set={1},
  unreadable=Unreadable(),
)
globals().update({name: returning(name, RESULTS[name]) for name in RESULTS})
"""


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory):
  """The module `own`, made only once, because gin keeps its registrations."""
  folder = tmp_path_factory.mktemp("own")
  (folder / "own.py").write_text(FUNCTIONS)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    yield folder / "own.py"
  sys.modules.pop("own", None)


def configure(here, *lines):
  """Returns the recipe's configuration with the lines of mine.gin."""
  text = "\n".join([f"include '{RECIPE}'", "import own", *lines])
  (here / "mine.gin").write_text(text)
  return load("train", ["mine.gin"], ["MODEL_DIR='run'"])


def refusal(here, *lines):
  configuration = configure(here, *lines)
  # The command adds where the macro was set.
  return configuration.add_location(message_of(configuration.build))


def line_of(own, text):
  """Returns the number of the line in own.py that has the text."""
  lines = own.read_text().splitlines()
  (number,) = [i for i, line in enumerate(lines, 1) if text in line]
  return number


@pytest.mark.parametrize(
  ("macro", "function", "read"),
  [
    ("NUM_LAYERS", "numpy_number", 3),
    ("NUM_LAYERS", "kind", 2),
    ("GLOBAL_BATCH_SIZE", "array", [[0, 8], [10, 16]]),
    ("TEXT_FILES", "path", "texts/*.txt"),
  ],
)
def test_numbers_arrays_and_paths_of_libraries_are_taken(
  here, macro, function, read
):
  configuration = configure(here, f"{macro} = @own.{function}()")
  value = configuration._compute_values()[macro]
  assert (value, type(value)) == (read, type(read))
  configuration.build()


@pytest.mark.parametrize(
  ("lines", "layers"),
  [
    ("NUM_LAYERS = %own.SIZE", 3),
    ("NUM_LAYERS = @own.SIZE/constant()", 3),
    ("MY/macro.value = 4\nNUM_LAYERS = @MY/gin.macro()", 4),
    (
      "one/singleton.constructor = @own.Plan\nown.Plan.layers = 5\n"
      "own.layers_of.plan = @one/singleton()\nNUM_LAYERS = @own.layers_of()",
      5,
    ),
    ("own.needs.size = 6\nNUM_LAYERS = @own.needs()", 6),
  ],
)
def test_gins_own_functions_are_taken_with_and_without_their_module(
  here, lines, layers
):
  _, config = configure(here, lines).build()
  assert config.model.num_layers == layers


def test_a_chip_has_its_rates_however_its_name_is_given(here):
  _, plain = configure(here, 'CHIP = "v100"').build()
  assert plain.hardware.chip_memory_bytes
  for lines in ("CHIP = @own.chip()", "CHIP = %MINE\nMINE = @own.chip()"):
    _, config = configure(here, lines).build()
    assert config.hardware == plain.hardware


@pytest.mark.parametrize(
  ("value", "message", "line"),
  [
    (
      "@own.layers_of()",
      "AttributeError: 'NoneType' object has no attribute 'layers'",
      "return plan.layers",
    ),
    ("@own.unreadable_error()", "UnreadableError", "raise UnreadableError  #"),
    ("@own.leave()", "SystemExit: no such size", "sys.exit("),
  ],
)
def test_an_exception_is_one_line_with_macro_function_and_their_places(
  here, own, value, message, line
):
  place = f"{own}:{line_of(own, line)}, in {value[5:-2]}"
  assert refusal(here, "SEED = 1", f"NUM_LAYERS = {value}") == (
    f"NUM_LAYERS = {value} (mine.gin:4): {message} ({place})"
  )


NO_DATA = "return a number, a text, None, or a list, tuple or dict of these."


@pytest.mark.parametrize(
  ("lines", "message"),
  [
    (
      ["NUM_LAYERS = @own.needs()"],
      "RuntimeError: Required bindings for `needs` not provided in config: "
      "['size']",
    ),
    (["NUM_LAYERS = @own.nothing()"], "has no attribute nothing"),
    (["own.nothing.size = 1"], "has no attribute nothing"),
    (["NUM_LAYERS = %own.NOTHING"], "NOTHING"),
    (["own.needs.length = 3"], "doesn't have a parameter named 'length'"),
    (
      ["own.deeper.inner = @own.deeper()", "NUM_LAYERS = @own.deeper()"],
      "RecursionError: maximum recursion depth exceeded",
    ),
    (
      ["one/singleton.constructor = 3", "NUM_LAYERS = @one/gin.singleton()"],
      "The constructor for singleton 'one' is not callable",
    ),
    # The macro whose function fails is named, not one that refers to it.
    (["D_MODEL = %MINE", "MINE = @own.leave()"], "SystemExit: no such size"),
    (
      ["NUM_LAYERS = @own.layers_of"],
      "is the function or class itself; write @own.layers_of() to call it.",
    ),
    (["NUM_LAYERS = @own.Plan()"], f"gives a Plan; {NO_DATA}"),
    (["LAYOUT = @own.unreadable()"], f"gives a Unreadable; {NO_DATA}"),
    (["PROMPTS = [@own.a_set()]"], f"gives a set; {NO_DATA}"),
    (["PROMPTS = @own.itself()"], "contains itself."),
    (["NUM_LAYERS = %own.PLACE"], f"gives a object; {NO_DATA}"),
  ],
)
def test_what_gives_no_data_is_one_line_with_the_setting(here, lines, message):
  said = refusal(here, *lines)
  assert said.startswith(f"{lines[-1]} (mine.gin:{2 + len(lines)}): ")
  assert message in said


@pytest.mark.parametrize(
  ("line", "message"),
  [
    *(
      (
        f"NUM_LAYERS = @own.{function}()",
        f"NUM_LAYERS = {value}: give a whole number of at least 1. (NUM_LAYERS "
        "is set in mine.gin:3)",
      )
      for function, value in (("text", "'many'"), ("not_a_number", "nan"))
    ),
    *(
      (
        f'CACHE_DIR = "{text}"',
        "has a character that neither a path nor a text",
      )
      for text in (r"a\0b", r"\ud800")
    ),
  ],
)
def test_data_that_does_not_fit_is_refused_as_if_it_were_written_there(
  here, line, message
):
  assert message in refusal(here, line)


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("bad", "raise KeyError('x')", "KeyError: 'x' (bad.py:1, in <module>)"),
    ("cut", "x = (", "SyntaxError: '(' was never closed (cut.py, line 1)"),
    ("end", "exit(3)", "SystemExit: 3 (end.py:1, in <module>)"),
    ("lacks", "import no_such", "No module named 'no_such'; is it installed?"),
    ("absent", None, "No module named 'absent'; is it installed?"),
  ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
  here, monkeypatch, name, text, message
):
  if text:
    (here / f"{name}.py").write_text(text)
  monkeypatch.syspath_prepend(here)
  said = refusal(here, f"import {name}")
  assert said == f"mine.gin:3: import {name}: {message}"


def test_print_config_computes_values_and_prints_how_they_are_set(here, capsys):
  configure(here, "NUM_LAYERS = @own.chatter()")
  flags = ["--gin_file=mine.gin", "--gin.MODEL_DIR='run'", "--print_config"]
  assert main(["train", *flags]) == 0
  out, err = capsys.readouterr()
  assert "\nNUM_LAYERS = @own.chatter()  # mine.gin:3\n" in out
  assert (err, "chatter\n" in out) == ("chatter\n", False)
  configure(here, "NUM_LAYERS = @own.leave()")
  assert main(["train", *flags]) == 2
  out, err = capsys.readouterr()
  assert (out, err.count("\n")) == ("", 1)


MODULE = """
import sys

import tensorflow as tf


def layers():
  # As any program finds it, and as our own modules import it.
  assert tf is sys.modules["tensorflow"]
  assert tf.__spec__.loader.__class__.__name__ == "SourceFileLoader"
  assert "keras" not in sys.modules
  return int(tf.constant(3))
"""


@pytest.fixture
def print_config(here, monkeypatch):
  """Prints the configuration in a process that calls a module's function."""

  def run(module):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    (here / "mine.py").write_text(module)
    (here / "mine.gin").write_text(
      f"include '{RECIPE}'\nimport mine\nNUM_LAYERS = @mine.layers()"
    )
    return processes.python(
      *("-m", "palm_mtf", "train", "--gin_file=mine.gin"),
      *("--gin.MODEL_DIR='run'", "--print_config"),
    )

  return run


def test_a_module_of_the_user_imports_tensorflow_without_its_notices(
  print_config,
):
  done = print_config(MODULE)
  assert (done.returncode, done.stderr) == (0, "")
  assert "\nNUM_LAYERS = @mine.layers()" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("module", ["mesh_tensorflow", "seqio"])
def test_modules_that_import_tensorflow_print_no_notices(module, print_config):
  done = print_config(f"import {module}\ndef layers():\n  return 3\n")
  assert done.returncode == 0, done.stderr
  assert "oneDNN" not in done.stderr
