# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The files of examples/pods start pods where they say, and leave nothing.

Slurm and ssh are simulated, as tests/slurm_simulation.py says; all else is
real. No test starts a unit of systemd or a cluster of Kubernetes.
"""

import configparser
import contextlib
import copy
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palm_mtf.cli.command_table import COMMANDS, split_name
from palm_mtf.cli.main import FlagParser, main, parse_flags
from tests import kubernetes_schemas, processes, runs, slurm_simulation
from tests.source_files import ROOT

EXAMPLES = ROOT / "examples" / "pods"
UNIT = EXAMPLES / "palm-mtf-pod@.service"
SBATCH = ["sbatch", str(EXAMPLES / "slurm.sbatch")]
SSH = [str(EXAMPLES / "ssh.sh"), "127.0.0.1", "127.0.0.2", "--"]
JOB = {"sbatch": SBATCH, "ssh": SSH}
SLOW_LINK = [str(EXAMPLES / "slow_link.sh"), *SSH[1:]]
# Long enough to be stopped.
RUN = {
  "NUM_PODS": 2,
  "DCN_DTYPE": "float32",
  "TRAIN_STEPS": 300,
  "CHECKPOINT_STEPS": 100,
  "EVAL_STEPS": 300,
  "PROMPTS": [],
  "MESH_SHAPE": "data:2",
  "LAYOUT": "batch:data",
  "POD_TIMEOUT_SECS": 30.0,
}
SAVED = re.compile(r"step_(\d+)$")


class Starter:
  """Starts an example in a folder, and finds the processes that it leaves."""

  def __init__(self, folder: Path, corpus: Path):
    self.folder, self._corpus = folder, corpus
    self._commands = folder / "commands"
    slurm_simulation.write_commands(self._commands)
    self._mark = f"{slurm_simulation.JOB_ID}={folder}"

  def start(self, command, nodes="127.0.0.1,127.0.0.2", **macros):
    """Starts a run of an example with RUN's settings; see `runs.arguments`."""
    model_dir = self.folder / "run"
    flags = runs.arguments("", self._corpus, model_dir, **{**RUN, **macros})
    path = f"{self._commands}{os.pathsep}{os.environ['PATH']}"
    name, value = self._mark.split("=")
    return subprocess.Popen(
      [*command, *flags],
      cwd=self.folder,
      env=processes.environment(
        PATH=path,
        NODES=nodes,
        DEVICES="2",
        **{name: value, slurm_simulation.TC_CALLS: self.folder / "tc_calls"},
      ),
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )

  def processes(self):
    return slurm_simulation.processes_with(self._mark)

  def assert_all_ended(self, secs=10):
    # Killed processes are there until their new parent has noticed.
    end = time.monotonic() + secs
    while self.processes() and time.monotonic() < end:
      time.sleep(0.1)
    assert not self.processes()

  def wait_for_steps(self, job, least):
    """Waits until a run has logged a step of at least `least`."""

    def happens():
      with contextlib.suppress(FileNotFoundError, IndexError):
        return runs.read_metrics(self.folder / "run")[-1]["step"] >= least
      return False

    processes.wait_until(happens, job)

  def newest_step(self):
    folder = self.folder / "run" / "checkpoints"
    return max(
      int(m[1]) for x in folder.iterdir() if (m := SAVED.search(x.name))
    )


@pytest.fixture
def starter(tmp_path, corpus):
  made = Starter(tmp_path, corpus)
  yield made
  for process in made.processes():
    with contextlib.suppress(ProcessLookupError):
      os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
  """The run of the same settings in one process."""
  folder = tmp_path_factory.mktemp("undisturbed")
  runs.finish(runs.start("train", corpus, folder, PODS="in_process", **RUN))
  return folder


def finish(job):
  """Waits for the end of a job; returns its exit code and its errors."""
  _, error = job.communicate(timeout=300)
  return job.returncode, error


@pytest.mark.slow
def test_a_slurm_job_that_is_stopped_and_resumed_has_the_bits_of_one_process(
  starter, undisturbed
):
  job = starter.start(SBATCH)
  starter.wait_for_steps(job, 20)
  # As `scancel --batch --signal=TERM`, and Slurm before the time limit, do.
  job.terminate()
  assert finish(job)[0] == 143
  starter.assert_all_ended()
  stopped = starter.newest_step()
  assert stopped >= 20 and stopped % 100

  job = starter.start(SBATCH)
  starter.wait_for_steps(job, 120)
  for process in starter.processes():  # as `scancel`
    if process != job.pid:
      os.kill(process, signal.SIGTERM)
  assert finish(job)[0] in (2, 143)  # with a lost pod, or before that
  starter.assert_all_ended()

  job = starter.start(SBATCH)
  assert finish(job)[0] == 0, (starter.folder / "slurm.out").read_text()
  starter.assert_all_ended()
  runs.assert_same_tensors(undisturbed, starter.folder / "run", 300)


