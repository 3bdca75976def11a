# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Questions differ; tests/docs/decoding_test.py measures a chat model."""

import pytest

from tools.bench.cases import lookup


@pytest.mark.parametrize("kind", ["edit", "json", "story"])
def test_questions_differ_and_fit_into_the_sequence(kind):
  questions = lookup.ask(kind, 16)
  assert len({*questions}) == 16
  assert max(map(len, questions)) < lookup.LENGTH


def test_a_wrong_model_dir_is_one_line(run_bench):
  code, out, err = run_bench("lookup", "--model_dir=nowhere")
  assert (code, out) == (2, "")
  assert "there is no config.gin" in err.splitlines()[-1]
