"""One training job from config to saved model."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..offload import AdamW, Job, RandomSource, SafetensorsSource, WeightSource, skeleton
from ..swap_scheduler import show_bytes
from .budget import Precision, resolve_device, resolve_dtype, resolve_memory
from .config import Config, ConfigError, load_config
from .data import Batches, Dataset, Window, load_dataset
from .loss import causal_lm_loss, trained_tokens
from .output import MARKER, check_output, made_only_if_used, unfinished
from .report import PlanReport, plan_report
from .schedule import learning_rate


class TrainingError(RuntimeError):
    """The run stopped by a rule; one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Losses are means over trained tokens; None without a held-out file."""

    output_dir: Path
    steps: int
    skipped_steps: int
    train_losses: tuple[float, ...]
    eval_loss_before: float | None
    eval_loss_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """`config` says the dtype that `auto` came to."""

    config: Config
    tokenizer: Any
    batches: Batches
    evaluation: Dataset | None
    job: Job
    precision: Precision
    total_steps: int


def train(config: Config | str | Path, *, console: Console | None = None) -> TrainResult:
    """Train as `config`, or the config file of that name, says and leave the model in `train.output_dir`. Nothing is
    left there when it fails.

    Raises ConfigError, DataError, BudgetError, WeightError or TrainingError, each with a message of one line a fault.
    """
    config = config if isinstance(config, Config) else load_config(config)
    console = console or Console(stderr=True)
    output = check_output(config.train.output_dir)
    with made_only_if_used(_swap_folder(config)) as used:
        prepared = _prepare(config, console)
        with prepared.job as job:
            console.print(str(report_of(prepared)), highlight=False, soft_wrap=True)
            job.load()
            with unfinished(output) as work:
                result = _run(prepared, work.folder, console)
                saved = work.publish()
            used()
    console.print(f"saved to {saved}", highlight=False, soft_wrap=True)
    return replace(result, output_dir=saved)


def plan(config: Config | str | Path) -> PlanReport:
    """What `train` would do: bytes by tier, predicted step time. Reads no weights and leaves nothing behind."""
    config = config if isinstance(config, Config) else load_config(config)
    with made_only_if_used(_swap_folder(config)):
        prepared = _prepare(config, Console(quiet=True))
        with prepared.job:
            return report_of(prepared)


def _swap_folder(config: Config) -> Path | None:
    return config.memory.disk.path if config.memory.disk else None


def report_of(prepared: _Prepared) -> PlanReport:
    tokens = prepared.batches.dataset.trained_tokens / max(1, prepared.batches.steps_per_epoch)
    return plan_report(
        prepared.job, precision=prepared.precision, total_steps=prepared.total_steps, tokens_per_step=tokens
    )


# ---------------------------------------------------------------------- before the first step


def _prepare(config: Config, console: Console) -> _Prepared:
    """All that can fail for the user's reasons, cheapest first: text before model, plan before weights."""
    model_config, tokenizer = _describe(config)
    limit = getattr(model_config, "max_position_embeddings", None) or getattr(model_config, "n_positions", None)
    if limit and config.data.max_length > limit:
        raise ConfigError([f"data.max_length: {config.data.max_length} is more than the model's {limit} positions"])
    dataset = load_dataset(config.data.train, config.data, tokenizer)
    evaluation = load_dataset(config.data.eval, config.data, tokenizer) if config.data.eval else None
    datasets = (dataset, evaluation) if evaluation else (dataset,)
    for data in datasets:
        console.print(str(data), highlight=False, soft_wrap=True)
    pad_id = _check_vocabulary(model_config, tokenizer, datasets)
    settings = config.train
    batches = Batches(
        dataset=dataset,
        batch_size=settings.per_device_train_batch_size,
        accumulation=settings.gradient_accumulation_steps,
        seed=settings.seed,
        pad_id=pad_id,
    )
    epochs = settings.num_train_epochs
    total = settings.max_steps if epochs is None else epochs * batches.steps_per_epoch
    assert total is not None
    if settings.warmup_steps > total:
        raise ConfigError([f"train.warmup_steps: {settings.warmup_steps} is more than the {total} steps of the run"])
    device = resolve_device(config.device)
    memory = resolve_memory(config.memory, device)
    precision = resolve_dtype(config.model.dtype, device)
    model = _skeleton(config, model_config)
    _freeze(model, config.model.frozen)
    longest = max(data.longest for data in datasets)
    most_rows = max(len(data.rows) for data in datasets)
    job = Job.build(
        model,
        _source(config, model),
        optimizer=AdamW(
            beta1=settings.adam_beta1,
            beta2=settings.adam_beta2,
            epsilon=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            decay_1d=settings.decay_1d,
            decay_embeddings=settings.decay_embeddings,
        ),
        memory=memory,
        max_tokens=(min(settings.per_device_train_batch_size, most_rows), longest),
        device=device,
        dtype=precision.torch_dtype,
        microbatches=batches.microbatches,
        seed=settings.seed,
    )
    return _Prepared(
        config=config.model_copy(update={"model": config.model.model_copy(update={"dtype": precision.name})}),
        tokenizer=tokenizer, batches=batches, evaluation=evaluation, job=job, precision=precision, total_steps=total,
    )  # fmt: skip


