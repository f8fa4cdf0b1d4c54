"""Where SGLang is, of what kind, and which bytes are pristine: on real installations made by pip and git."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.unit.engine import mini
from tests.unit.engine.conftest import Host
from tests.unit.engine.mini import SERVER_ARGS, WORKER

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]


def git(folder, *arguments):
    done = subprocess.run([*GIT, "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write_tree(folder, version="0.5.9"):
    for path, text in mini.files(version).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


@pytest.fixture
def checkout(tmp_path):
    """Return a git checkout laid out as SGLang's: the package lies in python/."""
    folder = tmp_path / "check out"
    write_tree(folder / "python")
    (folder / "python" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=68"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "sglang"\nversion = "0.5.9"\n'
        '[tool.setuptools.packages.find]\ninclude = ["sglang*"]\n'
    )
    git(folder.parent, "init", "-q", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def bare_venv(installed_once, tmp_path):
    """Return a virtual environment without SGLang."""
    shutil.copytree(installed_once, tmp_path / "bare", symlinks=True)
    for path in mini.site(tmp_path / "bare").glob("sglang*"):
        shutil.rmtree(path)
    return tmp_path / "bare"


def test_wheel(host):
    found = host.inspect()["installation"]
    assert found["kind"] == "wheel" and found["version"] == "0.5.9" and found["visible"] is True
    assert found["root"] == str(host.root) and found["python"] == str(host.python)
    assert found["dist_info"].endswith("sglang-0.5.9.dist-info") and found["others"] == []


def test_root_alone_finds_the_interpreter_of_its_environment(host):
    found = host.inspect(python=None, root=str(host.root))["installation"]
    assert found["python"] == str(host.python) and found["visible"] is True


def test_inspect_does_not_import_sglang(host):
    host.path("sglang/__init__.py").write_text("raise RuntimeError('imported')\n")
    assert host.inspect()["outcome"] == "passed"


def test_git_checkout_in_the_path(checkout, bare_venv, tmp_path):
    host = Host(bare_venv, tmp_path / "store", {"env": {"PYTHONPATH": str(checkout / "python")}})
    git(checkout, "tag", "v0.5.9")
    document = host.apply()
    assert document["outcome"] == "passed", document
    assert document["installation"]["kind"] == "git" and document["installation"]["version"] == "0.5.9"
    assert git(checkout, "status", "--porcelain").splitlines() == [
        f"M python/{SERVER_ARGS}",
        f" M python/{WORKER}",
        f"?? python/{mini.CREATED}",
    ]
    assert host.rollback()["outcome"] == "passed"
    assert git(checkout, "status", "--porcelain") == ""


def test_git_checkout_of_no_release_is_known_by_its_code(checkout, bare_venv, tmp_path):
    host = Host(bare_venv, tmp_path / "store", {"env": {"PYTHONPATH": str(checkout / "python")}})
    (checkout / "python/sglang/version.py").write_text('__version__ = "0.5.10.dev3+gabc"\n')
    git(checkout, "commit", "-qam", "between releases")
    assert host.apply()["exit_code"] == 2, "nothing says that the code is known"
    from specgate.anchors import Source

    digest = Source((checkout / "python" / WORKER).read_bytes(), WORKER).fingerprint("EAGLEWorkerV2")
    known = [{"object": "EAGLEWorkerV2", "sha256": {"0.5.9": digest}}]
    bundle = mini.altered(lambda variant: variant["files"][2].update(fingerprints=known))
    document = host.apply(bundle)
    assert document["outcome"] == "passed", document
    assert any("its code is that of plain" in note for note in document["installation"]["notes"])


def test_changed_checkout_is_drift(checkout, bare_venv, tmp_path):
    host = Host(bare_venv, tmp_path / "store", {"env": {"PYTHONPATH": str(checkout / "python")}})
    with (checkout / "python" / WORKER).open("a") as stream:
        stream.write("# local\n")
    document = host.apply()
    assert document["exit_code"] == 2 and document["diff"].rstrip().endswith("+# local")


def test_real_editable_install(checkout, bare_venv, tmp_path):
    """pip -e with setuptools: a finder or a .pth beside the dist-info."""
    try:
        mini.pip(bare_venv / "bin" / "python", "install", "--no-deps", "-e", str(checkout / "python"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot build an editable install here: {error.stderr.decode()[-200:]}")
    git(checkout, "tag", "v0.5.9")
    host = Host(bare_venv, tmp_path / "store")
    document = host.apply()
    assert document["outcome"] == "passed", document
    found = document["installation"]
    assert found["kind"] == "editable" and found["root"] == str(checkout / "python") and found["visible"]
    assert found["dist_info"].startswith(str(mini.site(bare_venv)))
    assert host.rollback()["outcome"] == "passed"
    assert git(checkout, "status", "--porcelain", "-uno") == ""


def test_no_record_and_no_commit_needs_hashes(tmp_path, bare_venv):
    write_tree(tmp_path / "plain")
    host = Host(
        bare_venv, tmp_path / "store", {"root": str(tmp_path / "plain"), "python": None, "no_import": True}
    )
    document = host.apply()
    assert document["installation"]["kind"] == "unknown" and document["exit_code"] == 2
    assert "--pristine" in document["remedy"]
    hashes = {path: mini.sha256sum(tmp_path / "plain" / path) for path in (SERVER_ARGS, WORKER)}
    assert host.apply(pristine=hashes)["outcome"] == "passed"
    assert host.rollback(pristine=hashes)["outcome"] == "passed"
    assert {path: mini.sha256sum(tmp_path / "plain" / path) for path in hashes} == hashes


def test_two_on_the_path(host, tmp_path):
    write_tree(tmp_path / "second", "0.5.10")
    env = {"PYTHONPATH": str(tmp_path / "second")}
    found = host.inspect(env=env)["installation"]
    assert found["root"] == str(tmp_path / "second")
    assert found["others"] == [{"root": str(host.root), "version": "0.5.9"}]


def test_invisible_to_the_interpreter(host, tmp_path):
    write_tree(tmp_path / "second")
    document = host.apply(env={"PYTHONPATH": str(tmp_path / "second")}, root=str(host.root))
    assert document["installation"]["visible"] is False
    assert document["exit_code"] == 2 and f"not from {host.root}" in document["summary"]
    assert "interpreter that runs this server" in document["remedy"]


def test_installed_where_the_interpreter_does_not_look(bare_venv, installed_once, tmp_path):
    other = bare_venv / "lib" / "python3.1" / "site-packages"
    shutil.copytree(mini.site(installed_once), other)
    document = Host(bare_venv, tmp_path / "store").inspect()
    assert document["exit_code"] == 2 and "sees no SGLang" in document["summary"]
    assert str(other) in document["remedy"]


def broken_link(folder):
    (folder / "python").symlink_to("/nonexistent/python")


def not_executable(folder):
    (folder / "python").write_text("")


def not_python(folder):
    shutil.copy(shutil.which("true"), folder / "python")


def says_nonsense(folder):
    (folder / "python").write_text("#!/bin/sh\necho hello\necho 'no such thing' >&2\nexit 3\n")
    (folder / "python").chmod(0o755)


def no_program(folder):
    (folder / "python").write_text("not a program")
    (folder / "python").chmod(0o755)


def a_folder(folder):
    (folder / "python").mkdir()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "does not exist"),
        (broken_link, "link to /nonexistent/python, which does not exist"),
        (not_executable, "is not executable"),
        (not_python, "does not answer as a Python interpreter"),
        (says_nonsense, "no such thing"),
        (no_program, "does not answer"),
        (a_folder, "is not a file"),
    ],
)
def test_bad_interpreter_is_one_line(tmp_path, make, said):
    folder = tmp_path / "öd d;$(x)"
    folder.mkdir()
    make(folder)
    document = Host(tmp_path, tmp_path / "store", {"python": str(folder / "python")}).inspect()
    assert document["exit_code"] == 2 and said in document["summary"], document
    assert "\n" not in document["summary"] and document["remedy"]


