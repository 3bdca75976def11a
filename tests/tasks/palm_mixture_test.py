# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from palm_mtf.data.sources.seqio_task import open_task
from palm_mtf.tasks import palm_mixture  # noqa: F401
from tests.refusals import message_of

RATES = {
  "social_media": 0.50,
  "web_pages": 0.27,
  "books": 0.13,
  "code": 0.05,
  "wikipedia": 0.04,
  "news": 0.01,
}


# PaLM Appendix F.
CONTINUED = {
  **RATES,
  "social_media": 0.40,
  "code": 0.10,
  "arxiv_and_math": 0.05,
}


@pytest.mark.parametrize(
  ("mixture", "rates"), [("palm", RATES), ("palm_continued", CONTINUED)]
)
def test_the_rates_are_those_of_the_paper(mixture, rates):
  sources = {source.name: source.rate for source in open_task(mixture, 0.1)}
  assert sources == {
    f"palm_{name}": pytest.approx(rate) for name, rate in rates.items()
  }
  assert sum(sources.values()) == pytest.approx(1)


@pytest.mark.parametrize("missing", RATES)
def test_a_root_that_is_not_set_is_named(missing):
  (source,) = open_task(f"palm_{missing}", 0.1)
  assert message_of(source.fingerprint) == (
    f"palm_mixture.{missing}.files is not set: give a glob or a list of globs, "
    f"such as --gin.palm_mixture.{missing}.files='\"/data/*.jsonl\"'."
  )
