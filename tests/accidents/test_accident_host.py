"""Hosts in a bad way: full, read-only, linked, drifted, shared by two operators, upgraded underneath."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import time

import pytest
from specgate import operations

from tests.accidents.conftest import start_apply
from tests.unit.engine import mini
from tests.unit.engine.mini import CREATED, SERVER_ARGS, WORKER

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@contextlib.contextmanager
def mounted(folder, *arguments):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *arguments, str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def newer():
    return mini.altered(
        lambda variant: variant["files"][0]["edits"][0].update(text=f"{mini.FIELD}: int = 0  # two")
    )


def objects(host):
    return sorted(path.name for path in (host.store / "objects").rglob("*") if path.is_file())


# drift


def test_locally_modified_file_is_refused_with_a_diff(host):
    path = host.path(SERVER_ARGS)
    path.write_text(path.read_text().replace("= 1.0", "= 0.9", 1))
    before = host.tree()
    document = host.apply()
    assert document["exit_code"] == 2 and not document["changed"]
    assert "drift" in document["summary"] and SERVER_ARGS in document["summary"]
    assert "pristine bytes are not known" in document["diff"], "only RECORD's digest is known here"
    assert "pip install --force-reinstall" in document["remedy"]
    assert host.tree() == before and not (host.store / "objects").exists()


def test_patched_file_changed_by_hand(host):
    before = host.tree()
    host.apply()
    path = host.path(SERVER_ARGS)
    edited = path.read_text() + "# by hand\n"
    path.write_text(edited)
    document = host.apply()
    assert document["exit_code"] == 2 and "+# by hand" in document["diff"]
    document = host.rollback()
    assert document["outcome"] == "passed" and host.tree() == before
    kept = [file.read_text() for file in (host.store / "drift").iterdir()]
    assert kept == [edited], "nothing is ever lost"
    assert any("drift" in note for note in document["installation"]["notes"])


def test_created_file_changed_or_removed_by_hand(host):
    before = host.tree()
    host.apply()
    host.path(CREATED).unlink()
    assert host.verify()["exit_code"] == 1
    assert host.apply()["changed"] and host.verify()["exit_code"] == 0
    host.path(CREATED).write_text("X = 1\n")
    assert host.apply()["exit_code"] == 2
    assert host.rollback()["outcome"] == "passed" and host.tree() == before


def test_patched_file_removed_by_hand(host):
    before = host.tree()
    host.apply()
    host.path(WORKER).unlink()
    assert host.apply()["exit_code"] == 2
    assert host.rollback()["outcome"] == "passed" and host.tree() == before


def test_patched_file_never_becomes_a_backup(host):
    host.apply()
    patched = mini.sha256sum(host.path(SERVER_ARGS))
    shutil.rmtree(host.store)
    assert host.apply()["exit_code"] == 2, "without its state a patched file is drift, whatever it looks like"
    assert patched not in objects(host) if (host.store / "objects").exists() else True


@pytest.mark.parametrize("bundle", [None, mini.bundle()], ids=["no bundle", "bundle"])
def test_store_is_gone(host, bundle):
    """Nothing here knows the pristine bytes any more: that is said, whoever asks, and nothing is changed."""
    host.apply()
    shutil.rmtree(host.store)
    before = host.tree()
    what = "is patched with speculative" if bundle else "2 files of SGLang 0.5.9 are not those of RECORD"
    for ask in (host.status, host.inspect):
        document = ask(bundle=bundle)
        assert document["installation"]["state"] == "drifted", document
        assert {SERVER_ARGS, WORKER} <= {one["path"] for one in document["files"]}
    assert what in host.status(bundle=bundle)["summary"]
    for _ in range(2):
        document = host.rollback(bundle=bundle)
        assert (document["outcome"], document["changed"]) == ("refused", False), document
        assert what in document["summary"] and "no backup" in document["summary"]
        assert "pip install --force-reinstall --no-deps sglang==0.5.9" in document["remedy"]
    assert host.tree() == before
    assert sorted(path.name for path in host.store.rglob("*") if path.is_file()) == ["audit.jsonl", "lock"]


def test_what_the_remedy_says_helps(host, tmp_path):
    host.apply()
    shutil.rmtree(host.store)
    wheel = str(mini.wheel(tmp_path))
    mini.pip(host.python, "install", "--no-index", "--force-reinstall", "--no-deps", wheel)
    assert host.status()["installation"]["state"] == "pristine"
    assert host.apply()["outcome"] == "passed"
    assert host.rollback()["outcome"] == "passed" and not host.path(CREATED).exists()


@pytest.mark.parametrize("bundle", [None, mini.bundle()], ids=["no bundle", "bundle"])
def test_store_without_its_state_still_restores(host, bundle):
    before = host.tree()
    host.apply()
    shutil.rmtree(host.store / "installations")
    said = host.status(bundle=bundle)
    assert said["installation"]["state"] == "drifted" and "has forgotten it" in said["summary"]
    assert host.rollback(bundle=bundle)["outcome"] == "passed"
    assert host.tree() == before


def test_what_is_not_the_patch_is_no_lost_patch(host):
    """Somebody's own change elsewhere in the package: patching and rolling back never touch it."""
    host.path("sglang/version.py").write_text('__version__ = "0.5.9"  # ours\n')
    before = host.tree()
    host.apply()
    for _ in range(2):
        assert host.rollback()["outcome"] == "passed"
        assert host.status()["installation"]["state"] == "pristine"
        assert host.tree() == before


