# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import re
import ssl
import subprocess

import pytest

from tests import pod_examples_test, processes, runs, tls_tunnel_test
from tests.doc_pages import Page
from tests.source_files import ROOT

PAGE = Page("docs/pods.md")
(CLUSTER,) = (x for x in PAGE.blocks if "runs/pods" in x.text)
(STAGES,) = (x for x in PAGE.blocks if "runs/stages" in x.text)
FEW = {**runs.SETTINGS, "TRAIN_STEPS": 4, "PROMPTS": []}


def _train(words, corpus, folder, **macros):
  """Runs a command of the page in a process, with small sizes."""
  settings = {**FEW, "TEXT_FILES": f"{corpus}/*.txt", **macros}
  del settings["NUM_PODS"]  # the page's file has it
  sizes = [f"--gin.{name}={value!r}" for name, value in settings.items()]
  done = processes.python("-m", *words, *sizes, cwd=folder)
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
@PAGE.shows(
  "palm_mtf train --gin_file=recipes/quickstart.gin \\\n"
  "  --gin_file=pods/local_servers.gin --gin.MODEL_DIR='\"runs/traced\"' \\\n"
  "  --gin.TRACE_STEPS='[20, 21]'",
  "palm_mtf train --gin_file=recipes/quickstart.gin \\\n"
  "  --gin_file=pods/local_servers.gin --gin.MODEL_DIR='\"runs/traced\"' \\\n"
  "  --gin.TRAIN_STEPS=8",
)
def test_traces_say_where_the_time_went(block, corpus, tmp_path):
  (command,) = block.commands
  _train(command, corpus, tmp_path, TRACE_STEPS=[3, 4])
  model_dir = tmp_path / "runs" / "traced"
  files = [f"step_{step:08d}.json" for step in (3, 4)]
  assert sorted(x.name for x in (model_dir / "traces").iterdir()) == files
  for file in files:
    assert json.loads((model_dir / "traces" / file).read_text())
  lines = [
    x for x in runs.read_metrics(model_dir) if "traced_exposed_secs" in x
  ]
  assert [x["step"] for x in lines] == [3, 4]


@pytest.mark.slow
@PAGE.shows("palm_mtf pods serve --listen 10.0.0.1:2222")
def test_two_servers_of_the_page_train_its_run(block, corpus, tmp_path):
  _train_on_servers(CLUSTER, block, corpus, tmp_path)


@pytest.mark.slow
@PAGE.shows(STAGES.text)
def test_two_servers_of_a_pod_train_its_stages(block, corpus, tmp_path):
  (serve,) = (x for x in PAGE.blocks if "--listen 10.0.0.1:2222\n" in x.text)
  sizes = {"NUM_LAYERS": 2, "GLOBAL_BATCH_SIZE": 8}
  _train_on_servers(block, serve, corpus, tmp_path, **sizes)


def _train_on_servers(train, serve, corpus, tmp_path, **macros):
  """Two servers on loopback stand for those of two hosts."""
  (serve,) = serve.commands
  serve = [x.replace("10.0.0.1:2222", "127.0.0.1:0") for x in serve]
  (train,) = train.commands
  with contextlib.ExitStack() as stack:
    for shown in ("10.0.0.1:2222", "10.0.0.2:2222"):
      server = processes.start("-m", *serve, stderr=None)
      stack.enter_context(server)
      stack.callback(server.kill)
      address = server.stdout.readline().split()[-1]
      train = [x.replace(shown, address) for x in train]
    _train(train, corpus, tmp_path, CLIENT_ADDRESS="127.0.0.1", **macros)
  (folder,) = (tmp_path / "runs").glob("*/checkpoints")
  assert (folder / "step_00000004").is_dir()


@pytest.mark.slow
@PAGE.shows("palm_mtf pods manage")
def test_a_manager_of_the_page_gives_servers_to_its_run(
  block, corpus, tmp_path
):
  manage, serve, train, list_all = block.commands
  with contextlib.ExitStack() as stack:

    def start(command, shown):
      words = [x.replace(shown, "127.0.0.1:0") for x in command]
      process = processes.start("-m", *words, stderr=None, cwd=tmp_path)
      stack.enter_context(process)
      stack.callback(process.kill)
      return process.stdout.readline().split()[-1]

    address = start(manage, "10.0.0.1:2200")
    to = "10.0.0.1:2200", address
    serve = [x.replace(*to) for x in serve]
    servers = {start(serve, "10.0.0.2:2222") for _ in range(2)}
    train = [x.replace(*to) for x in train]
    _train(train, corpus, tmp_path, CLIENT_ADDRESS="127.0.0.1")
    done = processes.python("-m", *(x.replace(*to) for x in list_all))
  rows = [x.split() for x in done.stdout.splitlines()[1:]]
  assert {x[0] for x in rows} == servers
  assert {x[1] for x in rows} == {"east"} and {x[-1] for x in rows} == {"-"}
  folder = tmp_path / "runs" / "managed" / "checkpoints"
  assert (folder / "step_00000004").is_dir()


