# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO mixtures of PaLM's sources at PaLM's rates.

from palm_mtf.tasks import palm_mixture
palm_mixture.books.files = "/data/books/**/*.txt"

palm            six sources (PaLM 3)
palm_continued  more code, and arXiv and mathematics: the mixture on which 62B
                was trained beyond 795B tokens (PaLM Appendix F)
"""

# PaLM's text is not public, so gin names the user's own text. Each source has a
# function for that, with the parameters of documents.text_files.

from collections.abc import Callable, Sequence

import gin
import seqio

from palm_mtf.tasks.documents import (
  VALIDATION_SHARE,
  Files,
  TextFilesSource,
  add_task,
)


def _add(name: str) -> Callable[..., Files]:
  """Registers task palm_<name>; returns the function that gin binds to."""

  # gin reads names and defaults of the parameters from the signature.
  def settings(
    files: str | Sequence[str] | None = None,
    text_field: str = "text",
    weight_field: str | None = None,
    validation_share: float = VALIDATION_SHARE,
  ) -> Files:
    return Files(files, text_field, weight_field, validation_share)

  settings.__name__ = settings.__qualname__ = name
  settings.__doc__ = f"Returns where the text of task palm_{name} is."
  settings = gin.configurable(name, module=__name__)(settings)
  add_task(f"palm_{name}", TextFilesSource(f"palm_mixture.{name}", settings))
  return settings


social_media = _add("social_media")
web_pages = _add("web_pages")
books = _add("books")
code = _add("code")
wikipedia = _add("wikipedia")
news = _add("news")
arxiv_and_math = _add("arxiv_and_math")

# A rate is a source's share of the tokens that a run reads, whatever the
# source's size: a small source is repeated sooner.
seqio.MixtureRegistry.add(
  "palm",
  [
    ("palm_social_media", 0.50),
    ("palm_web_pages", 0.27),
    ("palm_books", 0.13),
    ("palm_code", 0.05),
    ("palm_wikipedia", 0.04),
    ("palm_news", 0.01),
  ],
)
seqio.MixtureRegistry.add(
  "palm_continued",
  [
    ("palm_social_media", 0.40),
    ("palm_web_pages", 0.27),
    ("palm_books", 0.13),
    ("palm_code", 0.10),
    ("palm_wikipedia", 0.04),
    ("palm_news", 0.01),
    ("palm_arxiv_and_math", 0.05),
  ],
)
