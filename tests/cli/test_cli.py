"""python -m cute_kernels env | demo | bench, without a GPU; tests/jit_cache/test_command.py has what all share."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import cute_kernels
from bench import bench_norm, bench_reduction, harness
from cute_kernels.cli import bench, demo, env
from cute_kernels.cli import main as cli
from cute_kernels.gemm import reference as gemm_reference
from cute_kernels.gemm.config import GemmConfig
from cute_kernels.log_prob import reference as log_prob_reference
from cute_kernels.mhc import reference as mhc_reference
from cute_kernels.mxfp8 import reference as mxfp8_reference
from jit_cache.command import EXIT_STATUS
from jit_cache.prewarm import Report, Result
from jit_cache.store import settings
from tests.bench.test_harness import FakeDevice

prewarm_module = importlib.import_module("jit_cache.prewarm")  # the package's attribute of that name is the function
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")


def test_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "cute_kernels", "--help"], capture_output=True, text=True, check=True)
    assert all(command in found.stdout for command in ("env", "demo", "bench"))


def test_version_and_exit_statuses_are_told(capsys):
    for option, expected in (("--version", f"cute-kernels {cute_kernels.__version__}"), ("--help", EXIT_STATUS)):
        with pytest.raises(SystemExit, match="0"):
            cli.main([option])
        assert expected in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words, where",
    [
        (["env"], "cute_kernels.cli.env.report"),
        (["demo", "--json", "-"], "cute_kernels.cli.demo._has_supported_gpu"),
        (["check"], "cute_kernels.cli.check._check"),
        (["bench", "norm"], "subprocess.run"),
    ],
    ids=lambda words: words[0],
)
def test_ctrl_c_is_one_line(words, where, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    assert cli.main(words) == 130
    assert capsys.readouterr().err == "cute_kernels: interrupted\n"


def test_env_names_what_a_bug_report_needs(capsys, monkeypatch):
    monkeypatch.setenv("JIT_CACHE_MODE", "warn")
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for expected in (
        torch.__version__,
        env.dsl_version(),
        "driver",
        "apache-tvm-ffi",
        "kernel cache",
        "JIT_CACHE_MODE",
    ):
        assert expected in text


def test_env_as_json(capsys):
    assert cli.main(["env", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__ and "kernel cache" in found


@pytest.mark.parametrize("words", [["demo"], ["check"], ["train"], ["bench"]], ids=lambda words: words[0])
def test_a_wrong_setting_is_named(words, capsys, monkeypatch):
    monkeypatch.setenv("JIT_CACHE_MODE", "sometimes")
    settings.cache_clear()
    try:
        assert cli.main(words) == 2
    finally:
        settings.cache_clear()
    out, err = capsys.readouterr()
    assert err.startswith("cute_kernels: JIT_CACHE_MODE must be on or warn or off, got 'sometimes'") and not out


def test_env_of_what_is_not_right(capsys, monkeypatch):
    """Is shown as it is: it may be what the bug report is about."""
    monkeypatch.setenv("JIT_CACHE_MODE", "sometimes")
    monkeypatch.setenv("TORCH_PLACE", "/a/[old]/b[/a]")
    settings.cache_clear()
    try:
        assert cli.main(["env"]) == 0
    finally:
        settings.cache_clear()
    text = capsys.readouterr().out
    assert "JIT_CACHE_MODE must be" in text and "/a/[old]/b[/a]" in text


def test_dsl_version_names_the_flavour(monkeypatch):
    installed = {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}
    monkeypatch.setattr(env, "version", installed.get)
    assert env.dsl_version() == "4.8.1 cu13"
    installed.clear()
    assert env.dsl_version() == "not installed"


@pytest.mark.parametrize("heading", ["CUDA Version: 13.0", "CUDA UMD Version: 13.0"])
def test_driver_cuda_version(monkeypatch, heading):
    monkeypatch.setattr(
        env, "_nvidia_smi", lambda *arguments: ["| NVIDIA-SMI 580.1  Driver Version: 580.1", f"| {heading} |"]
    )
    assert env.driver_cuda_version() == "13.0"
    monkeypatch.setattr(env, "_nvidia_smi", lambda *arguments: [])
    assert env.driver_cuda_version() is None


def test_bench_of_an_unknown_family(capsys):
    assert cli.main(["bench", "nothing"]) == 2
    expected = "no such family: nothing; there are: attention, attention_backward, bits, decode, "
    assert expected in capsys.readouterr().err


def test_bench_outside_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    assert cli.main(["bench"]) == 1
    assert "checkout of the repository" in capsys.readouterr().err


@without_gpu
def test_bench_without_gpu(capfd):
    assert cli.main(["bench", "norm", "--quick"]) == 1
    assert "GPU" in capfd.readouterr().err


@pytest.mark.parametrize(
    "families, ends, status",
    [
        ([], ["exit(0)", "exit(3)", "exit(0)"], 1),
        (["a", "b"], ["exit(0)", "os.kill(os.getpid(), 9)", "exit(99)"], 1),
        (["a", "c"], ["exit(0)", "exit(1)", "exit(0)"], 0),
    ],
)
def test_bench_runs_each_family_in_a_process(monkeypatch, tmp_path, capfd, families, ends, status):
    """All of them, whatever the status of one; a peer that one imports is not there for the next."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    for family, end in zip("abc", ends, strict=True):
        text = f"import os, sys\nprint({family!r}, os.getpid(), *sys.argv[1:], flush=True)\n{end}\n"
        (tmp_path / "bench" / f"bench_{family}.py").write_text(text)
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    assert cli.main(["bench", *families, "--quick", "--save"]) == status
    found = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [(family, *options[:-1]) for family, _, *options in found] == [
        (family, "--quick", "--save", "--out") for family in families or "abc"
    ]
    assert len({process for _, process, *_ in found} | {str(os.getpid())}) == len(found) + 1


