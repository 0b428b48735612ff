"""mvp-engine's spellings of a run: its `optim`, `loop`, `log`, `checkpoint`, `project` and backend groups.

The `parallel` group is ours as well. Nothing that mvp-engine reads is silently ignored.
"""

from __future__ import annotations

from typing import Any

RENAMED: dict[str, str] = {
    "optim.lr": "training.lr",
    "optim.weight_decay": "training.weight_decay",
    "optim.gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "optim.clip_grad_norm": "training.max_grad_norm",
    "loop.total_steps": "training.max_iters",
    "data.batch_size": "training.batch_size",
    "data.max_seq_len": "data.sequence_length",
    "data.seq_len": "data.sequence_length",
    "checkpoint.interval": "checkpoints.interval",
    "checkpoint.keep_n": "checkpoints.max_checkpoints",
    "log.interval": "logging.interval",
    "seed": "logging.seed",
    "parallel.backend_kwargs.fsdp2.offload_policy": "parallel.backend_kwargs.fsdp2.cpu_offload",
}

TRANSLATED: dict[str, dict[Any, dict[str, Any]]] = {
    # One setting for parameters, compute and reduction: fp32 is fp32 everywhere.
    "optim.mixed_precision": {
        "bf16": {"parallel.mixed_precision": "bf16"},
        "fp32": {"parallel.mixed_precision": "fp32"},
    },
    "parallel.backend_kwargs.fsdp2.mp_policy.param_dtype": {
        "bfloat16": {"parallel.mixed_precision": "bf16"},
        "float32": {"parallel.mixed_precision": "fp32"},
    },
    # Gradients are reduced in fp32 whatever the compute dtype.
    "parallel.backend_kwargs.fsdp2.mp_policy.reduce_dtype": {"float32": {}},
    "loop.policy": {"iter": {}},
    "deterministic": {True: {}},
    "dev_mode": {False: {}},
}

REFUSED: dict[str, str] = {
    "engine": "delete it: what is trained is the setting `task`",
    "project.*": "give the directory on the command line: --logdir DIR",
    "runtime.*": "delete it: a run writes its facts to its --logdir",
    "log.backends": "delete it: metrics go to the terminal, to metrics.jsonl and to TensorBoard",
    "log.*": "delete it: every step is written",
    "optim.warmup_ratio": "write training.warmup_steps, in steps",
    "optim.global_batch_size": "write training.batch_size and training.gradient_accumulation_steps: "
    "the global batch is their product times replicate x shard",
    "optim.optimizer": "delete it: the optimizer is AdamW",
    "optim.loss_spike_*": "delete it: no step is skipped",
    "optim.window_size": "delete it: no step is skipped",
    "optim.min_history": "delete it: no step is skipped",
    "checkpoint.hf_enable": "delete it: weights are exported after training, from a checkpoint",
    "resume": "give the run's --logdir again: it continues from its newest checkpoint",
    "workflow": "delete it; the command is `evenspan train`",
    "parallel.backend_kwargs.ddp*": "write parallel.mesh.replicate: FSDP2 keeps the copies, without DDP",
    "parallel.backend_kwargs.fsdp2.mp_policy.*": "delete it; parallel.mixed_precision says the dtype",
    "parallel.backend_kwargs.fsdp2.high_precision_*": "delete it: the model names the modules that need fp32",
    "parallel.backend_kwargs.fsdp2.target_classes": "delete it: every transformer block is one FSDP unit",
    "parallel.backend_kwargs.fsdp2.ignore_modules": "delete it: every parameter is sharded",
    "parallel.backend_kwargs.fsdp2.shard_placement_fn": "delete it: parameters are sharded over dim 0",
}
