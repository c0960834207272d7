"""Python imports this at its start, wherever tests/rehearsal is on PYTHONPATH: torch then begins with the pretended device."""

import importlib.abc
import importlib.machinery
import os
import sys


class _BeforeTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is None:
            return None
        execute = found.loader.exec_module

        def load(module):
            import pretended_device

            sys.meta_path.remove(self)
            pretended_device.load_library()
            execute(module)
            pretended_device.pretend()

        found.loader.exec_module = load
        return found


if "REHEARSAL_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _BeforeTorch())
