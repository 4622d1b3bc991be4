"""Mutants of kernels that an interpreter or a compiler shows on a CPU: masks, strides, scales, rings, trees."""

from mutants import Mutant

ACCURATE = "kernels: output and state"
PADDING, KEPT = "kernels: a padding row gives zero", 'kernels: with padding="keep"'
PACKED, SEVERAL = "kernels: packed rows", "kernels: T tokens at once"
TREE, INVALID = "kernels: a token of a draft tree", "kernels: a token whose parent is invalid"
SNAPSHOTS, APPENDED = "kernels: snapshots hold", "kernels: replay writes no state"
ROLLED_BACK = "test_conv1d.py::test_kernels_roll_back_and_go_round_rings_as_the_reference_does[3-False-cpu]"

# fmt: off
MUTANTS = (
    # programs, tokens and slots
    Mutant("every program has the first rows of a head", "kernels/addressing.py",
           "return pid // (H * tiles), pid // tiles % H, pid % tiles * BLOCK_ROWS",
           "return pid // (H * tiles), pid // tiles % H, pid % tiles * 0", f"{ACCURATE} | mamba2_step"),
    Mutant("of the tokens that no row has, those in front of all rows are not counted", "kernels/addressing.py",
           "for index in range(b, start + tokens - end, batch):", "for index in range(b, tokens - end, batch):",
           f"{PACKED} | mamba2_step"),
    Mutant("padding loses the output of tokens past the longest row", "kernels/addressing.py",
           'goes = tl.where(live, mask, False) if PADDING == "keep" else mask', "goes = mask",
           "test_gated_delta_states.py -k test_a_packed_row_longer_than_max_len_is_cut and keep and interpreter"),
    Mutant("the null slot is a slot", "kernels/slots.py",
           "(slot == null) | (slot >= num_slots) | (slot < 0)", "(slot >= num_slots) | (slot < 0)",
           f"{PADDING} | gated_delta_step"),
    Mutant("a slot past the pool is not noted", "kernels/slots.py",
           "mask=(number >= num_slots) & (number != null))", "mask=number != number)",
           "kernels: a write slot that is null | mamba3_step"),
    Mutant("more accepted than there are slots are as many", "kernels/slots.py",
           "        inside = (accepted >= 1) & (accepted <= width)\n",
           "        inside = accepted >= 1\n        accepted = tl.minimum(accepted, width)\n",
           "kernels: a row with n slots | mamba2_step"),
    Mutant("all tokens write the first slot of their row", "kernels/slots.py",
           "tl.load(table_entry(table_ptr, b, stride, column), mask=goes, other=-1)",
           "tl.load(table_entry(table_ptr, b, stride, column * 0), mask=goes, other=-1)",
           "kernels: a state written after every token | mamba2_step"),
    Mutant("a list of rows of snapshots is not looked at", "kernels/slots.py",
           "row = b.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + b).to(tl.int64)",
           "row = b.to(tl.int64)", f"{SNAPSHOTS} | mamba2_step"),
    Mutant("every parent is the token before", "kernels/slots.py",
           "follows = parent_of(parents, b, t) == t - 1", "follows = parent_of(parents, b, t) >= 0",
           f"{TREE} | mamba2_step"),
    Mutant("a token whose ancestor has an invalid parent has a path", "kernels/slots.py",
           "return tl.where(parent == -1, count, 0)", "return count", f"{INVALID} | mamba2_step"),
    Mutant("slots share the seed of the state", "kernels/slots.py",
           "return tl.load(seed_ptr) + slot * FROM_SLOT_TO_SLOT", "return tl.load(seed_ptr) + slot * 0",
           "test_shared_seeds.py -k test_one_seed_gives_the_bytes and mamba2_step and interpreter"),
    # convolutions
    Mutant("a window is rolled back by one entry too many", "kernels/conv1d.py",
           "first = accepted - (WIDTH - 1 - HISTORY)", "first = accepted - (WIDTH - HISTORY)", ROLLED_BACK),
    Mutant("a longer window takes in the token behind", "kernels/conv1d.py",
           "first + source - length, x_channel, channels, from_token", "first + source - length + 1, x_channel, "
           "channels, from_token", f"{ACCURATE} | conv1d_step"),
    Mutant("a path of a tree misses the last entry of the window", "kernels/conv1d.py",
           "tl.where(count - 1 - i == generation - depth, initial[i], value)",
           "tl.where(count - 2 - i == generation - depth, initial[i], value)", f"{TREE} | conv1d_step"),
    Mutant("filters are turned round", "kernels/conv1d.py",
           "y = tl.fma(weights[i], u[i], y)", "y = tl.fma(weights[len(u) - 1 - i], u[i], y)",
           f"{ACCURATE} | conv1d_step"),
    Mutant("channels of x lie side by side", "kernels/conv1d.py",
           "return tl.load(channels_at(row, channels, stride_c, ROWS), mask=",
           "return tl.load(channels_at(row, channels, 1, ROWS), mask=",
           "test_compat_contracts.py -k every_call_gives_what_the_contract_says and conv and interpreter"),
)
