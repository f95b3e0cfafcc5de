# SPDX-License-Identifier: Apache-2.0
"""For tools that still call setup.py; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
