# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
<<<<<<< HEAD
"""Learners, processes that train apart and exchange weights with a client."""
=======
"""Learners: pods with their own clocks, whose work a run's client merges."""
>>>>>>> c372021e0bfe32bade94b972b87f2949609f9371