def test_no_sglang(bare_venv, tmp_path):
    document = Host(bare_venv, tmp_path / "store").apply()
    assert document["exit_code"] == 2 and "sees no SGLang" in document["summary"]
    assert document["remedy"].startswith("install SGLang there")


@pytest.mark.parametrize(
    ("below", "remedy"),
    [("", "give the folder"), ("sglang", "give "), ("absent", "give the folder that holds")],
)
def test_bad_root(host, below, remedy):
    root = host.root / below if below else host.venv
    document = host.inspect(root=str(root), python=None)
    assert document["exit_code"] == 2 and remedy in document["remedy"]
    if below == "sglang":
        assert document["remedy"] == f"give {host.root}"


def test_neither_root_nor_python(host):
    assert host.inspect(python=None)["exit_code"] == 2


def test_symlinked_package_folder(host, tmp_path):
    shutil.move(host.root / "sglang", tmp_path / "sglang")
    (host.root / "sglang").symlink_to(tmp_path / "sglang")
    found = host.inspect()["installation"]
    assert found["root"] == str(tmp_path) and found["kind"] == "unknown" and found["visible"]


def test_odd_paths(installed_once, tmp_path):
    """Blanks, quotes, a newline, non-ASCII: nothing here goes through a shell."""
    folder = tmp_path / "a b'\"$(touch x);ä☃\n"
    shutil.copytree(installed_once, folder / "venv", symlinks=True)
    host = Host(folder / "venv", folder / "store")
    assert host.apply()["outcome"] == "passed"
    assert host.verify()["outcome"] == "passed"
    assert host.rollback()["outcome"] == "passed"


