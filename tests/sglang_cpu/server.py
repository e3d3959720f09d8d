"""Starts an unpatched SGLang server on a machine without a GPU.

    python server.py --model-path FOLDER --device cpu --attention-backend torch_native ...

SGLang imports two binary packages that do not load beside a CPU build of PyTorch: its own kernels,
which exist for CUDA only, and torchvision's operators. Nothing that it runs on a CPU with the
torch-native backends calls either; they are only imported. Placeholders satisfy the imports, and a
kernel that is called after all raises and is named.

It must be the main module of the process: SGLang starts its workers by importing it again.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import MutableSequence
from types import ModuleType
from typing import Any

KERNELS = ("sgl_kernel", "sgl_kernel.kvcacheio", "sgl_kernel.mamba")
"""Modules that SGLang imports whatever it runs on. It can do without the others."""
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Those of torchvision that its Python half expects its binary half to have declared."""


class Placeholder(ModuleType):
    """A module in which every name exists, and calling one says that it does not."""

    __version__ = "0"
    __path__: MutableSequence[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} needs SGLang's CUDA kernels")

        return missing


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of kernels."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """A spec for these modules; None, which is "ask others", for the rest."""
        if fullname in KERNELS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty placeholder."""
        return Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def prepare() -> None:
    """Make `import sglang` work here, in the main process and in every worker."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if importlib.util.find_spec(KERNELS[0]) is None:
        sys.meta_path.append(PlaceholderFinder())
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    kept.append(library)  # what it declares ends with it
    for operator in OPERATORS:
        library.define(operator)


kept: list[Any] = []
prepare()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
