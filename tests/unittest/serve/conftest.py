# SPDX-License-Identifier: Apache-2.0
"""The server that the tests of one module share."""

import pytest

from tests.support.serving import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with the scripted generator."""
    with serving(tmp_path_factory.mktemp("media")) as server:
        yield server