def test_environment_of_the_gate(host, monkeypatch):
    """PYTHONPATH of the operator stays out; what --env says goes in."""
    probe = (
        "import os\nif os.environ.get('SEEN') != 'yes' or 'PYTHONSTARTUP' in os.environ:\n"
        "    raise RuntimeError('environment: ' + repr(sorted(os.environ)))\n" + mini.CREATE_TEXT
    )
    bundle = mini.altered(lambda variant: variant["files"][1].update(create=probe))
    monkeypatch.setenv("PYTHONSTARTUP", "/x")
    monkeypatch.setenv("PYTHONPATH", "/x")
    assert host.apply(bundle)["outcome"] == "failed"
    assert host.apply(bundle, env={"SEEN": "yes"})["outcome"] == "passed"


def test_current_folder_is_not_imported_from(host, tmp_path, monkeypatch):
    write_tree(tmp_path / "here", "0.5.1")
    monkeypatch.chdir(tmp_path / "here")
    assert host.inspect()["installation"]["root"] == str(host.root)


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_other_python_versions_run_the_engine(host, version, tmp_path):
    # pyenv's own names are shims that may refuse, so its versions come first
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    found += [Path(path) for path in [shutil.which(f"python{version}")] if path]
    if not found:
        pytest.skip(f"no Python {version} here")
    (tmp_path / "b.json").write_text(json.dumps(mini.bundle()))
    for command in ("apply", "verify", "rollback"):
        done = subprocess.run(
            [found[0], "-m", "specgate", command, "--json", "--python", host.python, "--store", host.store]
            + (["--bundle", tmp_path / "b.json"] if command == "apply" else []),
            env={**os.environ, "PYTHONPATH": str(mini.ENGINE)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["outcome"] == "passed"


def test_engine_runs_from_a_zip_file(host, tmp_path):
    import zipapp

    stage = tmp_path / "stage"
    shutil.copytree(
        mini.ENGINE / "specgate", stage / "specgate", ignore=shutil.ignore_patterns("__pycache__")
    )
    zipapp.create_archive(stage, tmp_path / "specgate.pyz", main="specgate.cli:main")
    command = [sys.executable, tmp_path / "specgate.pyz", "apply", "--json", "--python", host.python]
    done = subprocess.run(
        [*command, "--store", host.store, "--bundle", "-"],
        input=json.dumps(mini.bundle()),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    document = json.loads(done.stdout)
    assert document["outcome"] == "passed", done.stderr
    assert [gate["outcome"] for gate in document["gates"]] == ["passed"] * 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("owned", ["interpreter", "package", "nothing"])
def test_root_runs_nothing_that_another_user_can_change(installed_once, owned):
    """Neither to ask where SGLang is, nor to import it; what is root's own runs as root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder / "v"], check=True)
        shutil.copytree(mini.site(installed_once), mini.site(folder / "v"), dirs_exist_ok=True)
        seen = folder / "seen"
        seen.touch()
        seen.chmod(0o666)
        write = (
            f"import os; open({str(seen)!r}, 'a').write(f'{{os.geteuid()}} {{os.environ[\"HOME\"]}}\\n')\n"
        )
        (mini.site(folder / "v") / "seen.pth").write_text(write)
        nobody = pwd.getpwnam("nobody")
        if owned != "nothing":
            what = folder / "v" if owned == "interpreter" else mini.site(folder / "v")
            subprocess.run(["chown", "-R", "nobody", what], check=True)
        host = Host(folder / "v", folder / "store")
        document = host.apply()
        assert document["outcome"] == "passed", document
        said = seen.read_text().splitlines()
        users = {"interpreter": [nobody], "package": [pwd.getpwuid(0), nobody], "nothing": [pwd.getpwuid(0)]}
        assert set(said) == {f"{user.pw_uid} {user.pw_dir}" for user in users[owned]}