# disks


@root_only
@pytest.mark.parametrize("room", [0, 4, 24])
def test_store_is_full(host, room):
    before = host.tree()
    with mounted(host.store, "-t", "tmpfs", "-o", "mode=755,size=2m", "tmpfs"):
        fill(host.store, room)
        document = host.apply()
        assert document["exit_code"] in (2, 3), document
        assert "free" in document["remedy"] and not document["changed"]
        assert host.tree() == before
        (host.store / "filler").unlink()
        assert host.apply()["outcome"] == "passed"
        assert host.rollback()["outcome"] == "passed" and host.tree() == before


@root_only
@pytest.mark.parametrize("room", [0, 4, 8])
def test_package_disk_is_full(host, tmp_path, room):
    """The disk fills up after the preflight: the steps say when."""
    with package_on_tmpfs(host, tmp_path):
        before = host.tree()

        def fill_up(name):
            if name == "in place journal.json":
                fill(host.root, room)

        document = host.apply(on_step=fill_up, no_import=True)
        assert document["exit_code"] in (2, 3) and "No space left" in document["summary"], document
        (host.root / "filler").unlink()
        assert host.tree() == before
        assert host.apply()["outcome"] == "passed"
        assert host.rollback()["outcome"] == "passed" and host.tree() == before


@root_only
def test_store_fills_up_before_the_commit(host):
    """Every file is in place when the state cannot be written: undone, exit code 3."""
    before = host.tree()
    with mounted(host.store, "-t", "tmpfs", "-o", "mode=755,size=4m", "tmpfs"):

        def fill_up(name):
            if name == f"bytecode dropped {WORKER}":
                fill(host.store, 0)

        document = host.apply(on_step=fill_up, no_import=True)
        assert (document["outcome"], document["exit_code"]) == ("undone", 3), document
        assert host.tree() == before
        (host.store / "filler").unlink()
        assert host.apply()["outcome"] == "passed" and host.rollback()["outcome"] == "passed"


@root_only
def test_undo_needs_no_space_on_the_package_disk(host, tmp_path):
    with package_on_tmpfs(host, tmp_path):
        before = host.tree()

        def fill_up(name):
            if name == f"bytecode dropped {WORKER}":
                fill(host.root, 0)
                raise OSError(5, "Input/output error")

        document = host.apply(on_step=fill_up, no_import=True)
        assert document["outcome"] == "undone", document
        (host.root / "filler").unlink()
        assert host.tree() == before


@root_only
def test_read_only_package(host):
    host.apply()
    patched = host.tree()
    with mounted(host.root, "--bind", "-o", "ro", str(host.root)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(host.root)], check=True)
        for document in (host.apply(newer()), host.rollback()):
            assert document["exit_code"] == 2 and "read-only" in document["summary"], document
            assert "remount" in document["remedy"]
        assert host.verify()["outcome"] == "passed", "to verify needs no write"
    assert host.tree() == patched


