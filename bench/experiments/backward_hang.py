"""Find the hang of attention's backward: one run on one H200, about 9 minutes (or less: --seconds).

    python bench/experiments/backward_hang.py --seconds 540 --out found      (in the root of the repository)

Fresh child processes call the backward (head size 64, 32 heads on 8, 8192, causal, bf16, eager, a side stream):

    alone   the backward of attention again and again
    gemm    the same behind a product of cuBLAS that makes its dout, as in a training step
    step    bench_training_step's qwen3_moe, --provider

A thread of the child sees a launch that takes 8 s, copies that launch's counters by a copy engine on a stream made
before (twice, 2 s apart), and says which tickets, tiles and heads are missing (``diagnose``). Nothing is kept alive or
allocated otherwise than without the probe: it notes addresses, and records an event behind the launches. The parent
then asks cuda-gdb for every warp's place and every mbarrier of all CTAs, and kills the child.

After the first hang the same mode runs with patched copies of the package (VARIANTS) until each has hung or has made
ten times as many launches as the unpatched one needed: what makes the hang go away names its cause.
"""

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

TILES, HEADS, PAIRS, BLOCKS, TOGETHER, AHEAD = 64, 32, 8, 64, 4, 2
GROUP, TICKETS = HEADS // PAIRS, BLOCKS * HEADS
LIMIT = 8.0  # seconds of a launch that is a hang
ATTENTION = "cute_kernels/attention/"
SUMS, PLACES = ATTENTION + "kernel_backward_sums.py", ATTENTION + "kernel_backward_blocks.py"
# name -> (file, old, new)s; each old text is there exactly once or more, all are replaced
VARIANTS = {
    # a block's end as before ac3bff8: nobody goes on before thread 0 has counted
    "meet": [
        (
            SUMS,
            "            count_one(counter)\n\n    def staged_sums",
            "            count_one(counter)\n        self.meet()\n\n    def staged_sums",
        )
    ],
    # dk, then dv, by the place of k and v
    "turns": [
        (
            ATTENTION + "kernel_backward_tiles.py",
            "self.dv_in_ds = not self.by_channels and self.tile_rows >= self.head_size_v",
            "self.dv_in_ds = False and self.tile_rows >= self.head_size_v",
        )
    ],
    # a ticket is in a register before its place is given back
    "ticket": [
        (
            PLACES,
            "ticket = shared[0]\n            cute.arch.mbarrier_arrive",
            "ticket = shared[0]\n            cute.arch.fence_acq_rel_cta()\n            cute.arch.mbarrier_arrive",
        ),
        (
            PLACES,
            "ticket = shared[0]\n                cute.arch.mbarrier_arrive",
            "ticket = shared[0]\n                cute.arch.fence_acq_rel_cta()\n"
            "                cute.arch.mbarrier_arrive",
        ),
    ],
    # polls leave gaps
    "sleep": [
        (
            SUMS,
            "    while found != value:\n",
            '    while found != value:\n        cute.arch.inline_ptx("nanosleep.u32 100;")\n',
        )
    ],
    # kernels begin when the one before has ended
    "nopdl": [
        (ATTENTION + f, "use_pdl=True", "use_pdl=False")
        for f in ("kernel_backward_sm90.py", "kernel_delta.py", "kernel_finish_gradients.py", "kernel_forward_sm90.py")
    ],
    # a counter that is beyond is found by diagnose and by wrong sums, and does not hang
    "beyond": [(SUMS, "    while found != value:\n", "    while found < value:\n")],
    # one thread adds dq
    "adder": [
        (
            ATTENTION + "config.py",
            "        BackwardConfig(128, 2, False, False),\n",
            "        BackwardConfig(128, 2, False, False, adders=1, dq_buffers=1),\n",
        )
    ],
}
# Of the kernel's machine code: from, to, what a warp does there
WHERE = [
    (0x0, 0x530, "begin"),
    (0x580, 0x610, "loader takes its first ticket"),
    (0x2CC0, 0x2D90, "loader takes a ticket"),
    (0x4130, 0x4390, "polls a dq counter"),
    (0x4390, 0x43F0, "fence behind the poll of dq"),
    (0x43F0, 0x4680, "issues the add of dq"),
    (0x4680, 0x46F0, "dq read out of shared memory"),
    (0x46F0, 0x47B0, "dq is in memory, fences"),
    (0x47B0, 0x4840, "counted dq"),
    (0x4850, 0x48E0, "adder reads a ticket"),
    (0x48F0, 0x4920, "setmaxnreg"),
    (0x8BC0, 0x8BF0, "meets in a step"),
    (0x9440, 0x9640, "meets at a block's end"),
    (0xA620, 0xA660, "meets behind staging"),
    (0xA660, 0xA710, "polls a head's counter"),
    (0xA710, 0xA970, "issues the add of a head"),
    (0xA970, 0xAA30, "dk, dv: read out, in memory, counts"),
    (0xAA30, 0xAA70, "lanes wait for thread 0 (BSYNC)"),
    (0xAA70, 0xAB90, "reads a ticket"),
    (0xABF0, 0xAC70, "ticket_empty"),
    (0xAC70, 0xACF0, "q_empty, first tile"),
    (0xACF0, 0xAD70, "kv_empty"),
    (0xAD70, 0xADF0, "dout_empty, first tile"),
    (0xADF0, 0xAE70, "q_empty"),
    (0xAE70, 0xAEF0, "dout_empty"),
    (0xAEF0, 0xAF80, "ticket_empty"),
    (0xAF80, 0xAFE0, "adder: ticket_full, first"),
    (0xAFE0, 0xB050, "dq_full of warpgroup 0"),
    (0xB050, 0xB0C0, "dq_full of warpgroup 1"),
    (0xB0C0, 0xB150, "adder: ticket_full"),
    (0xB150, 0xB1B0, "ticket_full, first"),
    (0xB1B0, 0xB220, "k_full"),
    (0xB220, 0xB290, "q_full"),
    (0xB290, 0xB300, "v_full"),
    (0xB300, 0xB370, "dout_full"),
    (0xB370, 0xB3D0, "dq_empty"),
    (0xB3D0, 0xB440, "ticket_full"),
]
BARRIERS = (
    *(
        "ticket_full",
        "ticket_empty",
        "k_full",
        "v_full",
        "kv_empty",
        "q_full0",
        "q_full1",
        "q_empty0",
        "q_empty1",
        "dout_full0",
        "dout_full1",
    ),
    *(
        "dout_empty0",
        "dout_empty1",
        "dq_full00",
        "dq_full01",
        "dq_full10",
        "dq_full11",
        "dq_empty00",
        "dq_empty01",
        "dq_empty10",
        "dq_empty11",
        "ticket",
    ),
)


