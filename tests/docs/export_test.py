# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The SavedModel of docs/export.md."""

import json
import shlex

import pytest
import tensorflow as tf

from palm_mtf.cli.main import main
from tests.doc_pages import Page

PAGE = Page("docs/export.md")


@pytest.mark.slow
@PAGE.shows("palm_mtf export --model_dir runs/quickstart --format=saved_model")
def test_a_saved_model_is_called_as_the_page_shows(block, quickstart, capsys):
  (command,) = block.commands
  assert main(command[1:]) == 0
  (version,) = (quickstart.parents[1] / "served").iterdir()
  assert version.name == "12"  # the step, 600 on the page
  capsys.readouterr()
  flags = ["--prompt=def main(", "--json", "--gin.TEMPERATURE=0.0"]
  assert main(["generate", "--model_dir", str(quickstart), *flags]) == 0
  expected = json.loads(capsys.readouterr().out)["continuation"]

  program = _block("import tensorflow as tf").replace("600", version.name)
  *lines, last = program.splitlines()
  score = next(line for line in lines if line.startswith("model.score"))
  names = {}
  exec("\n".join(lines), names)
  assert eval(score, names).shape == [2]
  assert eval(last, names).shape == [1]

  rest = shlex.split(_block("curl -d").replace("\n", " "))
  asked = json.loads(rest[rest.index("-d") + 1])
  signature = getattr(names["model"], asked["signature_name"])
  inputs = {name: tf.constant(x) for name, x in asked["inputs"].items()}
  (found,) = signature(**inputs)["continuation"].numpy()
  assert found.decode() == expected


def _block(beginning: str) -> str:
  (found,) = (x.text for x in PAGE.blocks if x.text.startswith(beginning))
  return found
