"""Adds a fake GPU to torch at the first backward pass, unless CUDA_VISIBLE_DEVICES is the empty string then.

With a GPU, torch's first backward pass starts threads, and every process that is forked later fails at its
own first backward pass. If PYTHONPATH contains this folder, the same happens on a machine without a GPU.
"""

import importlib.abc
import importlib.util
import os
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def load_and_add_device(module):
            load(module)
            _add_device_at_first_backward(module)

        spec.loader.exec_module = load_and_add_device
        return spec


def _add_device_at_first_backward(torch):
    real = torch.autograd.backward

    def backward(*args, **options):
        torch.autograd.backward = real
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

            _setup_privateuseone_for_python_backend("npy")
        return real(*args, **options)

    torch.autograd.backward = backward


sys.meta_path.insert(0, _Finder())
