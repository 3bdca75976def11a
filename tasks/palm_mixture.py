# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO mixture `palm`: PaLM's six sources at PaLM's rates (PaLM 3).

The text is the user's own; gin says where it is, one function for each source:

  from palm_mtf.tasks import palm_mixture
  palm_mixture.books.files = "/data/books/**/*.txt"

Each takes files, text_field, weight_field and validation_share, as
`documents.text_files` does. A rate is a share of what is read, not of the text
that there is: a small source is repeated sooner.
"""

from collections.abc import Callable, Sequence

import gin
import seqio

from palm_mtf.data.documents import TextFiles
from palm_mtf.tasks.documents import (
  VALIDATION_SHARE,
  TextFilesSource,
  add_task,
  open_files,
)


def _configurable(name: str) -> Callable[[], TextFiles]:
  """Returns a function of its own for the gin settings of one source."""

  def open_source(
    files: str | Sequence[str] | None = None,
    text_field: str = "text",
    weight_field: str | None = None,
    validation_share: float = VALIDATION_SHARE,
  ) -> TextFiles:
    return open_files(
      f"palm_mixture.{name}", files, text_field, weight_field, validation_share
    )

  open_source.__name__ = open_source.__qualname__ = name
  open_source.__doc__ = f"Opens the files of task palm_{name}."
  return gin.configurable(name, module=__name__)(open_source)


social_media = _configurable("social_media")
web_pages = _configurable("web_pages")
books = _configurable("books")
code = _configurable("code")
wikipedia = _configurable("wikipedia")
news = _configurable("news")

add_task("palm_social_media", TextFilesSource(social_media))
add_task("palm_web_pages", TextFilesSource(web_pages))
add_task("palm_books", TextFilesSource(books))
add_task("palm_code", TextFilesSource(code))
add_task("palm_wikipedia", TextFilesSource(wikipedia))
add_task("palm_news", TextFilesSource(news))

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
