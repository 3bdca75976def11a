# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import asyncio
from concurrent import futures

import pytest

from tests.generation.serving.live_server import complete, serving

pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")


def test_a_server_answers_from_any_thread():
  async def answer():
    async with serving() as (_, address):
      return await complete(address, {"prompt": "one"})

  with futures.ThreadPoolExecutor() as pool:
    status, _ = pool.submit(asyncio.run, answer()).result()
  assert status == 200
