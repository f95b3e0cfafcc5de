# SPDX-License-Identifier: Apache-2.0
"""Expiry goes on whatever the disk does."""

import errno
import sqlite3
import threading

import pytest

from tests.support.serving import LONG, serving, until

FULL = sqlite3.OperationalError("database or disk is full")
BROKEN = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path, expire_after=0.4) as server:
        yield server


def gone(server, id: str) -> bool:
    return server.http.get(f"/v1/videos/{id}").status_code == 404


def test_expiry_goes_on_after_a_round_in_which_the_database_fails(server, monkeypatch):
    tried = threading.Event()

    def fail(now):
        tried.set()
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(server.manager.ledger._store, "expired", fail)
        assert tried.wait(LONG)
    id = server.create()
    until(lambda: gone(server, id) and not server.files())


def test_a_job_whose_row_can_not_be_removed_is_tried_again_and_others_expire(server, monkeypatch):
    store = server.manager.ledger._store
    delete, tried, stuck = store.delete, threading.Event(), []

    def fail_for_the_first(id):
        if not tried.is_set():
            stuck.append(id)
            tried.set()
        if id in stuck:
            raise FULL
        return delete(id)

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", fail_for_the_first)
        server.create()
        assert tried.wait(LONG)
        other = server.create()
        until(lambda: gone(server, other))
        assert not gone(server, stuck[0])
    until(lambda: gone(server, stuck[0]) and not server.files())


def test_expiry_goes_on_after_a_job_whose_file_can_not_be_removed(server, monkeypatch):
    folder = server.manager.folder
    remove, stuck = folder.remove, []

    def fail_for_the_first(files):
        if not stuck:
            stuck.extend(file.name for file in files)
            raise BROKEN
        remove(files)

    monkeypatch.setattr(folder, "remove", fail_for_the_first)
    server.create()
    until(lambda: stuck)
    other = server.create()
    until(lambda: gone(server, other) and server.files() == stuck)
