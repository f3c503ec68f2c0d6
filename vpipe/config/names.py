"""The names under which other programs have our keys, for the hint at an unknown one."""

from __future__ import annotations

_OTHER_NAMES = {
    "batch_size": "batch bs minibatch_size micro_batch_size microbatch_size per_device_train_batch_size",
    "checkpoint_interval": "save_interval save_steps save_every checkpoint_frequency",
    "clip_norm": "clip grad_clip gradient_clip max_grad_norm gradient_clipping clip_grad_norm",
    "data_dir": "dataset data_path train_file text corpus",
    "distributed_backend": "backend dist_backend",
    "epochs": "num_epochs n_epochs max_epochs num_train_epochs",
    "evaluation_interval": "eval_interval eval_steps eval_every evaluate_every eval_frequency",
    "evaluation_samples": "eval_samples eval_size",
    "global_batch_size": "global_batch train_batch_size total_batch_size",
    "hidden_size": "hidden hidden_dim d_model n_embd dim embed_dim width",
    "intermediate_size": "ffn_hidden_size d_ff ffn_dim n_inner",
    "keep_checkpoints": "save_total_limit max_checkpoints",
    "learning_rate": "lr rate base_lr",
    "learning_rate_policy": "lr_schedule lr_scheduler lr_policy lr_scheduler_type scheduler lr_decay",
    "log_directory": "log_dir logdir output_dir out_dir run_dir logs save_dir",
    "loss_scale": "initial_loss_scale init_scale",
    "machines": "gpus gpu hosts nodes devices device device_ids",
    "max_updates": "steps max_steps num_steps train_steps train_iters iterations num_iterations max_iters updates",
    "minibatches": "microbatches micro_batches num_microbatches num_minibatches chunks_per_batch "
    "gradient_accumulation_steps accumulation_steps grad_accum",
    "model": "model_name model_path model_name_or_path architecture config",
    "num_heads": "heads n_head n_heads num_attention_heads",
    "num_layers": "layers n_layer n_layers num_hidden_layers",
    "optimizer": "optim base_optimizer",
    "pretrained": "checkpoint weights from_pretrained init_from",
    "precision": "dtype amp fp16 bf16 mixed_precision half",
    "print_frequency": "log_interval logging_steps log_every log_frequency print_freq print_interval",
    "recompute": "activation_checkpointing gradient_checkpointing checkpoint_activations enable_recompute",
    "replicas": "dp dp_size data_parallel data_parallel_size",
    "seed": "random_seed rng_seed",
    "sequence_length": "seq_len seq_length max_seq_length max_seq_len max_length block_size context_length",
    "stages": "num_stages ranks num_ranks num_gpus n_gpus ngpus world_size nproc nproc_per_node pp pp_size "
    "pipeline_parallel_size processes workers",
    "sync_mode": "mode synchronous asynchronous",
    "validation_share": "val_split validation_split val_share test_size",
    "verbose_frequency": "verbose verbose_freq",
    "vocab_size": "vocab vocabulary n_vocab",
    "warmup_updates": "warmup warmup_steps warmup_iters num_warmup_steps lr_warmup",
    "weight_decay": "wd decay l2",
}
MEANT = {other: key for key, others in _OTHER_NAMES.items() for other in others.split()}
"""Our key for a name that users know from elsewhere."""