@PAGE.shows("sbatch examples", "examples/pods/ssh.sh")
def test_the_scripts_of_the_page_are_those_of_the_slow_tests(block):
  (command,) = block.commands
  name = "sbatch" if command[0] == "sbatch" else "ssh"
  tested = [x.removeprefix(f"{ROOT}/") for x in pod_examples_test.JOB[name]]
  hosts = {"host1": "127.0.0.1", "host2": "127.0.0.2"}
  shown = [hosts.get(word, word) for word in command]
  assert shown == [word for word in tested if word != "--"]


@PAGE.shows("useradd", "git archive")
def test_the_files_of_the_page_exist_and_show_its_commands(block):
  """The unit serves one of the addresses that the page's run names."""
  text = "".join(
    x.read_text("utf-8") for x in (ROOT / "examples" / "pods").iterdir()
  )
  for command in block.text.splitlines():
    assert f"#   {command}\n" in text
    for path in re.findall(r"examples/pods/[^ \n]+", command):
      assert (ROOT / path).is_file()
    for address in re.findall(r"palm-mtf-pod@(\S+:\d+)", command):
      assert f'"{address}"' in CLUSTER.text


@PAGE.shows("openssl req")
def test_the_key_and_certificate_of_the_page_authenticate_both_ends(
  block, tmp_path, openssl
):
  (command,) = block.commands
  subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
  files = [tmp_path / name for name in ("pods.pem", "pods.key")]
  ends = []
  for is_server in (True, False):
    buffers = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = tls_tunnel_test.context_of(files, is_server)
    ends.append((context.wrap_bio(*buffers, server_side=is_server), *buffers))
  for _ in range(4):  # messages of a handshake
    for (end, _, out), (_, other_in, _) in (ends, ends[::-1]):
      try:
        end.do_handshake()
      except ssl.SSLWantReadError:
        pass
      other_in.write(out.read())
  (certificate,) = {end.getpeercert(True) for end, *_ in ends}
  assert certificate == ssl.PEM_cert_to_DER_cert(files[0].read_text())


@pytest.fixture
def openssl():
  if subprocess.run(["which", "openssl"], capture_output=True).returncode:
    pytest.skip("no openssl here")


def _tunnels(block):
  """Returns the options of both files, and their services, by name."""
  columns = zip(
    *((line[:39], line[39:]) for line in block.text.splitlines()), strict=True
  )
  hosts = []
  for column in columns:
    options, services = {}, {}
    into = options
    for line in map(str.strip, column):
      if line.startswith("["):
        into = services[line.strip("[]")] = {}
      elif line and not line.startswith(";"):
        name, _, value = line.partition("=")
        into[name.strip()] = value.strip()
    hosts.append((options, services))
  return hosts


@PAGE.shows("; host1.conf")
def test_each_address_means_the_same_server_on_both_hosts(block):
  hosts = dict(zip(("10.0.0.1", "10.0.0.2"), _tunnels(block), strict=True))
  ends = {}  # of a tunnel, which accept from the network: the server they reach
  for host, (options, services) in hosts.items():
    # Nobody without the key: each end demands the certificate of the other.
    assert options["cert"] == options["CAfile"] == "pods.pem"
    assert options["key"] == "pods.key" and options["verifyPeer"] == "yes"
    for service in services.values():
      if "client" not in service:
        assert service["accept"].startswith(f"{host}:")
        ends[service["accept"]] = service["connect"]
  reached = {}
  for host, (_, services) in hosts.items():
    own = {x["connect"] for x in services.values() if "client" not in x}
    there = {
      x["accept"]: ends[x["connect"]]
      for x in services.values()
      if x.get("client") == "yes"
    }
    assert all(near == far for near, far in there.items())
    reached[host] = own | {*there}
  shown = set(re.findall(r"127\.0\.0\.1:222\d", PAGE.text))
  assert reached["10.0.0.1"] == reached["10.0.0.2"] == shown


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    CLUSTER.text,  # with the servers of the page
    "DCN_DTYPE   bandwidth",
    "time -->",  # a picture
    ".venv/bin/python -m tools.bench pods",  # flags: docs_test.py
    "microbatches    joined",
  )
