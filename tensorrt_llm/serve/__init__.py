# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: an OpenAI-compatible front of one generation worker."""
