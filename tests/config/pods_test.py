# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of pods are refused by their text."""

import pytest

from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"num_pods": 0}, "NUM_PODS = 0: give a whole number of at least 1."),
    ({"num_pods": 9}, "NUM_PODS = 9: give a whole number from 1 to 8."),
    ({"num_pods": 2.0}, "NUM_PODS = 2.0: give a whole number of at least 1."),
    (
      {"fingerprint_steps": 0},
      "FINGERPRINT_STEPS = 0: give a whole number of at least 1.",
    ),
    (
      {"pod_timeout_secs": 0},
      "POD_TIMEOUT_SECS = 0: give a number from 1.0 to 1000000.0.",
    ),
    (
      {"on_pod_failure": "shrnk"},
      "ON_POD_FAILURE = 'shrnk' (did you mean \"shrink\"?): choose one of "
      "'stop', 'wait', 'shrink'.",
    ),
    (
      {"client_address": "a:b:c"},
      'CLIENT_ADDRESS = \'a:b:c\': write "host" or "host:port", of this host.',
    ),
    (
      {"pods": "in_proces"},
      "PODS = 'in_proces' (did you mean \"in_process\"?): choose one of "
      "'in_process', 'local_servers', 'cluster'.",
    ),
    (
      {"dcn_dtype": "float16"},
      "DCN_DTYPE = 'float16' (did you mean \"bfloat16\"?): choose one of "
      "'float32', 'bfloat16'.",
    ),
  ],
)
def test_a_wrong_setting_is_refused(settings, message):
  with pytest.raises(UserError) as error:
    PodsConfig(**settings)
  assert str(error.value) == message


def test_without_a_setting_there_is_one_pod():
  assert PodsConfig().num_pods == 1
