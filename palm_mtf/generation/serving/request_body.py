# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: JSON in UTF-8, and nothing else."""

import asyncio
import json
import sys

from aiohttp import http_exceptions, web

from palm_mtf.errors import shown
from palm_mtf.generation.serving.refusal import RefusalError

MOST_BODY_BYTES = 2**21
_CODINGS = ("identity", "gzip", "deflate")
# Errors of requests whose head or body is not what HTTP asks for.
MALFORMED = (web.RequestPayloadError, http_exceptions.HttpProcessingError)


async def read_json(request: web.Request, most_secs: float) -> object:
  """Returns the JSON of a body.

  Args:
    request: request with a body.
    most_secs: seconds that the body may take to come.

  Raises:
    RefusalError: the body is no JSON, or did not come in time.
  """
  # A page of another site can send a text without asking, but no JSON.
  if request.content_type != "application/json":
    raise RefusalError(415, "give the header Content-Type: application/json.")
  # Python has codecs that take minutes for a megabyte.
  charset = request.charset
  if charset is not None and charset.lower() not in ("utf-8", "utf8"):
    raise RefusalError(
      415,
      f"charset = {shown(charset)}: JSON is UTF-8 (RFC 8259); leave charset "
      "out of Content-Type.",
    )
  coding = request.headers.get("Content-Encoding", "identity")
  if coding.lower() not in _CODINGS:
    raise RefusalError(
      415,
      f"Content-Encoding: {shown(coding)} is not supported; leave it out, or "
      "give gzip or deflate.",
    )
  try:
    body = await asyncio.wait_for(request.read(), most_secs)
  except TimeoutError:
    raise RefusalError(408, "the body did not come in time.") from None
  except web.HTTPRequestEntityTooLarge:
    raise RefusalError(
      413, f"the body has more than {MOST_BODY_BYTES:,} bytes: send less."
    ) from None
  except MALFORMED:
    raise RefusalError(
      400,
      "the body is not encoded as its headers Content-Encoding and "
      "Transfer-Encoding say.",
    ) from None
  try:
    return json.loads(body.decode("utf-8-sig"))
  except UnicodeDecodeError as error:
    why = f"byte {error.start:,} is not UTF-8"
  except json.JSONDecodeError as error:
    why = f"{error.msg} at character {error.pos:,}"
  except RecursionError:
    why = "it is nested too deep"
  except ValueError:  # of int()
    most = sys.get_int_max_str_digits()
    why = f"a whole number has more than {most:,} digits"
  raise RefusalError(400, f"the body is no JSON that can be read: {why}.")
