# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Renders a chat template in a process, which can be killed if it hangs."""

from collections.abc import Mapping
from typing import Any

from palm_mtf.machine.helper_process import HelperProcess

# Default for a request: so long may a client wait, even on a busy machine. The
# process itself limits its processor time to less.
MOST_SECS = 5.0
_MODULE = "palm_mtf.data.vocabulary.chat_process"


class ChatRenderer(HelperProcess):
  """A template and its process.

  Attributes:
    fields: names of the fields that the template may read in a message.
    variables: names of the variables that the template reads.
  """

  def __init__(self, template: str, most_secs: float = MOST_SECS):
    """Starts the process, which compiles the template.

    A rendering fails if it takes more than `most_secs` seconds. Raises
    HelperError if the template is damaged.
    """
    super().__init__(_MODULE, {"template": template}, most_secs)
    self._most_secs = most_secs
    self.fields, self.variables = (
      frozenset(self.first_answer[x]) for x in ("fields", "variables")
    )

  def render(self, values: Mapping[str, Any]) -> tuple[str, list[list[int]]]:
    """Returns the rendered text, and its runs [origin, number of characters].

    An origin (MESSAGE, TEMPLATE or UNKNOWN) says who wrote the characters.

    Raises HelperError if the template raises an error, or needs too much time
    or memory.
    """
    found = self.ask(values, self._most_secs)
    return found["text"], found["origins"]