def block_of(ticket: int) -> tuple[int, int]:
    """(Block of keys, head) of a ticket, as kernel_backward_blocks.py has it."""
    first = ticket // (BLOCKS * TOGETHER) * TOGETHER
    index, ahead = ticket - first * BLOCKS, AHEAD * GROUP
    start = index // (ahead * TOGETHER) * ahead
    index -= start * TOGETHER
    of_head = min(BLOCKS - start, ahead)
    n, head = start + index % of_head, index // of_head
    return BLOCKS - 1 - n, first + head


def diagnose(counters: list[int]) -> list[str]:
    """A launch by its counters: values that cannot be, and tickets that are taken and not done."""
    ticket, rest = counters[0], counters[1:]
    dq = lambda m, h: rest[m * HEADS + h]  # noqa: E731
    dkv = lambda n, p: rest[TILES * HEADS + n * PAIRS + p]  # noqa: E731
    lines = [f"ticket {ticket} of {TICKETS}"]
    for m in range(TILES):
        for h in range(HEADS):
            if not 0 <= dq(m, h) <= m + 1:
                lines.append(f"CORRUPT dq tile {m} head {h}: {dq(m, h)} ({dq(m, h):#x}), at most {m + 1}")
    for n in range(BLOCKS):
        for p in range(PAIRS):
            if not 0 <= dkv(n, p) <= GROUP:
                lines.append(f"CORRUPT dkv block {n} pair {p}: {dkv(n, p)} ({dkv(n, p):#x})")
    taken = min(max(ticket, 0), TICKETS)
    missing = 0
    for t in range(taken):
        n, h = block_of(t)
        done = [m for m in range(n, TILES) if dq(m, h) > m - n]
        member, pair = h % GROUP, h // GROUP
        whole = dkv(n, pair) > member
        if len(done) == TILES - n and whole:
            continue
        missing += 1
        left = [m for m in range(n, TILES) if m not in done]
        if left:
            m = left[0]
            turn = m - n
            state = f"next tile {m} has {dq(m, h)} of {turn} before it" + (
                ": ITS TURN, not added" if dq(m, h) == turn else ""
            )
        else:
            state = "all dq added"
        heads = (
            "dk, dv added"
            if whole
            else f"dk, dv: {dkv(n, pair)} of {member} heads before it"
            + (": ITS TURN" if dkv(n, pair) == member else "")
        )
        odd = "" if done == list(range(n, n + len(done))) else f" GAPS in done tiles, left {left[:8]}"
        if missing <= 400:
            lines.append(f"ticket {t}: block {n} head {h}: {len(done)} of {TILES - n} tiles; {state}; {heads}{odd}")
    lines.insert(
        1, f"{missing} tickets taken and not done; the first one below waits for nobody: that CTA is the culprit"
    )
    return lines


