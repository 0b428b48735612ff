"""Teacher-forced autoregressive training of Wan2.2-TI2V-5B; literals only, read and never executed.

704 x 1280 pixels, 381 raw frames at 24 frames per second: 96 latent frames of 48 channels, 44 x 80.
Ranks: a multiple of 4, at most one sequence on 4 of them.
"""

model_kwargs = {"model_name": "Wan2.2-TI2V-5B", "timestep_shift": 5.0}
sequence_parallel_size = 4
num_frame_per_block = 8
image_or_video_shape = [1, 96, 48, 44, 80]

algorithm = {"causal": True, "teacher_forcing": True, "num_train_timestep": 1000}
parallel = {
    "mixed_precision": "bf16",
    "activation_checkpointing": "full",
    "mesh": {"replicate": 1, "shard": -1},
}
training = {
    "lr": 1e-5,
    "weight_decay": 0.0,
    "beta1": 0.0,
    "beta2": 0.999,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_iters": 600,
    "max_grad_norm": 10.0,
    "ema_weight": 0.99,
    "ema_start_step": 100,
}
data = {"data_path": "data/videos"}
evaluation = {"interval": 100, "num_frames": 16, "sampling_steps": 50, "guidance_scale": 3.0}
checkpoints = {"interval": 100, "max_checkpoints": 20}
logging = {"seed": 0}
