# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON bodies of requests and answers, and errors in OpenAI's form."""

import asyncio
import json
import sys
from collections.abc import Mapping

from aiohttp import http_exceptions, web

from palm_mtf.errors import shorten
from palm_mtf.json_text import STRICT_DECODER, NotFiniteError, json_text

MOST_BODY_BYTES = 2**21
_CODINGS = ("identity", "gzip", "deflate")
WRONGLY_CODED = (
  "the body is not encoded as its headers Content-Encoding and "
  "Transfer-Encoding say."
)
# aiohttp's errors for a request whose headers or body are not valid HTTP.
MALFORMED = (web.RequestPayloadError, http_exceptions.HttpProcessingError)


class RefusalError(Exception):
  """The server refuses a request, and answers with an error."""

  def __init__(
    self, status: int, message: str, headers: Mapping[str, str] | None = None
  ):
    super().__init__(message)
    self.status, self.message = status, message
    # OpenAI's name for the type of error.
    self.kind = "invalid_request_error" if status < 500 else "server_error"
    later = {"Retry-After": "1"} if status in (429, 503) else {}
    self.headers = {**later, **(headers or {})}

  def as_json(self) -> dict:
    """Returns the body of the answer, in OpenAI's form."""
    error = {"message": self.message, "type": self.kind, "code": self.status}
    return {"error": {**error, "param": None}}

  def make_response(self) -> web.Response:
    """Returns the HTTP response."""
    return make_json_response(self.as_json(), self.status, self.headers)


def make_json_response(
  content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
  """Returns an answer with `content` as JSON."""
  return web.json_response(
    content, status=status, headers=headers, dumps=json_text
  )


def refuse_coding(named: str) -> RefusalError:
  """Returns the error for an unsupported Content-Encoding, such as `named`."""
  return RefusalError(
    415, f"{named} is not supported; leave it out, or give gzip or deflate."
  )


async def read_json(request: web.Request, most_secs: float) -> object:
  """Returns the body of a request, parsed from JSON.

  Raises RefusalError if it is not JSON, too large, or takes > `most_secs`.
  """
  # Require the content type of JSON, because a page of another site can send
  # text, but not JSON, without a CORS preflight request to this server.
  if request.content_type != "application/json":
    raise RefusalError(415, "give the header Content-Type: application/json.")
  # Decode only UTF-8, because some of Python's codecs take minutes for a
  # megabyte.
  charset = request.charset
  if charset is not None and charset.lower() not in ("utf-8", "utf8"):
    raise RefusalError(
      415,
      f"charset = {shorten(charset)}: JSON is UTF-8 (RFC 8259); leave charset "
      "out of Content-Type.",
    )
  coding = request.headers.get("Content-Encoding", "identity")
  if coding.lower() not in _CODINGS:
    raise refuse_coding(f"Content-Encoding: {shorten(coding)}")
  try:
    body = await asyncio.wait_for(request.read(), most_secs)
  except TimeoutError:
    raise RefusalError(408, "the body did not come in time.") from None
  except web.HTTPRequestEntityTooLarge:
    raise RefusalError(
      413, f"the body has more than {MOST_BODY_BYTES:,} bytes: send less."
    ) from None
  except MALFORMED:
    raise RefusalError(400, WRONGLY_CODED) from None
  try:
    return STRICT_DECODER.decode(body.decode("utf-8-sig"))
  except UnicodeDecodeError as error:
    why = f"byte {error.start:,} is not UTF-8"
  except json.JSONDecodeError as error:
    why = f"{error.msg} at character {error.pos:,}"
  except RecursionError:
    why = "it is nested too deep"
  except NotFiniteError as error:
    why = f"{shorten(str(error))} is no number that JSON and float64 have"
  except ValueError:  # from int(), which limits the number of digits
    most = sys.get_int_max_str_digits()
    why = f"a whole number has more than {most:,} digits"
  raise RefusalError(400, f"the body is not valid JSON: {why}.")