def package_on_tmpfs(host, tmp_path):
    shutil.copytree(host.root, tmp_path / "copy", symlinks=True)
    shutil.rmtree(host.root)

    @contextlib.contextmanager
    def whole():
        with mounted(host.root, "-t", "tmpfs", "-o", "mode=755,size=4m", "tmpfs"):
            shutil.copytree(tmp_path / "copy", host.root, symlinks=True, dirs_exist_ok=True)
            yield

    return whole()


def fill(folder, leave_kib):
    """Fill a small file system up to ``leave_kib``."""
    with (folder / "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"x" * 4096)
    size = (folder / "filler").stat().st_size - leave_kib * 1024
    os.truncate(folder / "filler", max(0, size))


# two at once


def test_second_operator_is_refused_at_once(host):
    slow = mini.altered(
        lambda variant: variant["files"][1].update(create="import time\ntime.sleep(3)\n" + mini.CREATE_TEXT)
    )
    first = start_apply(host, slow, "--actor", "alice")
    lock = next(iter_until(lambda: list(host.store.glob("installations/*/lock"))))
    next(iter_until(lambda: lock.read_text()))
    began = time.monotonic()
    for document in (host.apply(), host.rollback(), host.verify(), host.apply(check=True)):
        assert document["exit_code"] == 2 and "apply by alice since 20" in document["summary"], document
    assert time.monotonic() - began < 2.5
    assert any("alice" in note for note in host.status()["installation"]["notes"])
    assert json.loads(first.communicate(timeout=60)[0])["outcome"] == "passed"
    assert host.rollback()["outcome"] == "passed"


def iter_until(look, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            yield from found if isinstance(found, list) else [found]
        time.sleep(0.02)


# links, attributes, bytecode


def test_hard_linked_file_is_replaced_never_written_through(host, tmp_path):
    """uv links its cache into every environment: the cache must not see the patch."""
    cache = tmp_path / "cache.py"
    os.link(host.path(SERVER_ARGS), cache)
    pristine = cache.read_bytes()
    before = host.tree()
    host.apply()
    assert cache.read_bytes() == pristine and host.path(SERVER_ARGS).stat().st_nlink == 1
    host.rollback()
    assert cache.read_bytes() == pristine and host.tree() == before


def test_undone_file_is_the_very_same_file(host, tmp_path):
    cache = tmp_path / "cache.py"
    os.link(host.path(SERVER_ARGS), cache)

    def fail(name):
        if name == f"renamed {CREATED}":
            raise OSError(5, "Input/output error")

    assert host.apply(on_step=fail, no_import=True)["outcome"] == "undone"
    assert cache.samefile(host.path(SERVER_ARGS))


def test_symlinked_site_packages(host, tmp_path):
    real = tmp_path / "elsewhere"
    shutil.move(host.root, real)
    host.root.symlink_to(real)
    document = host.apply()
    assert document["outcome"] == "passed" and document["installation"]["root"] == str(real)
    assert host.rollback()["outcome"] == "passed"


def test_symlinked_file_is_refused(host, tmp_path):
    target = tmp_path / "server_args.py"
    shutil.move(host.path(SERVER_ARGS), target)
    host.path(SERVER_ARGS).symlink_to(target)
    document = host.apply()
    assert document["exit_code"] == 2 and "symbolic link" in document["summary"]


def test_mode_owner_and_attributes_stay(host):
    path = host.path(SERVER_ARGS)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    with contextlib.suppress(OSError):
        os.setxattr(path, "user.note", b"kept")

    def kept():
        found = path.stat()
        return (
            found.st_mode,
            found.st_uid,
            found.st_gid,
            [(n, os.getxattr(path, n)) for n in os.listxattr(path)],
        )

    before = kept()
    host.apply()
    assert kept() == before
    host.rollback()
    assert kept() == before


def test_stale_bytecode_does_not_survive(host):
    """Bytecode that claims to be current whatever the source says (PEP 552, unchecked) is dropped."""
    path = host.path(SERVER_ARGS)
    code = (
        f"import py_compile; py_compile.compile({str(path)!r}, doraise=True, "
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    subprocess.run([host.python, "-c", code], check=True)
    other = path.parent / "__pycache__" / "server_args.cpython-399.opt-1.pyc"
    other.write_bytes(b"old")
    assert host.apply()["outcome"] == "passed"
    assert not list(path.parent.glob("__pycache__/server_args.*"))
    subprocess.run([host.python, "-c", code], check=True)
    host.rollback()
    assert not list(path.parent.glob("__pycache__/server_args.*"))


def test_verify_is_not_fooled_by_stale_bytecode(host):
    host.apply()
    path = host.path(WORKER)
    patched = path.read_bytes()
    path.write_bytes(patched.replace(b"self.plain", b"self.other"))
    code = (
        f"import py_compile; py_compile.compile({str(path)!r}, doraise=True, "
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    subprocess.run([host.python, "-c", code], check=True)
    path.write_bytes(patched)
    document = host.verify()
    assert document["exit_code"] == 1 and "stale bytecode" in document["summary"]


# SGLang changes underneath


def test_reinstalled_underneath(host, tmp_path):
    before = host.tree()
    host.apply()
    mini.pip(
        host.python, "install", "--no-index", "--force-reinstall", "--no-deps", str(mini.wheel(tmp_path))
    )
    assert host.path(CREATED).exists(), "pip does not know the created file"
    assert host.verify()["exit_code"] == 1
    assert host.apply()["outcome"] == "passed"
    assert host.rollback()["outcome"] == "passed"
    assert host.tree().keys() - before.keys() <= {
        f"./sglang-0.5.9.dist-info/{n}" for n in ("direct_url.json", "REQUESTED")
    }


def test_upgraded_underneath(host, tmp_path):
    host.apply()
    old = objects(host)
    mini.pip(
        host.python, "install", "--no-index", "--upgrade", "--no-deps", str(mini.wheel(tmp_path, "0.5.10"))
    )
    upgraded = host.tree()
    said = host.status()
    assert any("changed from 0.5.9 to 0.5.10" in note for note in said["installation"]["notes"])
    assert host.apply()["exit_code"] == 2, "the old bundle has no variant for it"
    both = mini.altered(lambda variant: variant.update(sglang=["0.5.9", "0.5.10"]))
    document = host.apply(both)
    assert document["outcome"] == "passed", document
    assert set(old) < set(objects(host)), "old pristine bytes stay"
    assert host.rollback()["outcome"] == "passed"
    for path in (SERVER_ARGS, WORKER):
        assert mini.sha256sum(host.path(path)) == mini.record_sha256(host.root, path) == upgraded[f"./{path}"]
    assert not host.path(CREATED).exists()


def test_upgraded_underneath_then_rolled_back(host, tmp_path):
    host.apply()
    mini.pip(
        host.python, "install", "--no-index", "--upgrade", "--no-deps", str(mini.wheel(tmp_path, "0.5.10"))
    )
    document = host.rollback()
    assert document["outcome"] == "passed"
    assert not host.path(CREATED).exists()
    assert mini.sha256sum(host.path(SERVER_ARGS)) == mini.record_sha256(host.root, SERVER_ARGS)
    assert host.status()["bundle"] is None


def test_half_upgraded_is_refused(host, tmp_path):
    host.apply()
    patched = host.path(WORKER).read_bytes()
    mini.pip(
        host.python, "install", "--no-index", "--upgrade", "--no-deps", str(mini.wheel(tmp_path, "0.5.10"))
    )
    host.path(WORKER).write_bytes(patched)
    document = host.apply(mini.altered(lambda variant: variant.update(sglang=["0.5.9", "0.5.10"])))
    assert document["exit_code"] == 2 and "not wholly" in document["summary"]
    assert WORKER in document["summary"]


# and again, and again


def test_ten_deploys_and_rollbacks_in_random_order(host):
    before = host.tree()
    chance = random.Random(20260101)
    for _ in range(10):
        choice = chance.choice([host.apply, lambda: host.apply(newer()), host.rollback])
        assert choice()["outcome"] == "passed"
        pristine = {mini.record_sha256(host.root, path) for path in (SERVER_ARGS, WORKER)}
        assert set(objects(host)) <= pristine and len(objects(host)) <= 2
    host.rollback()
    assert host.tree() == before
    assert len(operations.history(host.options())["history"]) == 11