# ---- the child


class Watch:
    """Notes launches, and what the first one left over when it takes too long."""

    def __init__(self, out: Path):
        import torch
        from cuda.bindings import runtime

        from cute_kernels.attention.launch import backward

        self.torch, self.rt, self.out = torch, runtime, out
        self.launches, self.count, self.done, self.found = collections.deque(), 0, 0, None
        self.stream = torch.cuda.Stream()
        self.pinned = torch.empty(4096, dtype=torch.int32, pin_memory=True)
        warm = torch.zeros(4096, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        self.read(warm.data_ptr(), 4096)
        empties, run = backward.empties, backward.BackwardLaunch.run

        def noted(like, *wanted):
            tensors = empties(like, *wanted)
            if wanted[-1][1] is torch.int32:
                self.found = tensors[-1].data_ptr(), tensors[-1].numel()
            return tensors

        def run_and_record(launch, *arguments, **options):
            run(launch, *arguments, **options)
            event = torch.cuda.Event()
            event.record()
            self.launches.append((self.count, *self.found, event))
            self.count += 1

        backward.empties, backward.BackwardLaunch.run = noted, run_and_record
        threading.Thread(target=self.watch, daemon=True).start()

    def read(self, address: int, numbers: int) -> list[int] | None:
        kind = self.rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        error = self.rt.cudaMemcpyAsync(self.pinned.data_ptr(), address, 4 * numbers, kind, self.stream.cuda_stream)[0]
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if int(self.rt.cudaStreamQuery(self.stream.cuda_stream)[0]) == 0:
                return self.pinned[:numbers].tolist()
            time.sleep(0.01)
        print("the copy of the counters does not end", error, flush=True)
        return None

    def watch(self) -> None:
        self.torch.cuda.set_device(0)
        oldest, since = -1, time.monotonic()
        while True:
            time.sleep(0.2)
            while self.launches and self.launches[0][-1].query():
                self.launches.popleft()
                self.done += 1
            if not self.launches or self.launches[0][0] != oldest:
                oldest, since = self.launches[0][0] if self.launches else -1, time.monotonic()
                continue
            if time.monotonic() - since < LIMIT:
                continue
            index, address, numbers, _ = self.launches[0]
            print(f"HUNG launch {index}, counters at {address:#x}", flush=True)
            first = self.read(address, numbers)
            time.sleep(2)
            second = self.read(address, numbers)
            lines = [f"launch {index}, counters at {address:#x}, {len(self.launches)} launches queued"]
            if first and second:
                lines.append(
                    f"{sum(a != b for a, b in zip(first, second, strict=True))} counters changed in 2 s (0: it stands)"
                )
                lines += diagnose(second)
            self.out.write_text("\n".join(lines) + "\n")
            self.out.with_suffix(".json").write_text(json.dumps({"first": first, "second": second}))
            print("\n".join(lines[:12]), flush=True)
            print("HANG", index, flush=True)
            time.sleep(1000)


def child(mode: str, provider: str, seconds: float, out: Path) -> None:
    import torch

    from bench import harness

    torch.cuda.init()
    watch = Watch(out)
    with harness.bench_stream():
        if mode == "step":
            from bench import bench_training_step as steps

            _, call = steps.make_call(steps.Step("qwen3_moe", 4, 8192, 2048), "cuda", provider)
        else:
            from cute_kernels import attention

            generator = torch.Generator("cuda").manual_seed(0)
            make = lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)  # noqa: E731
            q, k, v = (make(1, 8192, heads, 64).requires_grad_() for heads in (HEADS, PAIRS, PAIRS))
            result = attention(q, k, v, causal=True)
            weight, x = make(2048, 2048), make(8192, 2048)

            def call():
                dout = x
                if mode == "gemm":  # dgrad and wgrad of the product behind attention
                    dout = x @ weight
                    x.T @ dout
                return torch.autograd.grad(result, (q, k, v), dout.view(result.shape), retain_graph=True)

        until, first = None, None
        while until is None or time.monotonic() < until:
            for _ in range(1 if mode == "step" else 20):
                gradients = call()
            torch.cuda.synchronize()
            if mode == "alone":  # what raced, and did not hang
                first = first or gradients
                if not all(map(torch.equal, first, gradients)):
                    print(f"OTHER BITS after {watch.count} launches", flush=True)
                torch.cuda.synchronize()
            if mode != "step":
                time.sleep(0.03)  # clocks are high behind a pause, as at the begin of a process
            if until is None:
                until = time.monotonic() + seconds
                print("ready", flush=True)
    print(f"END {watch.count}", flush=True)
    os._exit(0)


