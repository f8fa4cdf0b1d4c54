"""The command line, its text and its exit codes; check mode; the gates' finer points."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from specgate import operations

from tests.unit.engine import mini
from tests.unit.engine.mini import CREATED, SERVER_ARGS, WORKER


def run(host, *arguments, bundle=None, **kwargs):
    """Run the command line; the bundle goes in on standard input."""
    command = [sys.executable, "-m", "specgate", *arguments, "--store", str(host.store)]
    if arguments[0] != "history":
        command += ["--python", str(host.python)]
    if bundle:
        command += ["--bundle", "-"]
    return subprocess.run(
        command,
        input=json.dumps(bundle) if bundle else None,
        env={**os.environ, "PYTHONPATH": str(mini.ENGINE)},
        capture_output=True,
        text=True,
        timeout=60,
        **kwargs,
    )


def everything(folder):
    """Return what a change would show in: names, sizes, times and inodes of all files and folders."""
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns, path.lstat().st_ino)
        for path in [folder, *folder.rglob("*")]
    }


def test_text_reads_well_at_80_columns(host):
    done = run(host, "apply", bundle=mini.bundle())
    assert done.returncode == 0 and done.stderr == ""
    assert "ok   import" in done.stdout and "    eagle_worker_v2 OK" in done.stdout
    assert f"passed, changed put {mini.bundle()['name']}" in done.stdout
    source = next(line for line in done.stdout.splitlines() if "if len(batch)" in line)
    own = [line for line in done.stdout.splitlines() if line != source and str(host.root) not in line]
    assert max(map(len, own)) <= 80, "only lines of source and paths may be longer"
    broken = mini.altered(lambda variant: variant["files"][2]["edits"][0].update(text="import nothing_there"))
    broken["variants"][0]["files"][2]["marker_lines"] = 1
    broken = mini.altered(lambda variant: variant.update(broken["variants"][0]))
    done = run(host, "apply", bundle=broken)
    assert done.returncode == 1
    assert done.stdout.startswith("FAIL import"), "the failing gate comes first"
    assert "No module named 'nothing_there'" in " ".join(done.stdout.split())
    done = run(host, "history", "--last", "1")
    assert "apply failed by" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["apply", "--env", "x"], "is not NAME=VALUE"),
        (["nothing"], "invalid choice"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "specgate", *arguments],
        env={**os.environ, "PYTHONPATH": str(mini.ENGINE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and said in done.stderr


def test_exit_codes_and_json(host):
    done = run(host, "verify", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["exit_code"] == 1
    done = run(host, "apply", "--json")
    assert done.returncode == 2 and "needs --bundle" in json.loads(done.stdout)["summary"]
    document = json.loads(run(host, "apply", "--json", bundle=mini.bundle()).stdout)
    assert set(document) >= {
        *("specgate", "operation", "outcome", "changed", "exit_code", "summary", "remedy", "host", "actor"),
        *("run_id", "started", "seconds", "installation", "bundle", "files", "gates", "warnings", "diff"),
    }
    assert all(
        set(gate) == {"gate", "outcome", "proved", "evidence", "reason", "seconds"}
        for gate in document["gates"]
    )


def test_check_changes_nothing_and_tells_the_truth(host):
    before = everything(host.venv)
    checked = host.apply(check=True)
    assert checked["outcome"] == "passed" and checked["changed"]
    assert everything(host.venv) == before and not host.store.exists()
    assert f"+    {mini.FIELD}: int = 0" in checked["diff"] and f"+++ b/{CREATED}" in checked["diff"]
    assert [gate["outcome"] for gate in checked["gates"]] == ["passed"] * 4, "it imported what it would write"
    done = host.apply(diff=True)
    assert done["diff"] == checked["diff"]
    before, store = everything(host.venv), everything(host.store)
    assert not host.apply(check=True)["changed"]
    back = host.rollback(check=True)
    assert back["changed"] and f"-    {mini.FIELD}: int = 0" in back["diff"]
    assert everything(host.venv) == before and everything(host.store) == store


def test_diff_is_one_that_patch_accepts(host, tmp_path):
    diff = host.apply(check=True)["diff"]
    before = host.tree()
    subprocess.run(["patch", "-p1", "-d", host.root], input=diff, text=True, check=True, capture_output=True)
    by_patch = host.tree()
    subprocess.run(
        ["patch", "-R", "-p1", "-d", host.root], input=diff, text=True, check=True, capture_output=True
    )
    assert host.tree() == before
    host.apply()
    assert host.tree() == by_patch


def test_check_finds_what_apply_would_find(host):
    broken = mini.altered(lambda variant: variant["files"][1].update(create="import nothing_there\n"))
    assert host.apply(broken, check=True)["exit_code"] == 1
    host.path(WORKER).write_text("x = 1\n")
    assert host.apply(check=True)["exit_code"] == 2
    assert not host.store.exists()


def test_only_new_warnings_are_reported(host):
    """The pristine package warns of cuda.cudart; the patch may add a warning, which is no failure."""
    text = "import sys, warnings\nwarnings.warn('brand new')\nsys.stderr.write('WARNING: 12 things\\n')\n"
    bundle = mini.altered(lambda variant: variant["files"][1].update(create=text + mini.CREATE_TEXT))
    document = host.apply(bundle)
    assert document["outcome"] == "passed"
    assert document["warnings"] == ["UserWarning: brand new", "WARNING: # things"]
    assert host.verify()["warnings"] == document["warnings"], "they stay new: the pristine package has none"


def test_new_syntax_warning_is_reported(host):
    bundle = mini.altered(
        lambda variant: variant["files"][1].update(
            create=mini.CREATE_TEXT + "x = 1\nassert (x, 'always true')\n"
        )
    )
    document = host.apply(bundle)
    assert any("assertion is always true" in warning for warning in document["warnings"])


def test_what_an_import_prints_does_not_matter(host):
    noise = "import os\nprint('{\"not\": \"the answer\"}')\nos.write(1, b'raw')\n" + mini.CREATE_TEXT
    bundle = mini.altered(lambda variant: variant["files"][1].update(create=noise))
    assert host.apply(bundle)["outcome"] == "passed"


def test_broken_environment_is_told_from_a_broken_patch(host, tmp_path):
    """The pristine package does not import either: the reason says so."""
    text = mini.files("0.5.9")[WORKER] + "import not_installed\n"
    mini.pip(
        host.python,
        "install",
        "--no-index",
        "--force-reinstall",
        str(mini.wheel(tmp_path, replace={WORKER: text})),
    )
    document = host.apply()
    assert document["exit_code"] == 1
    assert "No module named 'not_installed'" in document["summary"]
    assert "the environment is at fault" in document["summary"]


def test_package_built_with_the_patch_is_refused(host, tmp_path):
    """A wheel that was built from a patched tree has a RECORD that calls it pristine."""
    text = (
        mini.files("0.5.9")[SERVER_ARGS].replace(
            "    speculative_token_map",
            f"    {mini.FIELD}: int = 0\n    x = '{mini.OPTION}', '{mini.FIELD}'\n    speculative_token_map",
            1,
        )
        + f"\n# {mini.FIELD}\n"
    )
    mini.pip(
        host.python,
        "install",
        "--no-index",
        "--force-reinstall",
        str(mini.wheel(tmp_path, replace={SERVER_ARGS: text})),
    )
    document = host.apply()
    assert document["exit_code"] == 2 and "markers already" in document["summary"]


def test_module_that_hides_behind_another_file(host, tmp_path):
    """What is imported must be the very file that was patched."""
    shadow = (
        "import sys, types\nfake = types.ModuleType('sglang.srt.speculative.eagle_worker_v2')\n"
        f"fake.__file__ = {str(tmp_path / 'elsewhere.py')!r}\nsys.modules[fake.__name__] = fake\n"
    )
    (tmp_path / "elsewhere.py").write_text("")
    bundle = mini.altered(lambda variant: variant["files"][1].update(create=shadow + mini.CREATE_TEXT))
    document = host.apply(bundle)
    assert (document["outcome"], document["exit_code"]) == ("undone", 3)
    assert "was imported from" in document["summary"] and "elsewhere.py" in document["summary"]
    assert not host.path(CREATED).exists()


def test_staged_modules_can_read_their_own_source(host):
    """triton.jit and its like read the source of what they decorate while it is imported."""
    bundle = mini.altered(
        lambda variant: variant["files"][1].update(
            create=mini.CREATE_TEXT
            + "import inspect\nassert inspect.getsource(check_threshold).startswith('def check_threshold')\n"
        )
    )
    assert host.apply(bundle)["outcome"] == "passed"


def test_store_that_everyone_can_write_is_refused(host):
    host.store.mkdir()
    host.store.chmod(0o777)
    document = host.apply()
    assert document["exit_code"] == 2 and "chmod o-w" in document["remedy"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_ordinary_user_is_told_what_to_do(host):
    """Without the right to write the store or the package: one line, nothing changed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(host.venv, folder / "venv", symlinks=True)
        shutil.copytree(mini.ENGINE / "specgate", folder / "engine" / "specgate")
        (folder / "b.json").write_text(json.dumps(mini.bundle()))
        before = mini.digest_of(folder)

        def apply(store):
            command = [
                "python3",
                "-m",
                "specgate",
                "apply",
                "--json",
                "--no-import",
                "--store",
                folder / store,
            ]
            command += ["--root", mini.site(folder / "venv"), "--bundle", folder / "b.json"]
            done = subprocess.run(
                command,
                env={
                    "PATH": os.defpath,
                    "PYTHONPATH": str(folder / "engine"),
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
                capture_output=True,
                text=True,
                user=65534,
                group=65534,
            )
            return json.loads(done.stdout)

        document = apply("store")
        assert document["exit_code"] == 2 and "run as root" in document["remedy"], document
        (folder / "own").mkdir()
        os.chown(folder / "own", 65534, 65534)
        document = apply("own")
        assert document["exit_code"] == 2 and "cannot be written" in document["summary"], document
        shutil.rmtree(folder / "own")
        assert mini.digest_of(folder) == before


def test_objects_are_read_only_and_right(host):
    host.apply()
    held = [path for path in (host.store / "objects").rglob("*") if path.is_file()]
    assert {path.name for path in held} == {mini.record_sha256(host.root, p) for p in (SERVER_ARGS, WORKER)}
    for path in held:
        assert mini.sha256sum(path) == path.name and path.stat().st_mode & 0o777 == 0o444


def test_damaged_object_is_noticed(host):
    host.apply()
    path = host.store / "objects" / mini.record_sha256(host.root, WORKER)[:2]
    path = path / mini.record_sha256(host.root, WORKER)
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    document = host.rollback()
    assert document["exit_code"] == 2 and "pip install --force-reinstall" in document["remedy"]


def test_damaged_state_is_noticed(host):
    host.apply()
    next(host.store.glob("installations/*/state.json")).write_text("{")
    document = host.status()
    assert document["exit_code"] == 2 and "damaged" in document["summary"]


def test_audit_log_that_was_cut_short(host):
    host.apply()
    audit = host.store / "audit.jsonl"
    with audit.open("a") as stream:
        stream.write('{"started": "2026')
    host.rollback()
    lines = operations.history(host.options())["history"]
    assert [line["operation"] for line in lines] == ["apply", "rollback"]
    assert len(audit.read_text().splitlines()) == 3, "nothing was overwritten"


def test_verify_against_another_bundle_fails(host):
    host.apply()
    other = mini.altered(lambda variant: variant["files"][1].update(create=mini.CREATE_TEXT + "X = 1\n"))
    assert host.verify(bundle=other)["exit_code"] == 1
    assert host.verify(bundle=mini.bundle())["exit_code"] == 0


def test_bundle_that_no_longer_changes_a_file(host):
    """A newer bundle leaves out what an older one changed: that goes back to its pristine bytes."""
    host.apply()

    def fewer(variant):
        del variant["files"][1:]

    bundle = mini.altered(fewer)
    bundle["flag"] = {**bundle["flag"], "validator": None, "refuse": ["abc"]}
    del bundle["flag"]["validator"]
    bundle = mini.bundle(variants=bundle["variants"], flag=bundle["flag"])
    assert host.apply(bundle)["outcome"] == "passed"
    assert mini.sha256sum(host.path(WORKER)) == mini.record_sha256(host.root, WORKER)
    assert not host.path(CREATED).exists()
    assert host.verify()["outcome"] == "passed"


def test_no_import_says_so(host):
    document = host.apply(no_import=True)
    gates = {gate["gate"]: gate for gate in document["gates"]}
    assert gates["import"]["outcome"] == gates["flag"]["outcome"] == "skipped"
    assert gates["import"]["reason"] == "--no-import"
