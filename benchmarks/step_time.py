"""Seconds a training step takes, and what it needs: overspill beside plain PyTorch and DeepSpeed, in one run.

    python benchmarks/step_time.py --json benchmarks/results/step_time.json [--only a1,a2,b,c,d] [--steps 7]

One Llama-like model of 374M parameters (hidden 1024, 24 layers, vocab 32000), bf16 compute, fp32 master, clip 1.0,
2,048 tokens a step (8 microbatches of 256):
  a1  plain PyTorch, everything resident          a2  the same with activation checkpointing
  b   overspill, room for everything              c   overspill, a quarter of the state in RAM, the rest on disk
  d   DeepSpeed ZeRO-3, parameters and optimizer on disk, tuned; skipped with its reason where it does not run
Every variant runs in a process of its own, in turn, `--rounds` times, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from disk_bound import clipped_step_s

GIB = 1 << 30
HIDDEN, LAYERS, VOCAB, LENGTH, MICROBATCHES = 1024, 24, 32000, 256, 8
VARIANTS = ("a1", "a2", "b", "c", "d")
LEARNING_RATE = 1e-4
STATE_BYTES, GRADIENT_BYTES = 12, 2  # of a parameter: split master 2 + 2, moments 4 + 4; a bf16 gradient while it lives


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=2816, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip


def batches(step: int) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(0, VOCAB, (1, LENGTH), generator=generator) for _ in range(MICROBATCHES)]
    return [{"input_ids": row, "labels": row} for row in rows]


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    """The mean over the whole window: each microbatch gives its share."""
    return model(**batch).loss / MICROBATCHES


def status_gib(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / (1 << 20)
    raise KeyError(key)


class PeakAnonymous(threading.Thread):
    """Peak anonymous resident memory of this process; file pages in the cache are not the run's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_gib = 0.0

    def run(self) -> None:
        while True:
            self.peak_gib = max(self.peak_gib, status_gib("RssAnon"))
            time.sleep(0.02)


def plain(variant: str) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    from overspill.kernels.split_master import round_to_bf16

    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    masters = [p.detach().clone() for p in model.parameters()]
    # Parameters alone, rounded as the update rounds them: model.to() would cast the rotary frequencies too, which is
    # another model (its first loss differs in the fifth digit).
    for parameter in model.parameters():
        parameter.data = round_to_bf16(parameter.data)
    if variant == "a2":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    # Neither the norms nor the embedding are decayed, as in overspill.
    embedding = model.get_input_embeddings().weight
    decayed = [p.ndim > 1 and p is not embedding for p in model.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m, d in zip(masters, decayed, strict=True) if d], "weight_decay": 0.01},
            {"params": [m for m, d in zip(masters, decayed, strict=True) if not d], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        fused=True,
    )

    def step(number: int) -> tuple[float, dict[str, int]]:
        loss, backward_s = 0.0, 0.0
        for batch in batches(number):
            part = loss_fn(model, batch)
            start = time.perf_counter()
            part.backward()
            backward_s += time.perf_counter() - start
            loss += part.item()
        step.backward_s.append(backward_s)  # type: ignore[attr-defined]
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(round_to_bf16(master))
        return loss, {}

    step.backward_s = []  # type: ignore[attr-defined]
    return step


