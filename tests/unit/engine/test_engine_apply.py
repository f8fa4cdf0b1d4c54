"""apply, verify and rollback on a real installation, judged by RECORD, sha256sum and grep."""

from __future__ import annotations

import subprocess

from specgate import operations

from tests.unit.engine import mini


def gate(document, name):
    return next(one for one in document["gates"] if one["gate"] == name)


def grep(path, *needles):
    command = ["grep", "-nF"] + [part for needle in needles for part in ("-e", needle)] + ["--", str(path)]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def test_apply_puts_the_patch_and_proves_it(host):
    before = host.tree()
    document = host.apply()
    assert document["outcome"] == "passed" and document["changed"] and document["exit_code"] == 0, document
    source = gate(document, "source")["evidence"]
    assert source == grep(host.path(mini.SERVER_ARGS), mini.FIELD, mini.OPTION) + grep(
        host.path(mini.WORKER), "check_threshold", mini.FIELD
    )
    assert len(source) == 5
    assert gate(document, "import")["evidence"] == [
        "server_args OK",
        "batch_threshold OK",
        "eagle_worker_v2 OK",
    ]
    assert "gives speculative_disable_batch_threshold=8 (int)" in gate(document, "flag")["evidence"][0]
    assert [one["gate"] for one in document["gates"]] == ["source", "compile", "import", "flag"]
    assert document["warnings"] == [], "the pristine package warns of cuda.cudart as well"
    after = host.tree()
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {f"./{path}" for path in (mini.SERVER_ARGS, mini.WORKER, mini.CREATED)}
    for one in document["files"]:
        assert one["state"] == "patched"
        assert one["sha256_after"] == mini.sha256sum(host.path(one["path"]))
        assert one["pristine_sha256"] == mini.record_sha256(host.root, one["path"]) == one["sha256_before"]


def test_apply_twice_changes_nothing(host):
    host.apply()
    files = {path: host.path(path).stat().st_ino for path in (mini.SERVER_ARGS, mini.WORKER, mini.CREATED)}
    document = host.apply()
    assert document["outcome"] == "passed" and not document["changed"]
    assert gate(document, "import")["outcome"] == "passed"
    assert files == {path: host.path(path).stat().st_ino for path in files}


def test_rollback_restores_record(host):
    before = host.tree()
    host.apply()
    document = host.rollback()
    assert document["outcome"] == "passed" and document["changed"], document
    assert host.tree() == before
    assert not host.path(mini.CREATED).exists()
    again = host.rollback()
    assert again["outcome"] == "passed" and not again["changed"]


def test_verify_passes_only_what_is_in_place(host):
    assert host.verify()["exit_code"] == 1
    host.apply()
    assert host.verify()["exit_code"] == 0
    with host.path(mini.WORKER).open("a") as stream:
        stream.write("# by hand\n")
    document = host.verify()
    assert document["exit_code"] == 1 and gate(document, "source")["outcome"] == "failed"


def test_status_and_history(host):
    assert host.status()["bundle"] is None
    host.apply()
    host.rollback()
    host.apply()
    said = host.status()
    assert said["bundle"]["by"] == "tester" and said["installation"]["state"] == "patched"
    lines = operations.history(host.options())["history"]
    assert [line["operation"] for line in lines] == ["apply", "rollback", "apply"]
    assert all(line["actor"] == "tester" for line in lines)
