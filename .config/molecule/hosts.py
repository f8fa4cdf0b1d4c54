#!/usr/bin/env python3
"""The scenarios' inventory for Ansible (``--list``): the test host mol1, when it stands."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.hosts.machine import Fleet

fleet = Fleet.here()
hosts = {host.name: {"ansible_host": host.address} for host in fleet.hosts if host.name == "mol1"}
print(json.dumps({"gpu": {"hosts": list(hosts), "vars": fleet.variables}, "_meta": {"hostvars": hosts}}))
