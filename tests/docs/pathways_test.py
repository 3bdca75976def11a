# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from palm_mtf import runtime
from palm_mtf.commands.pods import join_manager
from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.service import serve
from palm_mtf.runtime.server.start import start_server
from tests.doc_pages import Page

PAGE = Page("docs/pathways.md")


def run_block(block, capsys):
  """Runs a block of Python; returns what it prints, and what the page says."""
  exec(compile(block.text, "docs/pathways.md", "exec"), {})
  (said,) = re.findall(
    rf"{re.escape(block.text)}```\n\nprints `(.*?)`", PAGE.text, re.DOTALL
  )
  return capsys.readouterr().out, f"{said}\n"


@PAGE.shows(
  "import numpy as np\nfrom palm_mtf import runtime",
  "import palm_mtf, mesh_tensorflow as mtf",
)
def test_a_program_prints_what_the_page_says(block, capsys):
  printed, said = run_block(block, capsys)
  assert printed == said


@PAGE.shows("from palm_mtf import runtime\n\nwith runtime.connect_managed(")
def test_a_manager_binds_the_slices(block, tmp_path):
  with (
    serve("127.0.0.1", 0, str(tmp_path / "state"), "") as port,
    ManagerClient("MANAGER", f"127.0.0.1:{port}") as client,
  ):
    for num_devices, island in ((4, "east"), (2, "west")):
      address = start_server(num_devices, 1).target.removeprefix("grpc://")
      join_manager(client, address, island)
    found = {}
    exec(block.text.replace("127.0.0.1:2200", f"127.0.0.1:{port}"), found)
    assert [len(found[x].devices) for x in "ab"] == [4, 2]


@PAGE.shows("104 bytes on device")
def test_what_never_fits_is_refused(block):
  with runtime.connect(devices=1, budget=100) as client:
    (slice_,) = client.slices("1")
    made = runtime.function(lambda x: x + 1).on(slice_)(np.zeros(13))
    with pytest.raises(UserError) as error:
      made.wait()
    assert f"{error.value}\n" == block.text


MEASURED = [  # flags: docs_test.py
  ".venv/bin/python examples/two_slices/run.py",
  "what    result",
  "ms     clients",
  ".venv/bin/python -m tools.bench pipeline",
  "place          order",
]


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(*MEASURED)
