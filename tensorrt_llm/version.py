# SPDX-License-Identifier: Apache-2.0
"""The one place that holds the version; it must import nothing."""

__version__ = "0.1.0"
