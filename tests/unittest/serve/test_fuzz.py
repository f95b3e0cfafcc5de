# SPDX-License-Identifier: Apache-2.0
"""Malformed requests: a table, and a tenth of what benchmarks/serve_fuzz.py sends."""

import serve_fuzz
from serve_malformed import CASES


def test_each_malformed_request_gets_an_error_that_names_the_field(server):
    problems = [problem for case in CASES if (problem := case.problem(server.url))]
    assert not problems
    assert server.http.get("/health").json()["status"] == "ready"
    assert server.http.get("/v1/videos").json()["data"] == []
    assert not server.files()


def test_a_thousand_generated_requests_meet_no_surprise(tmp_path):
    record = serve_fuzz.run(1000, tmp_path)
    assert record["requests"] == 1000
    assert all(record["holds"].values()), record["problems"]
    statuses = record["statuses"]
    assert statuses["202"] > 0 and statuses["200"] > 0 and statuses["422"] > 100


def test_a_wrong_answer_would_be_noticed(server):
    # The table's own teeth: another status, and a message without the field.
    wanted = next(case for case in CASES if case.name.endswith('size="720p"'))
    assert wanted.problem(server.url) is None
    wrong = wanted.__class__(**{**vars(wanted), "statuses": (500,)})
    silent = wanted.__class__(**{**vars(wanted), "mentions": ("no such words",)})
    assert wrong.problem(server.url) and silent.problem(server.url)
