"""The same change with pyinfra's own operations; ``--data step=deploy``, ``verify`` or ``rollback``."""

from pyinfra import host
from pyinfra.operations import files, server

SRT = f"{host.data.tree}/sglang/srt"
PATCHED = f"{host.data.patched}/sglang/srt"
PRISTINE = ("server_args.py", "speculative/eagle_worker_v2.py")
NEW = "speculative/batch_threshold.py"
GREP = "grep -n -e speculative_disable_batch_threshold -e speculative-disable-batch-threshold"
COMPILE = """/usr/bin/python3 -c 'import sys; compile(open(sys.argv[1]).read(), sys.argv[1], "exec")'"""
FLAG = """        parser.add_argument(
            "--speculative-disable-batch-threshold",
            type=int,
            default=ServerArgs.speculative_disable_batch_threshold,
        )"""

if host.data.step == "deploy":
    files.directory(name="Make the folder for the backups", path="/srv/backup/speculative", _sudo=True)
    server.shell(
        name="Keep the pristine files",
        commands=[
            f"test -e /srv/backup/{file} || cp -p {SRT}/{file} /srv/backup/{file}" for file in PRISTINE
        ],
        _sudo=True,
    )
    files.block(
        name="Add the field",
        path=f"{SRT}/server_args.py",
        content="    speculative_disable_batch_threshold: int = 0  # 0 = always speculate",
        line="    speculative_accept_threshold_acc: float = 1.0",
        after=True,
        marker="    # {mark} batch threshold, field",
        _sudo=True,
    )
    files.block(
        name="Add the flag",
        path=f"{SRT}/server_args.py",
        content=FLAG,
        line="    def add_cli_args.parser: argparse.ArgumentParser.:",
        after=True,
        marker="        # {mark} batch threshold, flag",
        _sudo=True,
    )
    for file in ("speculative/eagle_worker_v2.py", NEW):
        files.put(name=f"Copy {file}", src=f"{PATCHED}/{file}", dest=f"{SRT}/{file}", _sudo=True)

if host.data.step in ("deploy", "verify"):
    server.shell(
        name="Look for the flag and compile",
        commands=[f"{GREP} {SRT}/server_args.py"] + [f"{COMPILE} {SRT}/{file}" for file in (*PRISTINE, NEW)],
        _sudo=True,
    )

if host.data.step == "rollback":
    server.shell(
        name="Put the pristine files back",
        commands=[f"cp -p /srv/backup/{file} {SRT}/{file}" for file in PRISTINE],
        _sudo=True,
    )
    files.file(name="Remove the new module", path=f"{SRT}/{NEW}", present=False, _sudo=True)
