"""The fingerprints in the repository are those of the wheels, by the engine's reckoning too."""

from __future__ import annotations

import zipfile

import pytest
from specgate.anchors import Source

from controller.fingerprints import fingerprint
from tests import wheels
from tests.patch.conftest import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_they_are_those_of_the_wheel(version):
    with zipfile.ZipFile(wheels.wheel(version)) as wheel:
        for file in VERSIONS[version]["files"]:
            for known in file.get("fingerprints", []):
                data = wheel.read(file["path"])
                ours = fingerprint(data.decode(), known["object"])
                assert known["sha256"][version] == ours
                assert Source(data, file["path"]).fingerprint(known["object"]) == ours


@pytest.mark.parametrize("version", VERSIONS)
def test_every_function_that_is_changed_has_one(version):
    for file in VERSIONS[version]["files"]:
        known = {one["object"] for one in file.get("fingerprints", [])}
        for edit in file.get("edits", []):
            names = [step.get("class") or step.get("def") for step in edit["at"]]
            changed = ".".join(name for name in names if name)
            if any("def" in step for step in edit["at"]) and edit["id"] != "argument":
                assert changed in known
