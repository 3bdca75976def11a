# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import subprocess

from palm_mtf.cli.main import main
from palm_mtf.config import ExchangeConfig
from tests import pod_examples_test
from tests.doc_pages import Page
from tests.learners.attacker import Echo, Run, make_key
from tests.source_files import ROOT
from tools.bench import command as bench

PAGE = Page("docs/slow_links.md")
RESTARTED = ".venv/bin/python -m tools.bench goodput --kinds restarted"


def _rows(block):
  """Returns the goodput of each row, by kind, chips and learners."""
  rows = {}
  for line in block.text.splitlines()[1:]:
    learners, kind, chips, *rest = line.split()
    percent = re.findall(r"([\d.]+)%", " ".join(rest))[0]
    rows[kind, chips, int(learners)] = float(percent)
  return rows


@PAGE.shows(RESTARTED)
def test_the_rows_of_restarts_are_what_the_command_prints(
  block, monkeypatch, capsys
):
  (command,) = block.commands
  monkeypatch.setattr("sys.argv", [*command[2:], "--json"])
  assert bench.main() == 0
  records = map(json.loads, capsys.readouterr().out.splitlines())
  shown = _rows(PAGE.blocks[PAGE.blocks.index(block) + 1])
  assert shown == {
    (x["kind"], f"{x['chips']:,}", x["learners"]): round(100 * x["goodput"], 1)
    for x in records
  }


@PAGE.shows(
  "openssl req", "palm_mtf pods join", "palm_mtf train --gin_file=runs"
)
def test_commands_of_learners_are_understood(
  block, tmp_path, monkeypatch, capsys
):
  """tests/learners has runs of learners, and replays."""
  monkeypatch.chdir(tmp_path)
  refusals = {
    "join": "--token_file = 'host1.token': No such file or directory",
    "--replay": "runs/learners/config.gin",
  }
  for program, *given in block.commands:
    if program == "openssl":
      subprocess.run([program, *given], check=True, capture_output=True)
    elif "token" in given:
      assert main(given[:-2]) == 0
    elif "join" in given or "--replay" in given:
      assert main(given) == 2
      (refusal,) = (x for name, x in refusals.items() if name in given)
      assert refusal in capsys.readouterr().err
    else:
      assert main([*given, "--print_config"]) == 0


@PAGE.shows("palm_mtf pods token alice/laptop")
def test_a_token_and_a_certificate_let_a_volunteer_reach_the_run(
  block, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  os.rename(f"{make_key('.')}.pem", "learners.pem")
  os.rename("run.key", "learners.key")
  (_, *token), (_, *join) = block.commands
  with Run(tmp_path, "learners", Echo()) as run:
    assert token[-4:] == ["--tokens", "learners.txt", ">", "alice.token"]
    assert main([*token[:-3], run.tokens]) == 0
    (tmp_path / "alice.token").write_text(capsys.readouterr().out)
    assert main([x.replace("client:2222", run.address) for x in join]) == 2
  # The run of this test sends no program.
  assert "the run's answer is not one of palm_mtf." in capsys.readouterr().err


@PAGE.shows("OUTER_STEPS = 4")
def test_syncs_come_when_the_page_says(block):
  numbers = re.findall(r"(\w+) = (\d+)", block.text)
  exchange = ExchangeConfig(
    exchange="diloco", **{name.lower(): int(x) for name, x in numbers}
  )
  _, _, head, *lines = block.text.splitlines()
  places = {int(x[0]): x.start() for x in re.finditer(r"\d+", head)}
  for fragment, line in enumerate(lines):
    for step, place in places.items():
      due = {
        "send": exchange.fragment_sent(step),
        "merge": exchange.fragment_after(step),
      }
      shown = line[place - 2 : place + 4].strip()
      assert shown == "".join(x for x, y in due.items() if y == fragment)


@PAGE.shows("examples/pods/ssh.sh", "examples/pods/slow_link.sh")
def test_hosts_train_with_the_settings_of_the_page(
  block, tmp_path, monkeypatch
):
  """ssh.sh adds pods/cluster.gin; the scripts are run in slow tests."""
  (command,) = block.commands
  assert (ROOT / command[0]).is_file()
  slow = pod_examples_test.SLOW_LINK[0].removeprefix(f"{ROOT}/")
  if command[0] == slow:
    assert command[1:] == ["host1", "host2"]
    return
  monkeypatch.chdir(tmp_path)
  flags = command[command.index("--") + 1 :]
  cluster = "--gin_file=pods/cluster.gin"
  # A plan needs no hosts, and checks the settings as training does.
  assert main(["plan", *flags, cluster, "--gin.CHIP='tpu_v4'"]) == 0


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    # What a slow test of learners/volunteer_test.py makes.
    *(
      x.text for x in PAGE.blocks if x.text.startswith(('{"event"', "mallory"))
    ),
    # Tables; the first row of each is the head of tools/bench/cases/goodput.py,
    # whose test compares the numbers with the published ones.
    *(x.text for x in PAGE.blocks if x.text.startswith("learners")),
    # Flags and settings: docs_test.py. The commands take an hour.
    "palm_mtf sweep --gin_file=sweeps/slow_links.gin",
    "palm_mtf sweep --gin_file=sweeps/slow_links_continued.gin",
    "from trained weights, three seeds",
    "LEARNING_RATE 0.1, three seeds each",
    ".venv/bin/python -m tools.bench slow_links",
    "form            steps",
  )