def test_bench_tells_the_lines_as_json(monkeypatch, tmp_path, capfd):
    """And nothing else on the standard output, whatever the families print."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    for us, family in enumerate("ab"):
        text = f"import sys\nprint('table')\nopen(sys.argv[-1], 'a').write('{{\"us\": {us}}}\\n')\n"
        (tmp_path / "bench" / f"bench_{family}.py").write_text(text)
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    assert cli.main(["bench", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == [{"us": 0}, {"us": 1}] and err == "table\ntable\n"


@dataclass(frozen=True)
class Layout:
    n: int
    vec: int


def result(status="compiled", stack_bytes=0):
    record = {
        "seconds": 0.5,
        "files": {".o": {"size": 20480}},
        "kernels": [
            {
                "name": "k",
                "registers": 96,
                "stack_bytes": stack_bytes,
                "static_smem_bytes": 8,
                "dynamic_smem_bytes": 1024,
            }
        ],
    }
    failed = status == "failed"
    return Result(
        builder="cute_kernels.norm.kernel.norm_forward",
        arguments=("sm_90a", "rms", None, (True, False), Layout(4096, 8)),
        status=status,
        seconds=0.6,
        record=None if failed else record,
        error="ptxas: too many registers" if failed else None,
    )


@pytest.mark.parametrize("status, ok", [("compiled", True), ("disk", True), ("failed", False)])
def test_demo_without_gpu(monkeypatch, capsys, status, ok):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(prewarm_module, "discover", lambda package, archs: [])
    monkeypatch.setattr(prewarm_module, "prewarm", lambda jobs, progress: Report((result(status),), 1.0))
    monkeypatch.setattr(demo, "_check_references", lambda found: True)
    found_status, found = demo.run()
    assert found_status == (0 if ok else 1) and found["ok"] == ok and found["gpu"] is None
    assert [kernel["status"] for kernel in found["kernels"]] == [status]
    text = capsys.readouterr().out
    assert "norm_forward(rms, -, (yes, no), n=4096)" in text
    assert "Nothing was run on a GPU" in text
    lines = text.splitlines()
    if ok:
        assert "96" in text and "1032" in text and "20" in text
        assert lines[-1].startswith(
            "OK: 1 kernels of 1 families compiled for sm_90a and sm_100a, 0 references right, in "
        )
    else:
        assert "ptxas: too many registers" in text
        assert lines[-1].startswith(
            "FAILED: 0 of 1 kernels of 0 families compiled for sm_90a and sm_100a, 0 references "
        )


def test_the_last_line_counts_the_references(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "_compile_representatives", lambda found: True)

    def one_of_two(found):
        found.references += [{"ok": True}, {"ok": False}]
        return False

    monkeypatch.setattr(demo, "_check_references", one_of_two)
    assert demo.run()[0] == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: 0 kernels") and " 1 of 2 references right, in " in last


FAMILIES = {"attention", "gemm", "log_prob", "mhc", "moe", "mxfp8", "norm", "reduction", "sampling", "scatter"}


def test_the_demo_compiles_one_kernel_of_each_builder():
    jobs = prewarm_module.discover("cute_kernels", demo.ARCHS)
    chosen = demo.representatives(jobs)
    assert {(builder, arguments[0]) for builder, arguments in chosen} == {(builder, job[0]) for builder, job in jobs}
    assert len(set(chosen)) == len(chosen) < 100 and set(chosen) < set(jobs)
    assert {builder.kernel.split(".")[1] for builder, _ in chosen} == FAMILIES


def test_demo_with_gpu(monkeypatch, capsys):
    """With fakes of the GPU and for torch.compile: the tables, and the status when our result is wrong."""
    monkeypatch.setattr(demo, "_has_supported_gpu", lambda: True)
    monkeypatch.setattr(demo, "MODELS", {"Small": 64})
    monkeypatch.setattr(demo, "FEED_FORWARD", {"Small": 96})
    monkeypatch.setattr(demo, "TOKENS", 32)
    monkeypatch.setattr(demo, "EXPERT_WEIGHTS", {"Experts": (2, 64, 96)})
    monkeypatch.setattr(demo, "CONNECTIONS", {"Streams": (32, 64)})
    monkeypatch.setattr(demo, "VOCABULARIES", {"Words": (32, 130, 64)})
    monkeypatch.setattr(demo, "_check_batches", lambda found: True)
    for shapes in ("QUICK_SHAPES", "SUM_SHAPES"):
        monkeypatch.setattr(bench_reduction, shapes, ((32, 64),))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T")
    monkeypatch.setattr(harness, "bench_stream", contextlib.nullcontext)
    monkeypatch.setattr(harness, "CudaDevice", lambda **options: FakeDevice())
    monkeypatch.setattr(harness, "environment", lambda commit: {})
    for module in (bench_norm, bench_reduction):
        monkeypatch.setitem(module.PROVIDERS, "torch_compile", module.PROVIDERS["torch"])
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)
    status, found = demo.run()
    assert status == 0 and found["ok"] and found["gpu"] == "NVIDIA T"
    assert {m["case"]["family"] for m in found["measurements"]} >= {"norm", "gemm", "mhc"}
    assert all(m["results"]["cute_kernels"]["us"] == 10.0 for m in found["measurements"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line[:1] == ["Small"]]
    assert [line for line in lines if line[:1] == ["Experts"]] == [
        ["Experts", op, "2x64x96", "exact", "10.0", "200%"] for op in ("quantize_3d_colwise", "quantize_3d_dual")
    ]
    connections = [line for line in lines if line[:1] == ["Streams"]]
    assert [row[1:3] for row in connections] == [["fwd", "32x4x64"], ["bwd", "32x4x64"]]
    assert all(1e-3 < float(row[3]) < 4e-3 and row[4] == "10.0" for row in connections)
    words = [line for line in lines if line[:1] == ["Words"]]
    assert [row[1:3] for row in words] == [["fwd", "32x130x64"], ["bwd", "32x130x64"]]
    assert all(float(row[3]) < 3e-3 and row[4:7] == ["10.0", "2.00", "3.00"] for row in words)
    norms, gemms = rows[:4], rows[4:]
    assert [row[1:4] for row in norms] == [
        [op, direction, "32x64"] for op in ("rms_norm", "layer_norm") for direction in ("fwd", "bwd")
    ]
    assert all(row[5:] == ["10.0", "400%", "2.00", "3.00"] for row in norms)
    assert [row[1:3] for row in gemms] == [
        *([direction, "32x96x64"] for direction in ("fwd", "dA", "dB")),
        ["fwd", "16x96x64"],
    ]
    assert all(1e-3 < float(row[3]) < 2e-3 and row[4:] == ["10.0", "0", "2.00"] for row in gemms)

    with monkeypatch.context() as patch:
        patch.setattr("cute_kernels.mm", lambda a, b, out: out.copy_(1.01 * (a @ b)))
        assert demo.run()[0] == 1
        assert "wrong result" in capsys.readouterr().out

    monkeypatch.setattr("cute_kernels.rms_norm", lambda x, weight, eps: 1.01 * F.rms_norm(x, x.shape[-1:], weight, eps))
    assert demo.run()[0] == 1
    assert "wrong result" in capsys.readouterr().out


@pytest.mark.parametrize(
    "linear, expected",
    [
        (lambda x, weight: x * weight[0], "invariant"),
        (lambda x, weight: x * weight[0] * (1 + (len(x) < 50)), "T1, 1 of 256 rows: output at [0, 0]: "),
        (lambda x, weight: x[[]], "ValueError: "),
        (lambda x, weight: (x * weight[0]).detach(), "there is no gradient of x"),
    ],
)
def test_demo_tries_other_batches(monkeypatch, capsys, linear, expected):
    monkeypatch.setattr(demo, "MODELS", {"Small": 64})
    monkeypatch.setattr("cute_kernels.linear", linear)
    found = demo.Findings(Console(width=200))
    assert demo._check_batches(found, device="cpu") == (expected == "invariant")
    assert bool(found.batches[0]["failed"]) == (expected != "invariant")
    assert expected in capsys.readouterr().out


def test_a_kernel_s_tile_is_shown():
    arguments = (None, True, "k", GemmConfig((128, 256, 64), (2, 1), 4, 8))
    assert ", ".join(map(demo._short, arguments)) == "-, yes, k, tile=(128, 256, 64)"


def test_references_are_within_their_limits(capsys):
    found = demo.Findings(Console(width=120))
    assert demo._check_references(found)
    assert all(row["ok"] and 0 < row["errors"]["y"] <= row["limit"] for row in found.references)
    text = capsys.readouterr().out
    ops = ("rms_norm", "layer_norm", "linear", "linear, bias, gelu", "linear_log_prob")
    assert all(op in text for op in (*ops, "hyper_connection", "quantize_rowwise"))


WRONG = {
    "rms_norm": lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 0.1),
    "linear": lambda x, weight, *bias, **options: gemm_reference.linear(x, 1.01 * weight, *bias, **options),
    "linear_log_prob": lambda x, weight, target: log_prob_reference.linear_log_prob(1.01 * x, weight, target),
    "mhc.hyper_connection": lambda x, f, phi, *rest: mhc_reference.hyper_connection(x, f, 1.01 * phi, *rest),
    "quantize_rowwise": lambda x: mxfp8_reference.quantize_rowwise(1.1 * x),
}


@pytest.mark.parametrize("names", [["rms_norm"], ["quantize_rowwise"], list(WRONG)], ids=["a norm", "mxfp8", "all"])
def test_wrong_references_fail(monkeypatch, capsys, names):
    """One is enough; each is found."""
    for name in names:
        monkeypatch.setattr(f"cute_kernels.{name}", WRONG[name])
    found = demo.Findings(Console(width=120))
    assert not demo._check_references(found)
    wrong = {row["op"].partition(",")[0] for row in found.references if not row["ok"]}
    assert wrong == {name.rpartition(".")[2] for name in names}
