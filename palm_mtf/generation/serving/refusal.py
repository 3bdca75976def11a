# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers in JSON, among them errors in OpenAI's form."""

from collections.abc import Mapping

from aiohttp import web

from palm_mtf.json_text import json_text


class RefusalError(Exception):
  """A request that is answered by an error.

  Attributes:
    status: HTTP status.
    message: the fault of the request and its fix.
    kind: type of error, in OpenAI's words.
    headers: headers of the answer.
  """

  def __init__(
    self, status: int, message: str, headers: Mapping[str, str] | None = None
  ):
    """Takes status, message and further headers."""
    super().__init__(message)
    self.status, self.message = status, message
    self.kind = "invalid_request_error" if status < 500 else "server_error"
    later = {"Retry-After": "1"} if status in (429, 503) else {}
    self.headers = {**later, **(headers or {})}

  def as_json(self) -> dict:
    """Returns the body of the answer."""
    error = {"message": self.message, "type": self.kind, "code": self.status}
    return {"error": {**error, "param": None}}

  def response(self) -> web.Response:
    """Returns the answer."""
    return json_response(self.as_json(), self.status, self.headers)


def json_response(
  content: object,
  status: int = 200,
  headers: Mapping[str, str] | None = None,
) -> web.Response:
  """Returns an answer with `content` as JSON."""
  return web.json_response(
    content, status=status, headers=headers, dumps=json_text
  )