@pytest.mark.slow
@pytest.mark.parametrize("how", JOB)
def test_a_run_that_fails_ends_its_servers(how, starter):
  job = starter.start(JOB[how], NUM_LAYER=3)
  code, error = finish(job)
  if how == "sbatch":
    error = (starter.folder / "slurm.out").read_text()
  assert code == 2
  assert "unknown macro NUM_LAYER" in error
  starter.assert_all_ended()


@pytest.mark.slow
@pytest.mark.parametrize("how", JOB)
def test_a_server_that_does_not_start_ends_the_others(how, starter):
  other = "192.0.2.1"  # of no host
  job = {"sbatch": SBATCH, "ssh": [*SSH[:2], other, "--"]}[how]
  code, error = finish(starter.start(job, nodes=f"127.0.0.1,{other}"))
  if how == "sbatch":
    error = (starter.folder / "slurm.out").read_text()
  assert code == 1
  assert f'"{other}:0": this host has no such address' in error
  assert "of 2 servers started" in error
  starter.assert_all_ended()


@pytest.mark.slow
def test_hosts_that_ssh_reaches_train_the_bits_of_one_process(
  starter, undisturbed
):
  cores = sorted(os.sched_getaffinity(0))
  # Each pod of one process has a part of the cores.
  os.sched_setaffinity(0, cores[: max(1, len(cores) // 2)])
  try:
    job = starter.start(SSH)
    starter.wait_for_steps(job, 20)
    os.killpg(job.pid, signal.SIGINT)  # Ctrl-C
    assert finish(job)[0] == 143
    starter.assert_all_ended()
    assert starter.newest_step() % 100
    job = starter.start(SSH)
    code, error = finish(job)
    assert code == 0, error
  finally:
    os.sched_setaffinity(0, cores)
  starter.assert_all_ended()
  runs.assert_same_tensors(undisturbed, starter.folder / "run", 300)


@pytest.mark.slow
def test_servers_over_ssh_end_with_a_script_that_is_killed(starter):
  job = starter.start(SSH)
  starter.wait_for_steps(job, 2)
  job.kill()
  starter.assert_all_ended(secs=100)  # the client notices its lost pods


@pytest.mark.slow
def test_a_link_is_slow_until_its_run_ends(starter):
  """Packets from host to host, of both directions, wait; tc is simulated."""
  macros = {"EXCHANGE": "diloco", "OUTER_STEPS": 10, "TRAIN_STEPS": 20}
  job = starter.start(SLOW_LINK, **macros, CHECKPOINT_STEPS=20, EVAL_STEPS=20)
  code, error = finish(job)
  assert code == 0, error
  starter.assert_all_ended()
  assert starter.newest_step() == 20
  calls = (starter.folder / "tc_calls").read_text().splitlines()
  of_host = [
    "qdisc replace dev lo root handle 1: prio bands 4",
    "qdisc replace dev lo parent 1:4 handle 40: netem delay 50ms rate 200mbit "
    "limit 100000",
    "filter replace dev lo parent 1: protocol ip prio 1 u32 match ip dst "
    "ADDRESS/32 flowid 1:4",
  ]
  assert calls == [
    *(x.replace("ADDRESS", "127.0.0.2") for x in of_host),
    *(x.replace("ADDRESS", "127.0.0.1") for x in of_host),
    *2 * ["qdisc del dev lo root"],
  ]


@pytest.mark.slow
def test_a_link_is_free_again_if_its_run_is_stopped(starter):
  job = starter.start(SLOW_LINK)
  starter.wait_for_steps(job, 2)
  job.terminate()
  assert finish(job)[0] == 143
  starter.assert_all_ended()
  calls = (starter.folder / "tc_calls").read_text().splitlines()
  assert calls[-2:] == 2 * ["qdisc del dev lo root"]


@pytest.mark.parametrize(
  "words", [[], ["host1"], ["host1", "--"], ["a", "b", "c"]]
)
def test_a_slow_link_is_between_two_hosts(words):
  done = subprocess.run([SLOW_LINK[0], *words], capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.startswith("usage: slow_link.sh HOST HOST [-- ")


def _parse(command):
  """Parses a command line of palm_mtf without gin files; returns its flags."""
  assert command[0] == "palm_mtf"
  name, rest = split_name(command[1:])
  parser = FlagParser(allow_abbrev=False)
  for flag, keywords in COMMANDS[name].flags.items():
    parser.add_argument(flag, **keywords)
  return name, parse_flags(parser, rest)


def test_the_shell_reads_the_scripts():
  for name in ("slurm.sbatch", "ssh.sh", "slow_link.sh"):
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True)
    assert os.access(EXAMPLES / name, os.X_OK)


@pytest.mark.parametrize("name", ["slurm.sbatch", "ssh.sh", "slow_link.sh"])
def test_without_arguments_a_script_trains_the_quickstart(name, capsys):
  text = (EXAMPLES / name).read_text(encoding="utf-8").replace("\\\n", " ")
  (flags,) = re.findall(r"\|\| set -- (--gin_file.*)", text)
  assert main(["train", *shlex.split(flags), "--print_config"]) == 0
  assert "recipes/quickstart.gin" in capsys.readouterr().out


@pytest.fixture
def unit():
  parser = configparser.ConfigParser(interpolation=None, delimiters="=")
  parser.optionxform = str
  parser.read_string(UNIT.read_text(encoding="utf-8"))
  return parser


def test_the_unit_serves_the_address_in_its_name(unit):
  assert {*unit} == {"DEFAULT", "Unit", "Service", "Install"}
  program, *rest = shlex.split(unit["Service"]["ExecStart"])
  assert Path(program).is_absolute()
  name, flags = _parse(["palm_mtf", *rest])
  assert (name, flags.listen) == ("pods serve", "%i")
  assert unit["Service"]["IPAddressDeny"] == "any"


def test_systemd_accepts_the_unit(tmp_path):
  copied = tmp_path / UNIT.name
  text = UNIT.read_text(encoding="utf-8")
  program = re.search(r"^ExecStart=(\S+)", text, re.M)[1]
  copied.write_text(text.replace(program, sys.executable))
  try:
    done = subprocess.run(
      ["systemd-analyze", "verify", "--man=no", copied],
      check=False,
      capture_output=True,
      text=True,
    )
  except FileNotFoundError:
    pytest.skip("no systemd here")
  # Its exit code is 0 for unknown names and bad values too.
  assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def documents():
  return kubernetes_schemas.read_documents()


def test_the_documents_fit_the_schemas_of_kubernetes_and_jobset(documents):
  assert len(documents) == 4
  for document in documents.values():
    assert not kubernetes_schemas.errors(document)


@pytest.mark.parametrize(
  ("kind", "path", "value"),
  [
    ("JobSet", ["spec", "replicatedJobs", 0, "replica"], 2),
    ("JobSet", ["spec", "replicatedJobs", 0, "replicas"], "2"),
    ("JobSet", ["spec", "successPolicy", "operator"], "Both"),
    ("Service", ["spec", "clusterIp"], "None"),
    ("NetworkPolicy", ["spec", "policyTypes"], "Ingress"),
    ("PersistentVolumeClaim", ["spec", "accessModes"], "ReadWriteOnce"),
  ],
)
def test_a_wrong_field_does_not_fit(kind, path, value, documents):
  changed = copy.deepcopy(documents[kind])
  inner = changed
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = value
  assert kubernetes_schemas.errors(changed)


def _containers(documents):
  """Returns the only container of each replicated job, by the job's name."""
  return {
    job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]
    for job in documents["JobSet"]["spec"]["replicatedJobs"]
  }


def _command(container):
  """Returns a container's command line with addresses for its variables."""
  words = [*container["command"], *container["args"]]
  for variable in container["env"]:
    words = [x.replace(f"$({variable['name']})", "10.0.0.1") for x in words]
  assert "$(" not in " ".join(words)
  return words


def test_the_client_names_the_hosts_that_the_service_gives_the_servers(
  documents, capsys
):
  spec = documents["JobSet"]["spec"]
  containers = _containers(documents)
  name, flags = _parse(_command(containers["pod"]))
  assert name == "pods serve"
  host, _, port = flags.listen.partition(":")
  assert host == "10.0.0.1"
  assert containers["pod"]["ports"] == [{"containerPort": int(port)}]
  assert containers["pod"]["readinessProbe"]["tcpSocket"]["port"] == int(port)
  # JobSet names a pod so.
  job = documents["JobSet"]["metadata"]["name"]
  (servers,) = (x for x in spec["replicatedJobs"] if x["name"] == "pod")
  assert servers["template"]["spec"]["completions"] == 1
  hosts = [f"{job}-pod-{i}-0" for i in range(servers["replicas"])]
  service = documents["Service"]["metadata"]["name"]
  assert spec["network"] == {"enableDNSHostnames": True, "subdomain": service}
  command = _command(containers["client"])
  assert command[:2] == ["palm_mtf", "train"]
  assert main([*command[1:], "--print_config"]) == 0
  config = capsys.readouterr().out
  islands = re.search(r"^ISLANDS = ((?:.|\n)+?)\s+#", config, re.M)[1]
  assert json.loads(islands.replace("'", '"')) == [
    [f"{x}.{service}:{port}"] for x in hosts
  ]
  assert re.search(rf"^NUM_PODS = {len(hosts)}\b", config, re.M)


def test_a_server_has_as_many_threads_as_its_container_has_cores(documents):
  """A process sees all cores of its node, whatever its container may use."""
  server = _containers(documents)["pod"]
  _, flags = _parse(_command(server))
  for amounts in server["resources"].values():
    assert int(amounts["cpu"]) == flags.threads


def test_servers_outlive_the_last_step_of_a_client_that_is_deleted(documents):
  server = _containers(documents)["pod"]
  command, secs = server["lifecycle"]["preStop"]["exec"]["command"]
  assert command == "sleep" and int(secs) < 30  # Kubernetes kills after 30 s
