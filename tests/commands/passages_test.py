# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts are continued as if the user had put the passages before them."""

import json
import os

import pytest

from tests import serve_testing

TEXTS = ["two three four", "nine ten nine", "six"]
SAMPLE_TOKENS = 4


@pytest.fixture
def passages(tmp_path):
  pytest.importorskip("bm25s", reason="bm25s is not installed")
  return write(tmp_path / "passages.jsonl", TEXTS)


def write(path, texts):
  (path.parent / "new").write_text(
    "".join(json.dumps({"text": x}) + "\n" for x in texts)
  )
  os.replace(path.parent / "new", path)
  return path


def flags_of(path, count=1):
  template = "{passages} | {prompt}"
  return [
    *("--gin.TEMPERATURE=0.0", f"--gin.SAMPLE_TOKENS={SAMPLE_TOKENS}"),
    *(f"--gin.RETRIEVE={count}", f"--gin.PASSAGES=[{str(path)!r}]"),
    f"--gin.PASSAGE_TEMPLATE={template!r}",
  ]


@pytest.fixture
def generate(finished, palm_mtf):
  def run(prompts, *flags):
    given = [f"--prompt={x}" for x in prompts]
    code, out, err = palm_mtf(
      *("generate", "--model_dir", finished, "--json", *given),
      *("--gin.TEMPERATURE=0.0", f"--gin.SAMPLE_TOKENS={SAMPLE_TOKENS}"),
      *flags,
    )
    assert code == 0, err
    return [json.loads(x) for x in out.splitlines()]

  return run


def test_texts_are_those_of_prompts_with_passages(generate, passages, palm_mtf):
  prompts = ["four", "ten", "seven"]
  filled = ["two three four | four", "nine ten nine | ten", "seven"]
  expected = generate(filled)
  found = generate(prompts, *flags_of(passages))
  assert [x["prompt"] for x in found] == prompts
  assert [x["continuation"] for x in found] == [
    x["continuation"] for x in expected
  ]
  # A passage that does not fit is cut.
  write(passages, ["four " * 30])
  (found,) = generate(["four"], *flags_of(passages))
  assert found["continuation"]


@pytest.mark.slow
def test_a_server_has_them_too_and_follows_the_file(
  finished, generate, passages
):
  process = serve_testing.start(finished, *flags_of(passages))
  try:
    server = serve_testing.make_url(process)

    def complete(prompt):
      answer = serve_testing.complete(server, prompt=prompt)
      return answer["choices"][0]["text"]

    filled = ["two three four | four", "one four five | four"]
    before, after = (x["continuation"] for x in generate(filled))
    assert complete("four") == before
    write(passages, ["one four five", "six"])
    assert complete("four") == after
    # Ids are read as they are.
    (plain,) = generate(["seven"])
    assert complete("seven") == plain["continuation"]
  finally:
    process.terminate()
    process.communicate()
