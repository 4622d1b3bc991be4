"""What gated delta rules of fla, vLLM and SGLang give, by their contracts: gates raw or not, packed rows, trees."""

import torch
from models_of_peers import Arguments, Contract, Outcome, Row, numbers, per_head, run, shaped, softplus, tokens_of_rows
from torch import Tensor

BUFFER = "intermediate_states_buffer"


def rule(contract: Contract, pool: str, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What a gated delta rule of this contract gives: outputs (B, T, HV, V), states (HV, V, K). pool: an argument."""
    states, values = arguments[pool], values_of(arguments, arguments[pool].shape, dtype)
    outcome = run(
        contract(arguments),
        torch.zeros_like(values["v"]),
        lambda slot: torch.zeros(states.shape[1:], dtype=dtype) if slot is None else states[slot].to(dtype),
        lambda s, token, _: one_token(s, {name: value[token] for name, value in values.items()}),
    )
    return shaped(outcome, arguments["v" if "v" in arguments else "out"].shape)


def values_of(arguments: Arguments, states: torch.Size, dtype: torch.dtype) -> Arguments:
    """q, k, v, decay and beta (tokens, heads, ...) of every token."""
    HV, V, K = states[1:]
    parts = [arguments.get(name) for name in "qkv"]
    if "mixed_qkv" in arguments:
        keys = (arguments["mixed_qkv"].shape[1] - HV * V) // 2
        parts = arguments["mixed_qkv"].split([keys, keys, HV * V], 1)
    tokens = parts[2].numel() // (HV * V)
    q, k, v = (part.to(dtype).reshape(tokens, -1, size) for part, size in zip(parts, (K, K, V), strict=True))
    if arguments["use_qk_l2norm_in_kernel"]:
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    scale = arguments.get("scale")
    q = q * (K**-0.5 if scale is None else scale)
    return {"q": q, "k": k, "v": v, **gates_of(arguments, (tokens, HV), dtype)}


def gates_of(arguments: Arguments, sizes: tuple[int, int], dtype: torch.dtype) -> Arguments:
    """decay (tokens, HV, 1 or K) and beta (tokens, HV): raw with A_log, or as fla says, else as they
    are, one as logarithm."""
    raw = arguments.get("A_log") is not None
    named = {name: arguments.get(name) for name in (("a", "b") if "b" in arguments else ("g", "beta"))}
    g, beta = (torch.zeros(sizes) + fill if t is None else t for t, fill in zip(named.values(), (0, 1), strict=True))
    g, beta = g.to(dtype).reshape(*sizes, -1), beta.to(dtype).reshape(sizes)
    if raw:
        bias = 0 if arguments.get("dt_bias") is None else arguments["dt_bias"].to(dtype).reshape(sizes[1], -1)
        g, A, lower = g + bias, torch.exp(arguments["A_log"].to(dtype).reshape(-1, 1)), arguments.get("lower_bound")
        g = -A * softplus(g) if lower is None else lower / (1 + torch.exp(-A * g))
    if arguments.get("use_beta_sigmoid_in_kernel", raw):
        beta = 1 / (1 + torch.exp(-beta))
    return {"decay": torch.exp(g), "beta": beta}


def raw_kda(contract: Contract, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What the delta rules of vLLM's Kimi layers give, which have their own names for gates and blocks."""
    names = {"raw_g": "a", "raw_beta": "b", "state_indices": "ssm_state_indices"}
    arguments = {names.get(name, name): value for name, value in arguments.items()}
    if arguments.get("out") is None:
        arguments["out"] = arguments["a"].new_empty(*arguments["b"].shape, arguments["initial_state"].shape[2])
    return rule(contract, "initial_state", {**arguments, "use_qk_l2norm_in_kernel": True}, dtype)


def one_token(s: Tensor, values: Arguments) -> tuple[Tensor, Tensor]:
    """The output (HV, V) of a token, and the state (HV, V, K) after it."""
    q, k = (per_head(values[name], len(s))[:, None] for name in "qk")  # (HV, 1, K)
    s = s * values["decay"][:, None]
    new = values["beta"][:, None] * (values["v"] - (s * k).sum(-1))  # (HV, V)
    s = s + new[..., None] * k
    return (s * q).sum(-1), s


def packed_decode(null: int, arguments: Arguments) -> list[Row]:
    """One token per row. Rows whose slot is negative or `null` do nothing."""
    rows = [Row([b], slot) for b, (slot,) in enumerate(numbers(arguments["ssm_state_indices"])) if slot > null]
    for row in rows:
        row.store(0, "initial_state", row.start)
    return rows


def vllm(arguments: Arguments) -> list[Row]:
    """Rows in block 0, or in none, do nothing. A table has a block for every token, a list one for the last state."""
    v, accepted, indices = arguments["v"], arguments.get("num_accepted_tokens"), arguments["ssm_state_indices"]
    rows = []
    for b, tokens in enumerate(tokens_of_rows(len(v), v.shape[1], arguments.get("cu_seqlens"))):
        blocks = numbers(indices)[b]
        start = blocks[0 if accepted is None else int(accepted[b]) - 1]
        if start <= 0:
            continue
        rows.append(row := Row(tokens, start))
        for t in range(len(tokens)) if indices.dim() == 2 else [len(tokens) - 1] if tokens else []:
            target = blocks[t] if indices.dim() == 2 else start
            if target > 0:
                row.store(t, "initial_state", target)
    return rows


def sglang(arguments: Arguments) -> list[Row]:
    """Rows with a negative slot start from zero and store nothing. The buffer receives every state of its row."""
    v, tree, buffer_rows = (arguments.get(n) for n in ("v", "retrieve_parent_token", "intermediate_state_indices"))
    rows = []
    for b, tokens in enumerate(tokens_of_rows(len(v), v.shape[1], arguments.get("cu_seqlens"))):
        slot = int(arguments["initial_state_indices"][b])
        rows.append(row := Row(tokens, slot if slot >= 0 else None))
        row.parents = None if tree is None else [-1, *tree[b, 1 : len(tokens)].tolist()]
        if slot < 0:
            continue
        place = b if buffer_rows is None else int(buffer_rows[b])
        for t in range(len(tokens)) if arguments.get(BUFFER) is not None and place >= 0 else ():
            row.store(t, BUFFER, place, t)
        if tokens and not arguments.get("disable_state_update"):
            row.store(len(tokens) - 1, "initial_state_source", slot)
    return rows
