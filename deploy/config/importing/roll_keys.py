"""Keys of ROLL's configuration classes (github.com/alibaba/ROLL at 8eb27cc2, Apache-2.0); ROLL drops others
silently."""

from offbeat.deploy.config.importing.report import KeyPath


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


BASE = _names("""
    generate_opt_level is_num_return_sequences_expand max_running_requests is_use_additional_prompts
    max_additional_running_prompts user_defined_rollout_loop_cls router_args exp_name seed rpc_timeout output_dir
    base_dir logging_dir rollout_dump_dir track_with tracker_kwargs max_steps save_steps max_ckpt_to_keep
    logging_steps eval_steps rollout_batch_size val_batch_size local_rank resume_from_checkpoint checkpoint_config
    prompt_length response_length sequence_length val_prompt_length val_sequence_length profiler_timeline
    profiler_memory report_length_and_rewards is_offload_states is_offload_optimizer_states_in_train_step
    length_profiler_dir profiler_output_dir otlp_output_dir system_envs model_update_buffer_size_mb num_nodes
    num_gpus_per_node model_download_type rollout_mock transfer_backend
""")

PPO = _names("""
    pretrain reward_pretrain actor_train actor_infer critic reference reward async_generation_ratio ppo_epochs
    max_grad_norm l2 lambd gamma pg_clip use_pg_clip_range pg_clip_low pg_clip_high value_clip kl_penalty target_kl
    init_kl_coef kl_horizon use_reward_scaling add_len_reward reward_clip use_reward_norm whiten_rewards
    whiten_advantages advantage_clip adv_estimator norm_mean_type norm_std_type add_token_level_kl critic_warmup
    use_kl_loss kl_loss_coef entropy_loss_coef loss_agg_mode dual_clip_loss enable_reference
    enable_old_logprobs_recompute force_disable_old_logprobs_recompute train_infer_correction pure_opd_pipeline_type
    teacher student_train student_infer is_pure_opd use_opd
""")

WORKER = _names("""
    name worker_cls pg_variant model_args training_args data_args generating_args strategy_args world_size
    device_mapping num_gpus_per_worker model_update_frequency infer_batch_size backend_timeout system_envs
    topr_positive_weight topr_negative_weight max_concurrency use_dynamic_batching_in_train
    max_tokens_per_microbatch_in_train sequence_length_round_in_train use_dynamic_batching_in_infer
    max_tokens_per_microbatch_in_infer sequence_length_round_in_infer offload_nccl use_sequence_packing
    sequence_packing_args logits_in_fp32 router_replay apply_loss_scale mtp_training_mode opd_kl_coef tag_included
""")

MODEL = _names("""
    additional_target autocast_adapter_dtype lora_alpha lora_dropout lora_rank lora_target model_name_or_path
    adapter_name_or_path attn_implementation moe_aux_loss_coef disable_gradient_checkpointing
    gradient_checkpointing_use_reentrant device_map dtype model_type num_labels model_config_kwargs
    freeze_module_prefix ulysses_size
""")

DATA = _names("""
    template domain_interleave_probs preprocessing_num_workers file_name eval_file_name dataset_type tag id prompt
    response messages image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_total_pixels video_fps
    video_max_frames video_resize_chunk_frames image_folder video_folder audio_folder custom_data_kwargs_func
""")

GENERATING = _names("""
    do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
    num_return_sequences stop_strings include_stop_str_in_output logprobs
""")

TRAINING = _names("""
    output_dir max_steps num_train_epochs learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2
    per_device_train_batch_size gradient_accumulation_steps seed data_seed dataloader_num_workers fp16 bf16 tf32
    warmup_ratio warmup_steps save_hf_model
""")

NORMALIZATION = _names("""
    grouping method norm_mean_type norm_std_type global_scale_factor global_shift_value
""")

MANAGER = _names("""
    llm_proxy num_env_groups group_size group_size_redundancy tags num_groups_partition max_traj_per_env
    format_penalty max_env_num_per_worker group_filter_cls
""")

REWARD = _names("""
    code_url use_local judge_prompt judge_model_type judge_model_name judge_api_url judge_api_key format_pattern
    reward_type response_length_penalty_coef query_filter_config response_filter_config reward_manager_config
""")

AGENTIC = _names("""
    custom_envs train_env_manager val_env_manager render_save_dir reward_normalization env_monitor dirty_data_mask
    open_feedback_turn use_token_reward batch_adjust_mode episode_reward_weight step_reward_weight step_reward_gamma
    ratio_type exp_mode partial_gpu_mode parse_tool_call_parameter_to_dict skip_mock_system_prompt
""")

RLVR = _names("""
    global_template tag_to_template dataset_filter num_return_sequences_in_group save_logging_board_dir validation
    rewards reward_model difficulty_loss_weight length_loss_weight postive_loss_coef use_topr_neg_loss_coef
    use_policy_loss_type use_topr_loss rl_loss_coef importance_sampling val_greedy val_n_sample max_len_mask mask_type
    difficulty_mask balance_length minibatch_data_iter_num difficulty_low_threshold difficulty_high_threshold
    error_max_len_clip error_max_len_threshold
""")

DPO = _names("""
    global_template max_grad_norm pretrain validation actor_train reference ipo beta label_smoothing chosen_key
    rejected_key
""")

SFT = _names("""
    global_template pretrain system_key prompt_key query_key response_key validation sft_train max_grad_norm
""")

DISTILL = _names("""
    student_pretrain teacher_pretrain student teacher validation question_key answer_key logits_topk
    distill_loss_weight kd_temperature teacher_temperature kd_objective adaptive_kl_alpha skew_lambda
    distill_on_prompt max_grad_norm logits_transfer_backend
""")

PIPELINES: dict[str, frozenset[str]] = {
    "agentic": BASE | PPO | AGENTIC,
    "rlvr": BASE | PPO | RLVR,
    "dpo": BASE | DPO,
    "sft": BASE | SFT,
    "distill": BASE | DISTILL,
}
ARGUMENTS = {
    "model_args": MODEL,
    "data_args": DATA,
    "generating_args": GENERATING,
    "training_args": TRAINING,
    "strategy_args": frozenset({"strategy_name", "strategy_config"}),
}
ROLES = _names("actor_train actor_infer critic reference reward reward_model student teacher validation")
MANAGERS = _names("train_env_manager val_env_manager")


def find_unknown(pipeline: str, path: KeyPath) -> KeyPath | None:
    """Return the start of a key that ROLL does not read, if so. path: with uniform names of roles."""
    first, *rest = path
    if first not in PIPELINES[pipeline] | ROLES:
        return (first,)
    is_named = first == "rewards" or (first == "teacher" and bool(rest) and rest[0] not in WORKER)
    names = rest[1:] if is_named else rest
    known = _keys_of(first)
    if known is None or not names:
        return None
    start = len(path) - len(names)
    if names[0] not in known:
        return path[: start + 1]
    arguments = ARGUMENTS.get(names[0])
    return path[: start + 2] if arguments and len(names) > 1 and names[1] not in arguments else None


def _keys_of(table: str) -> frozenset[str] | None:
    """Return the keys of a table; None: free, or a value."""
    if table in MANAGERS:
        return WORKER | MANAGER
    if table in ("rewards", "reward"):
        return WORKER | REWARD | {"llm_proxy"}
    if table == "reward_normalization":
        return NORMALIZATION
    return WORKER if table in ROLES else None