def _describe(config: Config) -> tuple[Any, Any]:
    """The model's config and tokenizer. Remote code is never run."""
    path = config.model.path
    try:
        # False, not left out: by default transformers asks on the terminal whether to run the model's code.
        return (
            AutoConfig.from_pretrained(path, trust_remote_code=False),
            AutoTokenizer.from_pretrained(path, trust_remote_code=False),
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            [f"model.path: {path} is neither a model folder nor a model that can be had: {reason}"]
        ) from error


def _check_vocabulary(model_config: Any, tokenizer: Any, datasets: Sequence[Dataset]) -> int:
    """The id to pad with. Raises ConfigError where the tokenizer makes tokens that the model has no embedding for."""
    known = model_config.get_text_config().vocab_size
    for data in datasets:
        highest = max(max(row.input_ids) for row in data.rows)
        if highest >= known:
            raise ConfigError(
                [f"model.path: token {highest} of {data.path.name} is not among the model's {known}; "
                 "tokenizer and model do not belong together"]
            )  # fmt: skip
    pad = tokenizer.pad_token_id
    # Padding is masked, so any token will do that has an embedding; one added for padding alone often has none.
    return pad if pad is not None and pad < known else tokenizer.eos_token_id


def _skeleton(config: Config, model_config: Any) -> torch.nn.Module:
    try:
        return skeleton(
            lambda: AutoModelForCausalLM.from_config(
                model_config, attn_implementation=config.model.attn_implementation, trust_remote_code=False
            )
        )
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            [f"model.path: {config.model.path} is no causal language model that can be built: {reason}"]
        ) from error


def _source(config: Config, model: torch.nn.Module) -> WeightSource:
    if config.model.init == "random":
        return RandomSource(model, config.train.seed)
    path = config.model.path
    if not Path(path).is_dir():
        from huggingface_hub import snapshot_download

        path = snapshot_download(path, allow_patterns=["*.safetensors", "*.safetensors.index.json"])
    return SafetensorsSource(path, base_model_prefix=getattr(model, "base_model_prefix", ""))


def _freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError([f"model.frozen: {pattern!r} matches no parameter; they are called like {names[-1]!r}"])
    trainable = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
        trainable += parameter.requires_grad
    if not trainable:
        raise ConfigError(["model.frozen: every parameter is frozen; nothing is left to train"])


# ---------------------------------------------------------------------- the run


