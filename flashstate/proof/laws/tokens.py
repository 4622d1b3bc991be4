"""Laws of several tokens per call: packed rows, a state after every token, draft trees."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashstate.proof import AnyCase, Inputs, oracle
from flashstate.proof.laws import require
from flashstate.proof.laws.registry import law
from flashstate.proof.laws.steps import make_snapshots, several, stores_every_token, writes_elsewhere
from flashstate.state.formats import decode


@law(
    "T tokens at once equal T calls, bit for bit while the state is float32; it is rounded once, when it is stored",
    includes=lambda case: several(case) and not case.op.rings,
)
def tokens_at_once(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    slots, state, want = inputs.slots.long(), inputs.state, oracle(inputs)
    single = inputs.fresh()
    data = decode(single.state.data, single.state.scale)
    single.state = replace(single.state, data=data, scale=None, rounding="nearest")
    outputs = [single.of_tokens(t).step() for t in range(case.tokens)]
    y = inputs.step()
    if inputs.op.exact_at_once:
        require.equal_bytes("outputs", y, torch.stack(outputs, 1))
    if inputs.op.stored_at_once:
        require.stored("the pool", state, slots, single.state.data[slots], state, slots, case.tokens - 1)
    else:
        require.within_budget("the pool", inputs.states, single.state.data[slots].double(), want.state_plain)
    require.equal_states("the batch", state, single.state, slots, besides=("data", "scale"))


@law(
    "packed rows of any length, none among them, equal the same rows alone; tokens no row has give zero",
    includes=lambda case: case.packed,
)
def packed_equals_dense(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    packed = inputs.fresh()
    y = packed.step()
    require.that(bool((y[sum(case.lengths) :] == 0).all()), "the output of a token that no row has is not zero")
    none = inputs.fresh()
    y_of_none = none.step(slots=none.at(cu_seqlens=none.slots.new_ones(case.batch + 1)))
    require.that(not bool(y_of_none.any()), "the output of packed rows, none of which has a token, is not zero")
    require.equal_states("rows without tokens", none.state, inputs.state)
    for row, got in enumerate(packed.per_row(y)):
        alone, slot = inputs.fresh().dense_row(row), inputs.slots[row : row + 1].long()
        if case.same_when_packed(len(got)):
            require.equal_bytes(f"output of row {row}", got, alone.step()[0])
            require.equal_states(f"row {row}", packed.state, alone.state, slot)
        elif len(got):
            want = oracle(alone)
            require.within_budget(f"output of row {row}", got, want.y, want.y_plain)
            require.within_budget(f"row {row}", packed.states[row : row + 1], want.state, want.state_plain)


@law(
    "a state written after every token to a slot of its own is what a call that ends there stores",
    includes=stores_every_token,
)
def per_token_writes(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    extra = case.batch * case.tokens
    run = inputs.fresh(extra)
    write = torch.arange(case.slots, case.slots + extra, device=device).reshape(case.batch, case.tokens)
    write[0, 0], write[-1, -1] = -1, case.slots + extra  # one token skipped, one past the pool
    y = run.step(slots=run.at(write=write))
    require.fault("write")
    require.equal_states("slots that are read", run.state, inputs.state, torch.arange(case.slots, device=device))
    for t in range(case.tokens):
        ends = inputs.fresh()
        prefix = ends.of_tokens(slice(0, t + 1))
        require.equal_bytes(f"outputs up to token {t}", y[:, : t + 1], prefix.step())
        goes = (write[:, t] >= 0) & (write[:, t] < case.slots + extra)
        at, kept = (write[goes, t], inputs.slots[goes].long()), inputs.op.left_alone
        require.equal_states(f"token {t}", run.state, ends.state, *at, besides=kept)


@law(
    "snapshots hold the state after every token, in any format, at their rows, and change nothing else",
    includes=lambda case: case.op.between_tokens,
)
def snapshots_of_every_token(case: AnyCase, device: torch.device, exact: Inputs) -> None:
    plain, read = exact.fresh(), exact.slots.long()
    y = plain.step()
    rows = torch.arange(case.batch + 1, 1, -1, device=device)  # none at its own place, but perhaps one
    most_exact, *formats = case.snapshot_formats
    truth = make_snapshots(case, *most_exact, device)
    for update in (True, False):
        run = exact.fresh()
        y_taken = run.step(slots=run.at(snapshot_rows=rows), snapshots=truth.data, update=update)
        require.alike("", run, y_taken, plain if update else exact, y)
    for name, rounding in dict.fromkeys(formats):
        taken = make_snapshots(case, name, rounding, device)
        before = taken.data.clone()
        y_taken = exact.step(slots=exact.at(snapshot_rows=rows), snapshots=taken, update=False)
        require.equal_bytes(f"output with snapshots in {name}", y_taken, y)
        for t in range(case.tokens or 1):
            has = exact.tokens > t
            values = truth.data[rows[has], t]
            require.stored(f"token {t} in {name}", taken, (rows[has], t), values, exact.state, read[has], t)
            require.equal_bytes("snapshots of ended rows", taken.data[rows[~has], t], before[rows[~has], t])
        others = ~torch.isin(torch.arange(case.batch + 2, device=device), rows)
        require.equal_bytes("other rows of the snapshots", taken.data[others], before[others])
        if (name, rounding) == (case.format, case.rounding):  # the last one of a row is what the call left in the pool
            has, pool = exact.stores, replace(plain.state, data=case.snapshot_of(plain.state.data))
            require.equal_states("the last snapshots", taken, pool, (rows[has], exact.tokens[has] - 1), read[has])


@law(
    "a row with n slots to read reads the one its accepted count names, and is padding if there is none",
    includes=writes_elsewhere,
)
def accepted_slots(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    n = 3
    accepted = torch.arange(case.batch, device=device) % n + 1
    read = torch.full((case.batch, n + 1), case.slots, device=device)[:, :n].to(inputs.slots)  # past the pool
    read[torch.arange(case.batch, device=device), accepted - 1] = inputs.slots
    chosen, plain = inputs.fresh(), inputs.fresh()
    y = chosen.step(slots=chosen.at(read=read, accepted=accepted))
    require.alike("", chosen, y, plain, plain.step())
    read[0] = inputs.slots[0]
    for count in (0, -1, n + 1):
        accepted[0] = count
        run = inputs.fresh()
        first = run.per_row(run.step(slots=run.at(read=read, accepted=accepted)))[0]
        require.that(bool((first == 0).all()), f"a row with accepted = {count} is not padding")
        require.equal_states("its slot", run.state, inputs.state, inputs.slots[:1].long())
        require.fault("accepted" if count > n else None)


TREE = (-1, 0, 0, 2, -1, 4, 3, 5)  # a trunk that forks, and a second root


@law(
    "a token of a draft tree gives what its path from the root alone gives, and its state too",
    includes=lambda case: several(case) and case.op.between_tokens and case.tokens <= len(TREE),
)
def draft_tree(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    parents = torch.tensor(TREE[: case.tokens], device=device).repeat(case.batch, 1)
    taken, chain = (make_snapshots(case, case.format, "nearest", device) for _ in range(2))
    y = inputs.step(slots=inputs.at(parents=parents), snapshots=taken, update=False)
    for t in range(case.tokens):
        path = [t]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        alone = inputs.fresh().of_tokens(path)
        y_alone = alone.step(update=False, snapshots=chain)
        require.equal_bytes(f"output of token {t}", y[:, t], y_alone[:, -1])
        batch = torch.arange(case.batch, device=device)
        require.equal_bytes(f"state after token {t}", taken.data[batch, t], chain.data[batch, len(path) - 1])


@law(
    "a token whose parent is invalid gives zero and stores nothing, and so does what follows from it",
    includes=lambda case: stores_every_token(case) and case.op.between_tokens and case.tokens >= 3,
)
def invalid_parents(case: AnyCase, device: torch.device, inputs: Inputs) -> None:
    parents = (torch.arange(case.tokens, device=device) - 1).repeat(case.batch, 1)
    extra = case.batch * case.tokens
    write = torch.arange(case.slots, case.slots + extra, device=device).reshape(case.batch, case.tokens)
    plain = inputs.fresh(extra)
    want = plain.step(slots=plain.at(write=write, parents=parents))
    for wrong in (1, -2, case.tokens, 1 << 40):
        parents[0, 1] = wrong
        run = inputs.fresh(extra)
        before = run.fresh()
        y = run.step(slots=run.at(write=write, parents=parents))
        require.that(bool((y[0, 1:] == 0).all()), f"a token with parent {wrong} gives an output")
        require.equal_bytes("the token before", y[0, 0], want[0, 0])
        require.equal_bytes("the other rows", y[1:], want[1:])
        require.equal_states("their slots", run.state, before.state, write[0, 1:])
        require.equal_states("the other slots", run.state, plain.state, write[1:].flatten())
