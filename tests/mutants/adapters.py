"""Mutants of other libraries' signatures: compat/ and integrations/."""

from mutants import Mutant

# fmt: off
MUTANTS = (
    # compat/
    Mutant("a list of one column is not a table", "compat/shapes.py",
           "        numbers = numbers[:, None]\n", "        numbers = numbers[None]\n",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[vllm.selective_state_update-in "
           "place-reference]"),
    Mutant("outputs of half the batch come back in another shape", "compat/shapes.py",
           "return y.reshape(like.shape) if out is None else out", "return y if out is None else out",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[mamba_ssm.selective_state_update-headless, in order-reference]"),
    Mutant("channels are taken for tokens", "compat/shapes.py",
           "return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor", "return tensor",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[causal_conv1d.causal_conv1d_update-several tokens, channels first-reference]"),
    Mutant("the activation swish is none", "compat/shapes.py",
           'activation in ("silu", "swish"):', 'activation in ("silu",):',
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[causal_conv1d.causal_conv1d_update-several tokens, channels first-reference]"),
    Mutant("a new seed is drawn once for all calls", "compat/shapes.py",
           "seed = torch.randint(-(1 << 62), 1 << 62, (), device=state.device)",
           "seed = torch.full((), 7, dtype=torch.int64, device=state.device)",
           "test_compat_contracts.py::test_random_bits_follow_from_the_seed_and_differ_from_slot_to_slot"
           "[vllm.selective_state_update-stochastic, in place-reference]"),
    Mutant("the root of a tree has what its table says", "compat/trees.py",
           "return torch.where(shapes.first_numbers(tokens, device) > 0, table, -1)", "return table",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[sglang.selective_state_update-a "
           "tree-reference]"),
    Mutant("siblings far from the first have no parent", "compat/trees.py",
           "for _ in range(max(tokens - 1, 1).bit_length()):", "for _ in range(1):",
           "test_compat_rules.py::test_parents_are_found_of_first_children_and_next_siblings"),
    Mutant("a ring of causal_conv1d is a window", "compat/causal_conv1d.py",
           "bias=bias, positions=cache_seqlens)", "bias=bias)",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[causal_conv1d.causal_conv1d_update-a ring, channels first-reference]"),
    Mutant("q and k of a packed projection are exchanged", "compat/delta.py",
           "q, k, v = mixed.split(", "k, q, v = mixed.split(",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[vllm_delta.fused_recurrent_gated_delta_rule_packed_decode--reference]"),
    Mutant("a missing beta is 0", "compat/fla.py",
           "b = delta.one_gate(v, 1.0) if beta", "b = delta.one_gate(v, 0.0) if beta",
           "test_compat_fla.py::test_every_call_gives_outputs_and_states_and_changes_nothing"
           "[fla.fused_recurrent_gated_delta_rule-no gates-reference]"),
    Mutant("final states of fla have values first", "compat/fla.py",
           "State((final if v_first else final.mT)[:, None])", "State(final.mT[:, None])",
           "test_compat_fla.py::test_every_call_gives_outputs_and_states_and_changes_nothing"
           "[fla.fused_recurrent_gated_delta_rule-one token, states transposed-reference]"),
    Mutant("the initial state of fla is changed", "compat/fla.py",
           "state = final = initial.to(torch.float32, copy=True, memory_format=torch.contiguous_format)",
           "state = final = initial.to(torch.float32, memory_format=torch.contiguous_format)",
           "test_compat_fla.py::test_every_call_gives_outputs_and_states_and_changes_nothing"
           "[fla.fused_recurrent_gated_delta_rule-several tokens-reference]"),
    Mutant("the logit of beta is never asked for in fla's KDA", "compat/fla.py",
           'qk_l2norm=use_qk_l2norm_in_kernel, b_logit=logit, A_log=delta.of_heads("A_log", A_log, HV) if raw else '
           'None,\n        dt_bias=delta.of_heads("dt_bias", dt_bias, HV, K)',
           'qk_l2norm=use_qk_l2norm_in_kernel, A_log=delta.of_heads("A_log", A_log, HV) if raw else None,\n'
           '        dt_bias=delta.of_heads("dt_bias", dt_bias, HV, K)',
           "test_compat_fla.py::test_every_call_gives_outputs_and_states_and_changes_nothing"
           "[fla.fused_recurrent_kda-one token, a raw decay-reference]"),
    Mutant("FlashInfer's padding gives zero", "compat/flashinfer.py",
           'null=null, padding="fresh",', "null=null,",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer.selective_state_update-padding, in place, one token-reference]"),
    Mutant("FlashInfer's pad_slot_id is -1 whatever is asked", "compat/flashinfer.py",
           "max_len=None if bounds is None else steps, null=null",
           "max_len=None if bounds is None else steps, null=-1",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer.selective_state_update-padding, elsewhere, one token-reference]"),
    Mutant("FlashInfer's buffer lets the state move on", "compat/flashinfer.py",
           "update = snapshots is None and not disable_state_update", "update = not disable_state_update",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer.selective_state_update-padding, a buffer, one token-reference]"),
    Mutant("rows of FlashInfer's buffer are those of the batch", "compat/flashinfer.py",
           "    if snapshot_rows is None and keeps:", "    if False:",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer.selective_state_update-padding, a buffer, one token-reference]"),
    Mutant("FlashInfer's states of (K, V) are taken as (V, K)", "compat/flashinfer_delta.py",
           "y, _ = _delta_step(state.mT, q", "y, _ = _delta_step(state, q",
           "test_compat_rules.py::test_flashinfer_decodes_states_of_either_layout[reference]"),
    Mutant("several tokens of FlashInfer move the pool on unless told not to", "compat/flashinfer_delta.py",
           "not (disable_state_update is None or _disabled(disable_state_update))",
           "not _disabled(disable_state_update or False)",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer_delta.gated_delta_rule_mtp-output alone, 1 tokens-reference]"),
    Mutant("the last of FlashInfer's states for every token stays where it is", "compat/flashinfer_delta.py",
           "if every is not None and write is not None and write is not read and batch > 0:", "if False:",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer_delta.gated_delta_rule_mtp-every token, the last also elsewhere, 2 tokens-reference]"),
    Mutant("a last state without a place of its own has none elsewhere", "compat/flashinfer_delta.py",
           "if write is not None and write is not read:", "if False:",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer_delta.gated_delta_rule_mtp-every token, the last also elsewhere, 3 tokens-reference]"),
    Mutant("the last state of a skipped row is written", "compat/flashinfer_delta.py",
           "torch.where(live, every[:, -1], -1)", "every[:, -1]",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer_delta.gated_delta_rule_mtp-every token, the last also elsewhere, 2 tokens-reference]"),
    Mutant("the last state goes where it was read", "compat/flashinfer_delta.py",
           "write is not None and write is not read and batch > 0", "write is not None and batch > 0",
           "test_compat_rules.py::"
           "test_flashinfer_keeps_states_of_every_token_alone_where_the_last_would_go_where_it_was_read"),
    Mutant("skipped rows of several tokens give zero in a given output", "compat/flashinfer_delta.py",
           'return "zero" if output is None or steps == 1 else "keep"', 'return "zero"',
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer_delta.gated_delta_rule_mtp-a row skipped, 2 tokens, output given-reference]"),
    Mutant("the window of a ring is its length", "compat/flashinfer_replay.py",
           "found = length - longest if window is None else window",
           "found = length - 1 if window is None else window",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer_replay.checkpointing_ssu-in order-reference]"),
    Mutant("checkpointing_ssu takes softplus for granted", "compat/flashinfer_replay.py",
           "**shapes.fitted(MAMBA2_REPLAY, **given), dt_softplus=dt_softplus, plan=plan",
           "**shapes.fitted(MAMBA2_REPLAY, **given), plan=plan",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[flashinfer_replay.checkpointing_ssu-one token, no softplus-reference]"),
    Mutant("mamba_ssm's B and x are stored whatever is asked", "compat/mamba_ssm.py",
           '"update_kv": update_kv_state', '"update_kv": True',
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[mamba_ssm.mamba3_step_fn-in "
           "order, int32, here, rank 2-reference]"),
    Mutant("what goes to state_out is stepped from what was there", "compat/mamba_ssm.py",
           "        shapes.copy_slots(state_out, indices, state, indices)\n", "        pass\n",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[mamba_ssm.mamba3_step_fn-indexed, "
           "int32, elsewhere, rank 2-reference]"),
    Mutant("SGLang's convolution rolls back with one input more", "compat/sglang.py",
           "history=width - 2 if rolls_back else None", "history=width - 1 if rolls_back else None",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[sglang.causal_conv1d_update-accepted counts, channels first-reference]"),
    Mutant("SGLang's tree is not written", "compat/sglang.py",
           "        retrieve_parent_token[:batch, :steps].copy_(parents)\n", "        pass\n",
           "test_compat_rules.py::test_a_convolution_writes_the_parents_of_its_tree[reference]"),
    Mutant("SGLang's buffer has rows of the batch", "compat/sglang.py",
           "rows = read if rows is None and buffer is not None else rows", "rows = rows",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[sglang.selective_state_update-verify, an output given-reference]"),
    Mutant("SGLang's tokens on two axes come back on one", "compat/sglang_delta.py",
           "return y.reshape(shape)", "return y",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[sglang_delta.fused_sigmoid_gating_delta_rule_update-packed on two axes-reference]"),
    Mutant("states whose axes are called (K, V) are refused for SGLang", "compat/sglang_delta.py",
           "sizes[::-1]) if swapped else pool", "sizes[::-1]) if False else pool",
           "test_compat_rules.py::test_sglang_reads_states_in_the_order_v_k_whatever_their_axes_are_called[reference]"),
    Mutant("a long state is taken for that of SGLang's function in Triton", "compat/sglang.py",
           "if window.shape[2] > width - 1 and not ring and not of_triton:", "if False:",
           "test_compat_refusals.py::test_what_does_not_fit_is_refused -k SGLang"),
    Mutant("vLLM's packed tokens have no bound for going at once", "compat/vllm_delta.py",
           "max_len=shapes.most_at_once(cu_seqlens, exact) if write is None else None", "max_len=None",
           "test_compat_rules.py::test_several_tokens_go_through_tensor_cores_at_once_for_callers_who_ask_for_it"),
    Mutant("FlashInfer's tokens do not go at once", "compat/flashinfer.py",
           "dt_softplus=dt_softplus, exact=exact, slots=slots", "dt_softplus=dt_softplus, slots=slots",
           "test_compat_rules.py::test_several_tokens_go_through_tensor_cores_at_once_for_callers_who_ask_for_it"),
    Mutant("an error names a shape with an axis that was put in", "compat/shapes.py",
           "check_tensor(name, given[name], named", "check_tensor(name, tensor, named",
           "test_compat_refusals.py::test_what_is_no_such_tensor_is_refused -k headless"),
    Mutant("SGLang's verified drafts move the pool on", "compat/sglang_delta.py",
           "slots=slots, update=not frozen,", "slots=slots, update=tree is None,",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[sglang_delta.fused_sigmoid_gating_delta_rule_update-verify-reference]"),
    Mutant("vLLM's null block is read", "compat/vllm.py",
           "read if chosen else read[:, 0], write=write, accepted=accepted, cu_seqlens=cu_seqlens, null=null,",
           "read if chosen else read[:, 0], write=write, accepted=accepted, cu_seqlens=cu_seqlens,",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[vllm.selective_state_update-null "
           "block 0, in place-reference]"),
    Mutant("counts of 0 are padding for vLLM", "compat/vllm.py",
           "at_least_one=chosen,\n", "\n",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[vllm.selective_state_update-accepted counts out of range-reference]"),
    Mutant("vLLM's last scheduled block is that which was read", "compat/vllm.py",
           'write = _column_of(table, "block_idx_last_scheduled_token", block_idx_last_scheduled_token)',
           'write = _column_of(table, "initial_state_idx", initial_state_idx)',
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[vllm.causal_conv1d_update-blocks "
           "to read and to write, channels first-reference]"),
    Mutant("vLLM's convolution leaves x as it is", "compat/vllm.py",
           "width, out = weight.shape[1], x if out is None else out",
           "width, out = weight.shape[1], x.clone() if out is None else out",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[vllm.causal_conv1d_update-one "
           "token, channels first-reference]"),
    Mutant("vLLM's table of blocks is not written", "compat/vllm_delta.py",
           "if update and isinstance(indices, Tensor) and indices.dim() == 2:", "if False:",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[vllm_delta.fused_sigmoid_gating_delta_rule_update-blocks-reference]"),
    Mutant("vLLM's KDA is not normalised unless asked", "compat/vllm_delta.py",
           "use_qk_l2norm_in_kernel: bool = True,", "use_qk_l2norm_in_kernel: bool = False,",
           "test_compat_contracts.py::test_signatures_are_those_of_peers[vllm_delta.fused_recurrent_kda]"),
    Mutant("a lower bound is taken of gates without their bias", "compat/vllm_kda.py",
           "a = a.float() if dt_bias is None else a.float() + dt_bias.float()", "a = a.float()",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[vllm_kda.fused_recurrent_kda-a "
           "token each, a lower bound-reference]"),
    Mutant("Kimi's raw beta is beta itself", "compat/vllm_kda.py",
           'more = {"b_logit": True, "qk_l2norm": True}', 'more = {"qk_l2norm": True}',
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says[vllm_kda.fused_recurrent_kda-a "
           "token each, a lower bound-reference]"),
    Mutant("a flushed buffer is folded one token short", "compat/vllm_replay.py",
           'mamba2_fold(stored, longer, tensors["A"], slots=folding)',
           'mamba2_fold(stored, ring, tensors["A"], slots=folding)',
           "test_compat_replay.py::test_a_buffer_is_filled_and_flushed_as_vllm_counts"),
    Mutant("vLLM's trackers stay where they are", "compat/vllm_replay.py",
           "    if plan is not None:\n        ring.commit(plan)\n", "",
           "test_compat_contracts.py::test_every_call_gives_what_the_contract_says"
           "[vllm_replay.selective_state_update_replayssm_flashinfer-one token-reference]"),
    # integrations/transformers
    Mutant("a prompt's state stays in what a call reads second", "integrations/transformers/cache.py",
           "return int(self.prompt > 0)", "return 0",
           "test_transformers_drafts.py::test_prompt_lookup_gives_the_tokens_of_plain_decoding[mamba]"),
    Mutant("seeds do not move on from step to step", "integrations/transformers/store.py",
           "            self.pool.advance(where.states)\n", "            pass\n",
           "test_transformers_formats.py::test_every_step_and_every_row_draws_bits_of_its_own[mamba2-{}]"),
    Mutant("a reset forgets to empty the cache's own counts", "integrations/transformers/cache.py",
           "self.croppable = self.length = 0\n        for", "self.croppable = 0\n        for",
           "test_transformers_generate.py::test_a_static_cache_serves_other_prompts_after_a_reset[qwen3_5]"),
    Mutant("more tokens can be taken back than the last call had", "integrations/transformers/cache.py",
           "if not -self.croppable <= tokens_to_remove <= 0:", "if not -self.format.drafts <= tokens_to_remove <= 0:",
           "test_transformers_refusals.py::test_only_drafts_of_the_last_call_are_taken_back[{}]"),
    Mutant("a static cache takes more tokens than it has room for", "integrations/transformers/cache.py",
           "and self.attention and self.length + tokens > self.longest:",
           "and self.attention and tokens > self.longest:",
           "test_transformers_misuse.py::test_more_tokens_than_a_static_cache_has_room_for_are_refused_before_anythin"
           "g_moves[0]"),
    Mutant("rows that are repeated share their seed", "integrations/transformers/store.py",
           "self.seed[rows] * SPREAD + self.seeds[: len(rows), None]", "self.seed[rows]",
           "test_transformers_formats.py::test_copies_of_a_row_draw_bits_of_their_own[{}]"),
    Mutant("stores of two devices draw equal seeds", "integrations/transformers/cache.py",
           "self.seed + number)", "self.seed)",
           "test_transformers_devices.py::test_stores_draw_other_random_bits_and_a_seed_repeats_them"),
    Mutant("reordered rows keep their attention", "integrations/transformers/cache.py",
           "            (reorder_in_place if self.static else type(layer).reorder_cache)(layer, beam_idx)\n",
           "            pass\n",
           "test_transformers_generate.py::test_beams_and_samples_are_those_of_transformers[qwen3_5-{}]"),
    Mutant("a copy of a cache shares its stores", "integrations/transformers/cache.py",
           "new.stores = {device: store.grown(store.rows, store.seeds) for device, store in self.stores.items()}",
           "new.stores = dict(self.stores)",
           "test_transformers_misuse.py::test_a_copy_of_a_cache_goes_on_alone[mamba2-{}]"),
)
