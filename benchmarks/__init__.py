# SPDX-License-Identifier: Apache-2.0
"""Measurements on one GPU, their committed results, and the tables and goals read from these.

``python -m benchmarks.step_h200 --help`` and so on, from the root of the repository.
"""
