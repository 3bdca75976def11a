# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate` writes continuations in the form that its flags ask for."""

import json
import re

import pytest

from palm_mtf.cli.main import main
from palm_mtf.generation.inference.slot_decoder import SlotDecoder
from palm_mtf.native.operations import operations
from tests import runs
from tests.cases import slow

pytest.importorskip("llguidance", reason="llguidance is not installed")

SCHEMA = {
  "type": "object",
  "properties": {
    "n": {"type": "integer", "minimum": 0, "maximum": 99},
    "ok": {"type": "boolean"},
  },
  "required": ["n", "ok"],
  "additionalProperties": False,
}


def generate(model_dir, *flags):
  """Returns the continuations of two prompts of different lengths."""
  prompts = "--prompt", "one", "--prompt", "one two"
  given = "generate", "--model_dir", model_dir, *prompts, "--json"
  return runs.printed(*given, "--gin.SAMPLE_TOKENS=24", *flags)


def test_every_sample_is_json_of_the_schema(finished, tmp_path):
  """Some editors put a byte order mark before the schema."""
  (tmp_path / "a.json").write_text(json.dumps(SCHEMA), "utf-8-sig")
  flags = "--json_schema", tmp_path / "a.json", "--gin.NUM_SAMPLES=3"
  found = generate(finished, *flags, "--gin.TEMPERATURE=2.0")
  assert len(found) == 6
  assert len({x["continuation"] for x in found}) > 1
  for each in found:
    value = json.loads(each["continuation"])
    assert value.keys() == {"n", "ok"} and each["ended"] == "eod"
    assert type(value["n"]) is int and 0 <= value["n"] < 100
    assert type(value["ok"]) is bool


def test_every_text_is_one_that_the_pattern_matches(finished):
  pattern = "(yes|no)( [0-9]{2}){1,3}"
  for each in generate(finished, "--regex", pattern):
    assert re.fullmatch(pattern, each["continuation"])


def test_a_pattern_of_all_texts_changes_no_greedy_text(finished):
  greedy = "--gin.TEMPERATURE=0.0"
  free = generate(finished, greedy)
  assert generate(finished, greedy, "--regex", r"[\s\S]*") == free


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
  ("dtype", "weight_dtype"),
  [
    ("float32", "activation"),
    slow("bfloat16", "activation"),
    slow("float32", "int8"),
    slow("bfloat16", "int4"),
  ],
)
def test_prompt_lookup_changes_no_text_of_a_form(
  finished, monkeypatch, dtype, weight_dtype
):
  """Greedy and drawn; a step chooses several tokens where texts repeat."""
  counts, steps = [], SlotDecoder.steps

  def count(self, texts, *given, **more):
    found = steps(self, texts, *given, **more)
    counts[-1].update(map(len, found.values()))
    return found

  monkeypatch.setattr(SlotDecoder, "steps", count)
  flags = "--regex", "(ab){7}(one )*", f"--gin.WEIGHT_DTYPE='{weight_dtype}'"
  flags += (f"--gin.ACTIVATION_DTYPE='{dtype}'",)
  for temperature, samples in ((0.0, 1), (1.5, 3)):
    flags += f"--gin.TEMPERATURE={temperature}", f"--gin.NUM_SAMPLES={samples}"
    found = []
    for looks_up in (False, True):
      counts.append(set())
      lookup = f"--gin.PROMPT_LOOKUP={looks_up}"
      found.append(generate(finished, *flags, lookup))
    assert found[0] == found[1]
    assert {x["activation_dtype"] for x in found[0]} == {dtype}
  assert counts[0] == counts[2] == {1}
  assert max(counts[1]) > 1 and max(counts[3]) > 1


def test_one_text_is_streamed_in_the_form(finished, capsys):
  flags = "--prompt", "one", "--regex", "[a-c]{4}"
  assert main(["generate", "--model_dir", str(finished), *flags]) == 0
  (text,) = re.findall(r"^one(.*)$", capsys.readouterr().out, re.M)
  assert re.fullmatch("[a-c]{4}", text)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--regex", "("], "--regex = '(': cannot be used: invalid regex"),
    (["--json_schema", "none"], "--json_schema = 'none': No such file"),
    (
      ["--json_schema", "a.json"],
      "--json_schema = 'a.json': is not valid JSON: NaN; mend it.",
    ),
    (["--json_schema", "b.json"], "--json_schema = 'b.json': is no JSON"),
    (
      ["--json_schema", "a.json", "--regex", "a"],
      "--json_schema = 'a.json' and --regex = 'a': cannot be used together",
    ),
    (
      ["--regex", "a", "--gin.NUM_BEAMS=2"],
      "--regex = 'a' and NUM_BEAMS = 2: cannot be used together",
    ),
  ],
)
def test_what_is_no_form_is_refused_in_one_line(
  finished, tmp_path, monkeypatch, capsys, flags, message
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.json").write_text('{"maximum": NaN}')
  (tmp_path / "b.json").write_text("[]")
  prompt = "--prompt", "one"
  assert main(["generate", "--model_dir", str(finished), *prompt, *flags]) == 2
  assert message in capsys.readouterr().err.splitlines()[-1]