def _run(prepared: _Prepared, folder: Path, console: Console) -> TrainResult:
    config, job = prepared.config, prepared.job
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    before = _evaluate(prepared)
    if before is not None:
        console.print(_held_out("before", before), highlight=False, soft_wrap=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        losses, skipped = _steps(prepared, metrics, console)
    after = _evaluate(prepared)
    if after is not None:
        console.print(_held_out("after", after), highlight=False, soft_wrap=True)
    job.save_pretrained(folder)
    prepared.tokenizer.save_pretrained(folder)
    (folder / MARKER).write_text(json.dumps({"steps": prepared.total_steps, "skipped": skipped}) + "\n")
    return TrainResult(
        output_dir=config.train.output_dir,
        steps=prepared.total_steps,
        skipped_steps=skipped,
        train_losses=tuple(losses),
        eval_loss_before=before,
        eval_loss_after=after,
    )


def _held_out(when: str, loss: float) -> str:
    return f"held-out loss {when} training: {loss:.4f} (perplexity {math.exp(min(loss, 700)):.2f})"


def _windows(prepared: _Prepared) -> Iterator[Window]:
    """Exactly `total_steps` windows, epoch after epoch."""
    done = epoch = 0
    while done < prepared.total_steps:
        for window in prepared.batches.epoch(epoch):
            if done == prepared.total_steps:
                return
            yield window
            done += 1
        epoch += 1


def _steps(prepared: _Prepared, metrics: Any, console: Console) -> tuple[list[float], int]:
    settings, job = prepared.config.train, prepared.job
    losses: list[float] = []
    skipped = position = 0
    columns = (
        BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} tok/s"), TextColumn("{task.fields[moved]} moved"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=prepared.total_steps, loss="-", rate="-", moved="-")
        for number, window in enumerate(_windows(prepared), start=1):
            tokens = sum(map(trained_tokens, window))
            rate = learning_rate(
                position,
                kind=settings.lr_scheduler_type,
                peak=settings.learning_rate,
                warmup_steps=settings.warmup_steps,
                total_steps=prepared.total_steps,
            )
            result = job.step(window, _loss(tokens), rate)
            record = {
                "step": number, "loss": result.loss, "learning_rate": rate, "grad_norm": result.grad_norm,
                "tokens": tokens, "seconds": result.seconds, "moved_bytes": result.moved_bytes,
                "skipped": result.skipped,
            }  # fmt: skip
            metrics.write(json.dumps(_finite(record)) + "\n")
            metrics.flush()
            if result.skipped:
                skipped += 1
                console.print(f"step {number} skipped: loss {result.loss}, gradient norm {result.grad_norm}")
                if skipped > settings.max_skipped_steps:
                    raise TrainingError(
                        f"{skipped} steps had a loss or gradient that is not finite; train.max_skipped_steps allows "
                        f"{settings.max_skipped_steps}. The weights were not changed by them; lower the learning rate"
                    )
            else:
                position += 1  # a skipped step does not advance the schedule
                losses.append(result.loss)
            moved = show_bytes(sum(result.moved_bytes.values()))
            progress.update(
                task, advance=1, loss=f"{result.loss:.4f}", rate=f"{tokens / result.seconds:.0f}", moved=moved
            )
            if settings.eval_steps and number % settings.eval_steps == 0 and number < prepared.total_steps:
                loss = _evaluate(prepared)
                if loss is not None:
                    metrics.write(json.dumps({"step": number, "eval_loss": loss}) + "\n")
                    console.print(_held_out(f"after {number} steps of", loss), highlight=False, soft_wrap=True)
    if not losses:
        raise TrainingError("no step changed the weights: every one of them was skipped")
    return losses, skipped


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is not finite is written as text, so that it shows as such."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _loss(tokens: int) -> Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]:
    return lambda model, batch: causal_lm_loss(model, batch, tokens)


def _evaluate(prepared: _Prepared) -> float | None:
    """The held-out loss: a sum over all tokens, divided by their number."""
    if prepared.evaluation is None:
        return None
    windows = replace(prepared.batches, dataset=prepared.evaluation).in_order()
    total = sum(prepared.job.evaluate([batch for window in windows for batch in window], _loss(1)))
    return total / prepared.evaluation.trained_tokens
