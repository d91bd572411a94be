"""Facts about the machine, for a bug report and a line of results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys

from jit_cache.command import Outcome

DSL = "nvidia-cutlass-dsl"
ENVIRONMENT_PREFIXES = ("CUTE_KERNELS_", "JIT_CACHE_", "CUTE_DSL_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "TVM_FFI_")
ENVIRONMENT_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUDA_PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "XDG_CACHE_HOME",
)


def run() -> Outcome:
    """Prints the report; returns it, too."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    found = report()
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, values in found.items():
        table.add_row(f"[bold]{section}[/]")
        for name, value in values.items():
            table.add_row(f"  {escape(name)}", escape(value))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    return 0, found


def version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def dsl_version() -> str:
    """Version and CUDA flavours of the DSL's wheels, like "4.8.1 cu12 cu13" (the version does not tell them apart)."""
    flavours = [flavour for flavour in ("cu12", "cu13") if version(f"{DSL}-libs-{flavour}")]
    return " ".join([version(DSL) or "not installed", *flavours])


def driver_version() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    lines = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return lines[0] if lines else None


def driver_cuda_version() -> str | None:
    """The newest CUDA version that the driver runs, None without a driver."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", "\n".join(_nvidia_smi()))
    return found.group(1) if found else None


def report() -> dict[str, dict[str, str]]:
    """Section -> name -> value. Imports torch, initialises no CUDA context unless there is a GPU."""
    import torch

    packages = ["cute-kernels", "torch", "triton", "apache-tvm-ffi", "cuda-python", "cuda-bindings", "numpy"]
    sections = {
        "system": {
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": f"{platform.platform()}, {os.cpu_count()} cores",
        },
        "packages": {name: version(name) or "not installed" for name in packages}
        | {DSL: dsl_version(), "torch's CUDA": torch.version.cuda or "none (CPU build)"},
        "GPU": {
            "driver": driver_version() or "none",
            "driver's CUDA": driver_cuda_version() or "none",
            **_gpus(),
        },
        "kernel cache": _cache(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES)
        },
    }
    return sections


def _cache() -> dict[str, str]:
    from jit_cache.store import settings

    try:
        found = settings()
    except ValueError as error:
        return {"settings": str(error)}
    return {
        "directory": str(found.root) + ("" if found.root.is_dir() else " (not there yet)"),
        "bundles": ", ".join(map(str, found.bundles)) or "none",
        "mode": found.mode,
    }


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"torch sees": "no GPU"}
    gpus = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus[f"cuda:{index}"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return gpus


def _nvidia_smi(*arguments: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        found = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ["nvidia-smi does not answer"]
    return found.stdout.splitlines() if found.returncode == 0 else []