def prepare(folder: str) -> dict[str, Any]:
    """Save the model that every variant starts from, so that no run has to build it in its own memory."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(Path(folder) / "model")
    return {}


def prepared(folder: str) -> Path:
    """The saved model, made by another process so that its memory is not counted here."""
    command = [sys.executable, __file__, "--child", "prepare", "--folder", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Path(folder) / "model"


def spilled(variant: str, folder: str) -> Any:
    from transformers import LlamaForCausalLM

    from overspill.offload import AdamW, DiskMemory, Job, Memory, SafetensorsSource, skeleton

    source = SafetensorsSource(prepared(folder))
    model = skeleton(lambda: LlamaForCausalLM(config()))
    numel = sum(p.numel() for p in model.parameters())
    state_bytes = STATE_BYTES * numel
    if variant == "b":
        memory = Memory(ram_bytes=state_bytes + 9 * GIB)
    else:
        memory = Memory(ram_bytes=state_bytes // 4, disk=DiskMemory(path=folder, size_bytes=2 * state_bytes))
    job = Job.build(
        model,
        source,
        optimizer=AdamW(weight_decay=0.01),
        memory=memory,
        max_tokens=(1, LENGTH),
        microbatches=MICROBATCHES,
    )
    job.load()

    def step(number: int) -> tuple[float, dict[str, int]]:
        result = job.step(batches(number), loss_fn, LEARNING_RATE)
        return result.loss, result.moved_bytes

    step.job = job  # type: ignore[attr-defined]
    step.unheld_bytes = (STATE_BYTES + GRADIENT_BYTES) * numel - memory.ram_bytes  # type: ignore[attr-defined]
    return step


def deepspeed(folder: str) -> Any:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    import deepspeed
    import torch
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    largest = VOCAB * HIDDEN
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "overlap_events": True},
        "zero_optimization": {
            "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": largest,
            "stage3_max_live_parameters": int(1e8), "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 10000, "reduce_bucket_size": int(5e7),
            "offload_param": {
                "device": "nvme", "nvme_path": folder, "pin_memory": False, "buffer_count": 5,
                "buffer_size": 2 * largest + 4096, "max_in_cpu": 0,
            },
            "offload_optimizer": {
                "device": "nvme", "nvme_path": folder, "pin_memory": False, "buffer_count": 4,
                "pipeline_read": False, "pipeline_write": False, "fast_init": False,
            },
        },
    }  # fmt: skip
    keep_alive = HfDeepSpeedConfig(settings)
    deepspeed.init_distributed(dist_backend="gloo")
    model = LlamaForCausalLM.from_pretrained(prepared(folder), dtype=torch.bfloat16, use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    trainer, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())

    def step(number: int) -> tuple[float, dict[str, int]]:
        loss = 0.0
        for batch in batches(number):
            part = trainer(**batch).loss
            trainer.backward(part)
            trainer.step()
            loss += part.item() / MICROBATCHES
        return loss, {}

    step.keep_alive = keep_alive  # type: ignore[attr-defined]
    return step


def child(variant: str, steps: int, folder: str) -> dict[str, Any]:
    watch = PeakAnonymous()
    if variant == "d":
        step = deepspeed(folder)
    elif variant in ("a1", "a2"):
        step = plain(variant)
    else:
        step = spilled(variant, folder)
    import gc

    gc.collect()
    watch.start()
    losses, seconds, moved = [], [], {}
    for number in range(steps):
        start = time.perf_counter()
        loss, moved = step(number)
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
    result: dict[str, Any] = {
        "seconds": seconds, "losses": losses, "moved_bytes": moved, "peak_anonymous_gib": watch.peak_gib,
        "peak_rss_gib": status_gib("VmHWM"),
    }  # fmt: skip
    result["backward_s"] = getattr(step, "backward_s", [])
    if job := getattr(step, "job", None):
        from overspill.offload.measure import raw_disk_links

        result["predicted_s"] = job.simulate().total_s
        links = raw_disk_links(folder)
        result["disk_bytes_per_s"] = {name: link.bandwidth_bytes_per_s for name, link in links.items()}
        result["unheld_bytes"] = step.unheld_bytes
        job.close()
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps after the first two of every round: the first has no update before it in overspill, and warms caches."""
    times = sorted(second for run in runs for second in run["seconds"][2:])
    tokens = LENGTH * MICROBATCHES

    def quantile(q: float) -> float:
        return times[min(len(times) - 1, round(q * (len(times) - 1)))]

    return {
        "median_s": statistics.median(times), "p20_s": quantile(0.2), "p80_s": quantile(0.8),
        "tokens_per_s": tokens / statistics.median(times),
        "peak_anonymous_gib": max(run["peak_anonymous_gib"] for run in runs),
        "first_losses": runs[0]["losses"][:3], "moved_bytes": runs[-1]["moved_bytes"], "runs": runs,
    }  # fmt: skip


def disk_bound(plain: list[dict[str, Any]], spilled: list[dict[str, Any]]) -> dict[str, float]:
    """What `clipped_step_s` says of variant c, with the backward and the rest of the step taken from a2."""
    backward = statistics.median(s for run in plain for s in run["backward_s"][2:])
    rest = statistics.median(
        t - s for run in plain for t, s in list(zip(run["seconds"], run["backward_s"], strict=True))[2:]
    )
    bandwidth = statistics.median(run["disk_bytes_per_s"]["disk>ram"] for run in spilled)
    unheld = spilled[0]["unheld_bytes"]
    step = clipped_step_s(backward, rest, unheld, bandwidth)
    return {"backward_s": backward, "rest_s": rest, "disk_s": unheld / bandwidth, "step_s": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where swap files go")
    parser.add_argument("--child", choices=(*VARIANTS, "prepare"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "prepare":
        prepare(arguments.folder)
        return
    if arguments.child:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            print("RESULT " + json.dumps(child(arguments.child, arguments.steps, folder)), flush=True)
        return
    runs: dict[str, list[dict[str, Any]]] = {}
    skipped: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for variant in arguments.only.split(","):
            command = [sys.executable, __file__, "--child", variant, "--steps", str(arguments.steps)]
            done = subprocess.run([*command, "--folder", arguments.folder], capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if lines:
                runs.setdefault(variant, []).append(json.loads(lines[-1][7:]))
                print(variant, [round(s, 2) for s in runs[variant][-1]["seconds"]], flush=True)
            else:
                skipped[variant] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                print(variant, "skipped:", skipped[variant], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "command": "python " + " ".join(["benchmarks/step_time.py", *sys.argv[1:]]), "commit": commit.stdout.strip(),
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "tokens_per_step": LENGTH * MICROBATCHES, "variants": {k: summary(v) for k, v in runs.items()},
        "skipped": skipped,
    }  # fmt: skip
    for name, row in report["variants"].items():
        print(
            f"{name:3} {row['median_s']:7.2f} s {row['tokens_per_s']:7.0f} tok/s {row['peak_anonymous_gib']:6.2f} GiB"
        )
    if {"a2", "c"} <= runs.keys():
        report["disk_bound"] = bound = disk_bound(runs["a2"], runs["c"])
        goal = 1.15 * report["variants"]["a2"]["median_s"]
        kind = "1.1 x the bound of the measured disk" if 1.1 * bound["step_s"] > goal else "1.15 x a2"
        print(f"c may take {max(1.1 * bound['step_s'], goal):.2f} s: {kind}; bound {bound['step_s']:.2f} s {bound}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