# ---- the parent


def tree_of(variant: str) -> Path:
    """The repository, or a patched copy of it."""
    here = Path.cwd()
    if variant == "base":
        return here
    target = Path("/tmp/hang_variants") / variant
    if not target.exists():
        for part in ("cute_kernels", "jit_cache", "bench"):
            shutil.copytree(here / part, target / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name, old, new in VARIANTS[variant]:
            text = (target / name).read_text()
            assert old in text, (variant, name, old)
            (target / name).write_text(text.replace(old, new))
    return target


def run_child(mode: str, variant: str, seconds: float, name: str, options) -> tuple[str, int, subprocess.Popen | None]:
    """("hang", launches, process), ("end", launches, None) or ("failed", 0, None)."""
    tree = tree_of(variant)
    out = (options.out.resolve() if variant == "base" else Path("/tmp")) / f"{name}.txt"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH")))),
        "CUDA_SCALE_LAUNCH_QUEUES": "4x",
        "PYTHONUNBUFFERED": "1",
    }
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--child",
        mode,
        "--provider",
        options.provider,
        "--seconds",
        str(seconds),
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timer = threading.Timer(seconds + 150, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            print(f"    [{name}] {line}", end="", flush=True)
            if match := re.match(r"HANG (\d+)", line):
                return "hang", int(match[1]) + 1, process
            if match := re.match(r"END (\d+)", line):
                return "end", int(match[1]), None
    finally:
        timer.cancel()
    return "failed", 0, None


def about(when: str, options) -> None:
    """Which GPU, its clocks and its errors of memory."""
    with (options.out / f"smi_{when}.txt").open("w") as file:
        subprocess.run(
            ["nvidia-smi", "-q", "-d", "ECC,CLOCK,PERFORMANCE,ROW_REMAPPER,PAGE_RETIREMENT"],
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=30,
        )
        subprocess.run(["nvidia-smi", "-L"], stdout=file, stderr=subprocess.STDOUT, timeout=30)


def ask_gdb(process: subprocess.Popen, name: str, options) -> None:
    """Where each warp of each CTA is, and its mbarriers (a word: 64 bits as SYNCS has them; then the ticket)."""
    gdb = shutil.which("cuda-gdb") or "/usr/local/cuda/bin/cuda-gdb"
    if not Path(gdb).exists():
        print("no cuda-gdb")
        return
    script = Path("/tmp/commands.gdb")
    lines = ["set pagination off", "set confirm off", "set width 0", "info cuda kernels"]
    for block in range(132):
        lines += [
            f"echo BLOCK {block}\\n",
            f"cuda block ({block},0,0) thread (0,0,0)",
            "x/1i $pc",
            "info cuda warps",
            "x/22gx (@shared unsigned long *)0x400",
        ]
    script.write_text("\n".join([*lines, "detach", "quit"]) + "\n")
    text = options.out / f"{name}.gdb.txt"
    with text.open("w") as file:
        command = [gdb, "-q", "-batch", "-p", str(process.pid), "-x", str(script)]
        debugger = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            debugger.wait(options.gdb_seconds)
        except subprocess.TimeoutExpired:
            debugger.kill()
    read_gdb(text)


def read_gdb(text: Path) -> None:
    """A line for each CTA: what each warp does; how many CTAs do the same."""
    base, block, found = None, None, collections.defaultdict(list)
    barriers = collections.defaultdict(list)
    for line in text.read_text(errors="replace").splitlines():
        if match := re.match(r"BLOCK (\d+)", line):
            block = int(match[1])
        elif match := re.search(r"(0x[0-9a-f]+) <\S*\+(\d+)>:", line):
            base = int(match[1], 16) - int(match[2])
        elif match := re.match(r"\s*\*?\s*(\d+)\s+0x([0-9a-f]+)\s+0x([0-9a-f]+)\s+(0x[0-9a-f]+)\s", line):
            found[block].append((int(match[1]), match[2], match[3], int(match[4], 16)))
        elif block is not None and "0x" in line and ":" in line:
            barriers[block] += re.findall(r"0x([0-9a-f]{16})", line)
    same = collections.Counter()
    for block, warps in found.items():
        places = []
        for warp, active, divergent, pc in warps:
            offset = pc - (base or 0)
            what = next((name for low, high, name in WHERE if low <= offset < high), "")
            places.append(
                f"w{warp}:{offset:#x} {what}"
                + (f" [active {active}, divergent {divergent}]" if int(divergent, 16) else "")
            )
            same[what or hex(offset)] += 1
        print(f"CTA {block}: " + "; ".join(places))
        words = barriers[block][: len(BARRIERS)]
        print("    " + " ".join(f"{name}={word}" for name, word in zip(BARRIERS, words, strict=False)))
    print("warps by place:", dict(same.most_common()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--provider", default="cute_kernels")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--gdb-seconds", type=float, default=120)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", default="alone,gemm,step")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument(
        "--needed", type=int, default=0, help="launches to a hang in the one mode; no search, variants at once"
    )
    parser.add_argument("--read-gdb", type=Path)
    parser.add_argument("--check", action="store_true", help="no GPU: patches apply, diagnose works")
    options = parser.parse_args()
    if options.read_gdb:
        return read_gdb(options.read_gdb)
    if options.check:
        return check()
    if options.child:
        return child(options.child, options.provider, options.seconds, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    about("begin", options)
    end = time.monotonic() + options.seconds
    modes = options.modes.split(",")
    hung = modes[0] if options.needed else None
    number, each = 0, {"alone": 12.0, "gemm": 12.0, "step": 6.0}
    launches = collections.Counter()
    # Two processes of each kind, then steps, which are known to hang, until one does
    order = [mode for mode in modes if mode != "step" for _ in range(2)] + ["step"] * (100 if "step" in modes else 0)
    for mode in order:
        left = end - time.monotonic()
        if left < 60 or hung:
            break
        number += 1
        kind, made, process = run_child(mode, "base", each[mode], f"{number}_{mode}_base", options)
        launches[mode] += made
        print(
            f"{mode}: {kind} after {made} launches, {launches[mode]} in all; {end - time.monotonic():.0f} s left",
            flush=True,
        )
        if kind == "hang":
            hung = mode
            about("hang", options)
            ask_gdb(process, f"{number}_{mode}_base", options)
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(3)
    if not hung:
        print("no hang:", dict(launches))
        return
    needed = options.needed or max(launches[hung], 40)
    summary = [f"base: hung in mode {hung} after {needed} launches"]
    variants = options.variants.split(",")
    for place, variant in enumerate(variants):
        share = (end - time.monotonic() - 10) / (len(variants) - place)  # of the time left
        made, kind = 0, "end"
        began = time.monotonic()
        while kind == "end" and made < 10 * needed and time.monotonic() - began < share - 25:
            number += 1
            kind, more, process = run_child(hung, variant, min(each[hung], 20.0), f"{number}_{hung}_{variant}", options)
            made += more
            if kind == "hang":
                process.send_signal(signal.SIGKILL)
                process.wait()
                time.sleep(3)
        summary.append(f"{variant}: {kind} after {made} launches")
        print(summary[-1], flush=True)
    print("\n".join(summary))
    (options.out / "summary.txt").write_text("\n".join(summary) + "\n")


def check() -> None:
    sys.path.insert(0, os.getcwd())
    from cute_kernels.attention.kernel_backward_blocks import in_turn

    for ticket in range(TICKETS):
        first = ticket // (BLOCKS * TOGETHER) * TOGETHER
        n, head = in_turn(ticket - first * BLOCKS, BLOCKS, TOGETHER, GROUP, min)
        assert block_of(ticket) == (BLOCKS - 1 - n, first + head)
    for variant in VARIANTS:
        shutil.rmtree(Path("/tmp/hang_variants") / variant, ignore_errors=True)
        print(variant, tree_of(variant))
    counters = [TICKETS + 132] + [m + 1 for m in range(TILES) for _ in range(HEADS)] + [GROUP] * (BLOCKS * PAIRS)
    print("\n".join(diagnose(counters)))
    counters[0], counters[1 + 40 * HEADS + 2] = 700, 5
    for m in range(TILES):
        for h in range(8, HEADS):
            counters[1 + m * HEADS + h] = 0
    print("\n".join(diagnose(counters)[:5]))


if __name__ == "__main__":
    main()
