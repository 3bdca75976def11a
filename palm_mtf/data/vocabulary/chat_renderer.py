# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Renders a chat template in a process, which can be killed if it hangs."""

from collections.abc import Mapping
from typing import Any

from palm_mtf.machine.helper_process import HelperProcess

_MOST_SECS = 5
_MODULE = "palm_mtf.data.vocabulary.chat_process"


class ChatRenderer(HelperProcess):
  """A template and its process.

  Attributes:
    fields: names of the fields that the template may read in a message.
    variables: names of the variables that the template reads.
  """

  def __init__(self, template: str):
    """Starts the process, which compiles the template.

    Raises HelperError if the template is damaged.
    """
    super().__init__(_MODULE, {"template": template}, _MOST_SECS)
    self.fields, self.variables = (
      frozenset(self.first_answer[x]) for x in ("fields", "variables")
    )

  def render(self, values: Mapping[str, Any]) -> tuple[str, list[list[int]]]:
    """Returns the rendered text, and its runs [origin, number of characters].

    An origin (MESSAGE, TEMPLATE or UNKNOWN) says who wrote the characters.

    Raises HelperError if the template raises an error, or needs too much time
    or memory.
    """
    found = self.ask(values, _MOST_SECS)
    return found["text"], found["origins"]
