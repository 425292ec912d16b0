"""Train a model that does not fit the memory limit, with exact clipping and fp32 masters, and prove it.

    python benchmarks/larger_than_memory.py --size 1.1b --limit 2GiB --json benchmarks/results/memory_1.1b.json

Runs twice: under a hard limit (cgroup, or RLIMIT_DATA), and without one. Reports seconds a step, the seconds that the
measured disk alone would need (reading and writing at once), the least that exact clipping allows on it, peak memory,
and whether the losses are the same to the last bit. Llama-like, vocab 32000, 256 tokens, batch 1, AdamW, clip 1.0.
`--dtype auto` computes in bf16, or in fp32 where the processor has no fast bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from disk_bound import clipped_step_s
from memory_cap import run_capped

SHAPES = {
    "134m": (768, 12, 12, 12, 2048),
    "0.2b": (1024, 12, 16, 16, 2816),
    "374m": (1024, 24, 16, 16, 2816),
    "0.9b": (1024, 64, 16, 16, 2816),
    "1.1b": (2048, 22, 32, 4, 5632),
    "2.8b": (2560, 32, 32, 8, 8704),
}
LENGTH, VOCAB = 256, 32000
STATE_BYTES = 12  # of a parameter, weight included: fp32 moments and master
COMPUTE_LANE = "compute"


def child(size: str, ram_bytes: int, steps: int, folder: str, dtype: str) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from overspill.offload import AdamW, DiskMemory, Job, Memory, RandomSource, skeleton
    from overspill.offload.measure import raw_disk_links
    from overspill.trainer.budget import resolve_dtype

    hidden, layers, heads, kv_heads, inner = SHAPES[size]
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, max_position_embeddings=512,
    )  # fmt: skip
    model = skeleton(lambda: LlamaForCausalLM(config))
    numel = sum(p.numel() for p in model.parameters())
    precision = resolve_dtype(dtype, "cpu")
    memory = Memory(ram_bytes=ram_bytes, disk=DiskMemory(path=folder, size_bytes=16 * numel + (1 << 30)))
    source = RandomSource(skeleton(lambda: LlamaForCausalLM(config)), 0)
    with Job.build(
        model, source, optimizer=AdamW(weight_decay=0.01), memory=memory, max_tokens=(1, LENGTH),
        dtype=precision.torch_dtype,
    ) as job:  # fmt: skip
        job.load()
        losses, seconds, result = [], [], None
        for number in range(steps):
            ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(number))
            start = time.perf_counter()
            result = job.step([{"input_ids": ids, "labels": ids}], lambda m, b: m(**b).loss, 1e-4)
            seconds.append(time.perf_counter() - start)
            losses.append(result.loss)
        passes = [job.plan(name).peak_bytes() for name in ("first", "steady")]
        peaks = {tier: max(each[tier] for each in passes) for tier in passes[0]}
        predicted = job.simulate().total_s
        assert result is not None
        busy = result.trace.busy_s() if result.trace else {}
        report = {
            "parameters": numel, "dtype": precision.name, "losses": losses, "seconds": seconds,
            "moved_bytes": result.moved_bytes,
            "planned_peak_bytes": peaks, "measured_peak_bytes": dict(result.trace.peak_bytes) if result.trace else {},
            "predicted_s": predicted, "busy_s": busy,
            "lookahead": job.choice.lookahead,
        }  # fmt: skip
    # The raw disk, in the same run, both directions at once as in a step.
    links = {name: link.bandwidth_bytes_per_s for name, link in raw_disk_links(folder).items()}
    bound = max(count / links[name] for name, count in result.moved_bytes.items())
    assert result.trace is not None
    backward = sum(e.end_s - e.start_s for e in result.trace.events if e.lane == COMPUTE_LANE and e.text[0] == "B")
    unheld = (STATE_BYTES + precision.torch_dtype.itemsize) * numel - ram_bytes
    clipped = clipped_step_s(backward, busy[COMPUTE_LANE] - backward, unheld, links["disk>ram"])
    return report | {"disk_bytes_per_s": links, "disk_bound_s": bound, "clipped_bound_s": clipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, required=True)
    parser.add_argument("--limit", default="2GiB")
    parser.add_argument("--ram", default="900MiB", help="the budget that overspill is given")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--uncapped-ram", help="budget of the run without a limit; the same by default")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from overspill.trainer.config import parse_bytes

    if arguments.child:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            result = child(arguments.size, parse_bytes(arguments.ram), arguments.steps, folder, arguments.dtype)
            print("RESULT " + json.dumps(result), flush=True)
        return

    def command(ram: str) -> list[str]:
        own = [sys.executable, __file__, "--child", "--size", arguments.size, "--ram", ram]
        return [*own, "--steps", str(arguments.steps), "--folder", arguments.folder, "--dtype", arguments.dtype]

    limit = parse_bytes(arguments.limit)
    done, memory = run_capped(limit, command(arguments.ram))
    print(json.dumps(memory), flush=True)
    capped = _result(done)
    free = subprocess.run(command(arguments.uncapped_ram or arguments.ram), capture_output=True, text=True, check=False)
    uncapped = _result(free)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "command": "python " + " ".join(["benchmarks/larger_than_memory.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(), "cores": os.cpu_count(), "memory": memory,
        "median_s": statistics.median(capped["seconds"][1:]), "losses_equal": capped["losses"] == uncapped["losses"],
        "capped": capped, "uncapped": uncapped,
    }  # fmt: skip
    gib = 1 << 30
    disk_s, peak, equal = capped["disk_bound_s"], memory["anonymous"] / gib, report["losses_equal"]
    print(
        f"{arguments.size} in {capped['dtype']}: {report['median_s']:.1f} s a step "
        f"(the disk alone: {disk_s:.1f} s, with clipping at least {capped['clipped_bound_s']:.1f} s), "
        f"peak anonymous {peak:.2f} GiB under {limit / gib:.2f} GiB, {memory['oom_kills']} kills, losses equal: {equal}"
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"exit code {done.returncode}\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1][7:])
    return result


if __name__ == "__main__":
    main()
