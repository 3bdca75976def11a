# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statements keep their values and origins; a wrong line is named."""

import pytest

from palm_mtf.cli.gin_statements import (
  Macro,
  Reference,
  format_value,
  names_in,
  read_command_line,
  read_file,
)
from tests.refusals import message_of

pytestmark = pytest.mark.usefixtures("here")


def read(here, text: str):
  path = here / "mine.gin"
  path.write_text(text, encoding="utf-8")
  return read_file(path)


def test_settings_keep_their_origins_through_includes(here):
  (here / "inner.gin").write_text("# A header.\nB = 2\n")
  settings = read(here, "A = 1\ninclude 'inner.gin'\n\nC = [\n  3,\n]\nD = 4\n")
  assert [(str(each), each.origin) for each in settings] == [
    ("A = 1", "mine.gin:1"),
    ("B = 2", "inner.gin:2"),
    ("C = [3]", "mine.gin:4"),
    ("D = 4", "mine.gin:7"),
  ]


def test_blocks_scopes_and_long_macros_are_ordinary_settings(here):
  settings = read(
    here,
    "config.ModelConfig:\n  norm = 'rms_norm'\n  d_kv = 8\n"
    "teacher/config.ModelConfig.d_ff = 1\ndeep/SIZE = 2\n"
    "SIZE/gin.macro.value = 3\n",
  )
  assert [each.key for each in settings] == [
    "config.ModelConfig.norm",
    "config.ModelConfig.d_kv",
    "teacher/config.ModelConfig.d_ff",
    "deep/SIZE",
    "SIZE",
  ]


def test_imports_say_what_their_name_stands_for(here):
  imports = read(
    here,
    "from __gin__ import dynamic_registration\nimport a.b\nimport a.b as c\n"
    "from a import b\nfrom a import b as d\n",
  )
  assert [(each.name, each.path, each.module) for each in imports] == [
    ("a", "a", "a.b"),
    ("c", "a.b", "a.b"),
    ("b", "a.b", "a.b"),
    ("d", "a.b", "a.b"),
  ]


def test_references_and_macros_stay_names(here):
  (setting,) = read(here, "A = [@x.f, {'k': (@s/y.g(), %B)}]")
  assert list(names_in(setting.value)) == [
    Reference("", "x.f", False),
    Reference("s", "y.g", True),
    Macro("B"),
  ]
  assert str(setting) == 'A = [@x.f, {"k": (@s/y.g(), %B)}]'


@pytest.mark.parametrize(
  "value",
  [
    *(0, -1.5, 1e-4, 1e300, True, None, b"bytes"),
    *("", "both \" and '", "it's", "back\\slash \n\t\x00\u2028", "\U0001f600"),
    *([], (), (1,), (1, 2), {"a": [1, ("b",)], 2: {}}),
  ],
)
def test_a_value_is_written_as_gin_reads_it(here, value):
  (setting,) = read(here, f"A = {format_value(value)}  # origin\n")
  assert setting.value == value
  assert type(setting.value) is type(value)


def test_the_command_line_is_read_as_files_are():
  settings = read_command_line(
    ["A=1", 'B="x=y"', "config.ModelConfig.norm='rms_norm'", "C=[1,\n2]"]
  )
  assert list(map(str, settings)) == [
    "A = 1",
    'B = "x=y"',
    'config.ModelConfig.norm = "rms_norm"',
    "C = [1, 2]",
  ]
  assert {each.origin for each in settings} == {"command line"}


KINDS = "write a number, True, None, a quoted text or a list of these."


@pytest.mark.parametrize(
  ("binding", "message"),
  [
    *(
      (f"A={text}", f"{text} is not a Python value; write --gin.A='\"{text}\"'")
      for text in ("foo", "/tmp/x-1/y.z", "~/x", "16k")
    ),
    ("A=none", "none is not a Python value; write --gin.A=None"),
    *((text, "write --gin.NAME=VALUE.") for text in ("SEED", "=3", "A B=3")),
    ("P=[a]", f"a is not a Python value; {KINDS}"),
    ("SEED=", f"unable to parse value; {KINDS}"),
    ("P=[1", f"a bracket or a quote is not closed; {KINDS}"),
    ("P={[1]: 2}", f"cannot be read; {KINDS}"),
    ("P=-%D_FF", f"a minus sign before what is not a number; {KINDS}"),
  ],
)
def test_a_wrong_value_on_the_command_line_is_shown_quoted(binding, message):
  assert (
    message_of(read_command_line, [binding]) == f"--gin.{binding}: {message}"
  )


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (
      "A = 1\nMODEL_DIR = runs/x  # here\n",
      '2: MODEL_DIR = runs/x: not a Python value; write MODEL_DIR = "runs/x"',
    ),
    ("A = true\n", "1: A = true: not a Python value; write A = True"),
    (
      "\nNUM LAYERS = 3\n",
      "2: NUM LAYERS = 3: couldn't parse statement, expected ':' or '='.",
    ),
    ("A = 1 2\n", "1: A = 1 2: expected newline."),
    (
      "include recipes/x.gin\n",
      "1: include recipes/x.gin: recipes is not a Python value.",
    ),
    ("A = 1\nB = [1,\n2 3]\n", "3: 2 3]: expected ',' or ']'."),
    ("A = 1\n!\n", "2: !: unexpected token."),
    *(
      (line, f"1: {line}: the name is gin's own; import it as another.")
      for line in ("from __gin__ import magic", "import gin")
    ),
  ],
)
def test_a_wrong_line_in_a_file_is_named(here, text, message):
  assert message_of(read, here, text) == f"mine.gin:{message}"


def test_files_that_include_each_other_are_named(here):
  (here / "other.gin").write_text("include 'mine.gin'\n")
  assert message_of(read, here, "include 'other.gin'\n") == (
    "mine.gin -> other.gin -> mine.gin: gin files include each other in a "
    "circle."
  )


def test_a_file_may_be_included_twice(here):
  (here / "a.gin").write_text("A = 1\n")
  settings = read(here, "include 'a.gin'\ninclude 'a.gin'\n")
  assert list(map(str, settings)) == ["A = 1", "A = 1"]
