"""Specgate's engine: patches an SGLang installation on this host, proves it, and takes it back.

Standard library only, Python 3.9 or later; it runs from a folder, from a zip file and in an Ansible module.
"""

__version__ = "1.0.0"
