"""Bundles that are wrong: each is caught before a live file changes, with the reason and what to do."""

from __future__ import annotations

import pytest

from tests.unit.engine import mini


def failing(document, name):
    gate = next(one for one in document["gates"] if one["outcome"] == "failed")
    assert gate["gate"] == name, document
    return gate


@pytest.fixture(autouse=True)
def unchanged(host):
    """Whatever a test does here, the package has every byte it had, and rollback ends at RECORD."""
    before = host.tree()
    yield
    assert host.tree() == before
    assert host.rollback()["outcome"] == "passed"
    assert mini.sha256sum(host.path(mini.SERVER_ARGS)) == mini.record_sha256(host.root, mini.SERVER_ARGS)
    assert host.tree() == before


def test_flag_inside_the_preceding_call(host):
    """The accident itself: the flag lands in the middle of the call before it."""

    def middle(variant):
        variant["files"][0]["edits"][1].update(
            place="replace",
            text='parser.add_argument(\n    "--speculative-accept-threshold-acc",\n    type=float\n'
            f'    parser.add_argument("{mini.OPTION}", type=int),\n)',
        )
        variant["files"][0]["marker_lines"] = 2

    document = host.apply(mini.altered(middle))
    gate = failing(document, "compile")
    assert document["exit_code"] == 1 and not document["changed"]
    assert "Perhaps you forgot a comma?" in gate["reason"] and f"{mini.SERVER_ARGS} line " in gate["reason"]
    assert any(mini.OPTION in line for line in gate["evidence"])
    assert "nothing was changed" in document["remedy"]


def test_flag_inside_the_preceding_call_that_still_compiles(host):
    """With a comma it compiles and imports, and is caught by what the server's parser says."""

    def swallowed(variant):
        variant["files"][0]["edits"][1].update(
            place="replace",
            text='parser.add_argument(\n    "--speculative-accept-threshold-acc",\n    type=float,\n'
            f'    default=ServerArgs.{mini.FIELD},\n    help="{mini.OPTION}",\n)',
        )

    document = host.apply(mini.altered(swallowed))
    assert "unrecognized arguments" in failing(document, "flag")["reason"]


def test_compiles_but_fails_at_import(host):
    def broken(variant):
        variant["files"][2]["edits"][0]["text"] = (
            "from sglang.srt.speculative.batch_threshold import no_such_name"
        )
        variant["files"][2]["marker_lines"] = 1

    document = host.apply(mini.altered(broken))
    gate = failing(document, "import")
    assert document["exit_code"] == 1
    assert "cannot import name 'no_such_name'" in gate["reason"]
    assert "server_args OK" in gate["evidence"] and "eagle_worker_v2 OK" not in gate["evidence"]
    assert any("eagle_worker_v2.py" in line for line in gate["evidence"]), "the traceback names the file"


def test_exits_while_imported(host):
    document = host.apply(
        mini.altered(lambda variant: variant["files"][1].update(create="raise SystemExit(0)\n"))
    )
    assert "SystemExit" in failing(document, "import")["reason"]


def test_import_never_ends(host):
    endless = mini.altered(lambda variant: variant["files"][1].update(create="import time\ntime.sleep(60)\n"))
    document = host.apply(endless, import_timeout=2)
    assert "no answer within 2 s" in failing(document, "import")["reason"]


def test_anchor_matches_twice(host):
    def twice(variant):
        del variant["files"][0]["edits"][1]["at"][2]["first"]

    document = host.apply(mini.altered(twice))
    assert document["exit_code"] == 2 and "matches 4 places" in document["summary"]
    assert "line 18: parser.add_argument" in document["summary"] and mini.SERVER_ARGS in document["summary"]


def test_anchor_is_gone(host):
    def gone(variant):
        variant["files"][0]["edits"][0]["at"][1] = {"field": "speculative_accept_threshold_accc"}

    document = host.apply(mini.altered(gone))
    assert document["exit_code"] == 2
    assert "line 13: speculative_accept_threshold_acc" in document["summary"], "the near miss is named"


def test_bundle_was_altered(host):
    bundle = mini.bundle()
    bundle["variants"][0]["files"][0]["edits"][0]["text"] = "evil: int = 1"
    document = host.apply(bundle)
    assert document["exit_code"] == 2 and "altered" in document["summary"]


def test_marker_stands_elsewhere(host):
    document = host.apply(mini.altered(lambda variant: variant["files"][0].update(marker_lines=2)))
    assert "3 lines hold a marker, not 2" in failing(document, "source")["reason"]


def test_unknown_version(host):
    document = host.apply(mini.altered(lambda variant: variant.update(sglang=["0.5.8"])))
    assert document["exit_code"] == 2 and "no variant for SGLang 0.5.9" in document["summary"]


def test_unknown_code(host):
    def other(variant):
        variant["files"][2]["fingerprints"] = [
            {"object": "EAGLEWorkerV2.forward_batch_generation", "sha256": {"0.5.9": "0" * 64}}
        ]

    bundle = mini.altered(other)
    document = host.apply(bundle)
    assert document["exit_code"] == 2 and "EAGLEWorkerV2.forward_batch_generation" in document["summary"]
    accepted = host.apply(bundle, accept_unknown_code=True)
    assert accepted["outcome"] == "passed"
    assert any("unknown code was accepted" in note for note in accepted["installation"]["notes"])
    host.rollback()


def test_flag_of_the_wrong_type(host):
    def text(variant):
        variant["files"][0]["edits"][1]["text"] = f'parser.add_argument("{mini.OPTION}", type=str, default=0)'
        variant["files"][0]["marker_lines"] = 2

    assert "='8' (str), not 8" in failing(host.apply(mini.altered(text)), "flag")["reason"]


def test_create_where_sglang_has_the_file(host):
    document = host.apply(
        mini.altered(
            lambda variant: variant["files"].append(
                {"path": "sglang/version.py", "module": "sglang.version", "create": "x = 1\n"}
            )
        )
    )
    assert document["exit_code"] == 2 and "sglang/version.py is part of SGLang" in document["summary"]
